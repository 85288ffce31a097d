"""Flag weighting against a singular value decomposition of the vectors themselves, in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from optim.codecs import get_codec
from optim.rules.flag import ITERATIONS, NEAR, FlagRule, Matrix, eigen, flag_weights, gram

FP32 = get_codec("fp32")


def reference(vectors: Matrix, weights: list[float]) -> Matrix:
    """The paper's iteration with LAPACK's SVD. vectors (n, c): the contributions."""
    n = len(vectors)
    unit = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    d = np.ones(n)
    for step in range(ITERATIONS + 1):
        y = np.linalg.svd((unit * d[:, None]).T, full_matrices=False)[0][:, :1]
        if step < ITERATIONS:
            distance = 1 - ((unit @ y) ** 2).sum(1)
            d = (np.maximum(distance, 0) + NEAR) ** -0.25
    return y @ (y.T @ (np.array(weights) @ vectors))


def scene(n: int, numel: int, signal: float, seed: int = 0) -> Matrix:
    """n vectors with a common direction of that length beside noise of length 1."""
    random = np.random.default_rng(seed)
    common = random.standard_normal(numel)
    common *= signal / np.linalg.norm(common)
    noise = random.standard_normal((n, numel)) / np.sqrt(numel)
    return (common + noise) * np.linspace(0.5, 2, n)[:, None]


@pytest.mark.parametrize("n", [3, 4, 5, 8, 16])
@pytest.mark.parametrize("signal", [3.0, 1.0])
def test_the_merge_is_the_projection(n: int, signal: float) -> None:
    vectors = scene(n, 5000, signal)
    weights = [(k + 1) / (n * (n + 1) / 2) for k in range(n)]
    wanted = reference(vectors, weights)
    shares = flag_weights(vectors @ vectors.T, weights)
    assert np.linalg.norm(np.array(shares) @ vectors - wanted) <= 1e-6 * np.linalg.norm(wanted)
    encoded = [FP32.encode(torch.from_numpy(v).float()) for v in vectors]
    got = FP32.decode(FlagRule().merge(FP32, encoded, weights, 5000, FP32), 5000).numpy()
    assert np.linalg.norm(got - wanted) <= 1e-3 * np.linalg.norm(wanted)  # K is of rounded values


@pytest.mark.parametrize("name", ["fp32", "int8", "bf16", "int4"])
def test_products_are_those_of_the_decoded_values(name: str) -> None:
    codec, numel = get_codec(name), 70_001
    encoded = [codec.encode(torch.from_numpy(v).float()) for v in scene(3, numel, 1.0)]
    decoded = np.stack([codec.decode(e, numel).double().numpy() for e in encoded])
    wanted = decoded @ decoded.T
    got = gram(codec, encoded, [1 / 3] * 3, numel)
    assert np.array_equal(got, got.T)
    assert np.abs(got - wanted).max() <= 1e-3 * wanted.max()


@pytest.mark.parametrize("scale", [1e-40, 1e-30, 1.0, 1e30])
def test_products_of_any_size(scale: float) -> None:
    """Also of values below fp32's smallest normal number, which count as 0, and of none."""
    vectors = [FP32.encode(torch.tensor([scale, -scale, 0.0])), FP32.encode(torch.zeros(3))]
    products = gram(FP32, vectors, [0.5, 0.5], 3)
    assert products[1, 1] == products[0, 1] == 0
    assert products[0, 0] == pytest.approx(2 * scale**2, rel=1e-3, abs=1e-79)
    assert all(np.isfinite(flag_weights(products, [0.5, 0.5])))


@pytest.mark.parametrize("signal", [0.3, 1.0, 3.0])
def test_a_direction_that_no_other_shares_hardly_counts(signal: float) -> None:
    vectors = scene(8, 20_000, signal)
    other = np.random.default_rng(9).standard_normal(20_000)
    vectors[7] = other * np.linalg.norm(vectors[6]) / np.linalg.norm(other)
    shares = flag_weights(vectors @ vectors.T, [1 / 8] * 8)
    assert abs(shares[7]) < 0.3 / 8
    assert np.linalg.norm(np.array(shares) @ vectors) <= np.linalg.norm(vectors.mean(0)) * (1 + 1e-9)


def test_copies_win_where_honest_peers_agree_little() -> None:
    """Two liars that send the same are nearer to each other than six honest peers are: the result is theirs."""
    vectors = scene(8, 20_000, 0.1)
    vectors[7] = vectors[6] = -vectors[6]
    shares = np.abs(flag_weights(vectors @ vectors.T, [1 / 8] * 8))
    assert shares[6] > 3 * shares[:6].max()


def test_of_two_nothing_is_judged() -> None:
    assert flag_weights(np.array([[1.0, -0.5], [-0.5, 1.0]]), [0.3, 0.7]) == [0.3, 0.7]


def test_a_flipped_sign_is_not_noticed() -> None:
    """A line has no sign: the contribution counts as in the mean, against the others."""
    vectors = scene(8, 5000, 20.0)
    vectors[7] *= -1
    got = np.array(flag_weights(vectors @ vectors.T, [1 / 8] * 8)) @ vectors
    assert np.linalg.norm(got - vectors.mean(0)) < 0.05 * np.linalg.norm(vectors.mean(0))


@pytest.mark.parametrize("n", [1, 2, 3, 7, 16, 64])
def test_eigenvectors_are_lapacks(n: int) -> None:
    random = np.random.default_rng(n)
    half = random.standard_normal((n, n))
    for matrix in (half @ half.T, half[:, :1] @ half[:, :1].T, np.eye(n), np.ones((n, n)), np.zeros((n, n))):
        values, vectors = eigen(matrix)
        assert np.abs(values - np.linalg.eigvalsh(matrix)[::-1]).max() <= 1e-12 * max(1.0, values[0])
        assert np.abs(vectors.T @ vectors - np.eye(n)).max() < 1e-12
        assert np.abs(vectors * values @ vectors.T - matrix).max() <= 1e-12 * max(1.0, values[0])
