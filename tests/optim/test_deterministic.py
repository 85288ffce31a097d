"""Results with the same bits on every CPU: sums in a fixed order, powers, and the integer transform."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from optim.algorithms.dct_tiles import BITS, Tiling, _basis, from_cosines
from optim.deterministic import norm, ordered_sum, power, square_root, square_sum


def by_hand(values: list[float]) -> float:
    """Sum in `ordered_sum`'s order with Python's own additions."""
    while len(values) > 1:
        lower = (len(values) + 1) // 2
        values = [a + b for a, b in zip(values, values[lower:], strict=False)] + values[len(values) - lower : lower]
    return values[0] if values else 0.0


@given(st.lists(st.floats(-1e6, 1e6), max_size=40))
def test_sums_follow_the_stated_order(values: list[float]) -> None:
    assert ordered_sum(torch.tensor(values, dtype=torch.float64)) == by_hand(values)


def test_norms() -> None:
    x = torch.randn(200_001)
    exact = math.fsum(v * v for v in x.tolist())
    assert square_sum(x) == pytest.approx(exact, rel=1e-14)
    assert norm(x.view(3, -1)) == pytest.approx(math.sqrt(exact), rel=1e-14)
    assert norm(torch.full((5,), 1e30)) == pytest.approx(1e30 * math.sqrt(5), rel=1e-6)  # overflows fp32 when squared


@given(st.floats(0.5, 0.9999), st.integers(0, 5000))
def test_powers(base: float, exponent: int) -> None:
    assert power(base, exponent) == pytest.approx(base**exponent, rel=1e-9, abs=1e-300)


def test_roots_are_rounded_correctly() -> None:
    x = torch.rand(10_000)
    assert torch.equal(square_root(x, torch.empty_like(x)), x.double().sqrt().float())


def test_no_cosine_is_near_a_rounding_tie() -> None:
    for n in range(1, 257):
        scaled = _basis(n) * 2.0**BITS
        assert float((scaled - scaled.floor() - 0.5).abs().min()) > 1e-6  # libraries differ by some 1e-9


@pytest.mark.parametrize("shape", [(256, 256), (64, 48), (1, 250), (7, 1)])
def test_the_inverse_transform_is_integer_arithmetic(shape: tuple[int, int]) -> None:
    """Python's integers, which neither overflow nor round, give the same bits, and all stay below 2^53."""
    tiling = Tiling(*shape, 1, 1)
    found = torch.zeros(1, tiling.numel)
    places = torch.randperm(tiling.numel)[: max(1, tiling.numel // 50)]
    found[0, places] = torch.randn(len(places)) * 10.0 ** torch.randint(-3, 4, (len(places),))
    high, wide = ([[int(v) for v in row] for row in (_basis(n) * 2.0**BITS).round().tolist()] for n in shape)

    def narrowed(matrix: list[list[int]]) -> tuple[np.ndarray, float]:
        scale = 2.0 ** (math.floor(math.log2(max(abs(v) for row in matrix for v in row))) + 1 - BITS)
        return np.array([[round(v / scale) for v in row] for row in matrix], dtype=object), scale

    c, first = narrowed(found.view(shape).tolist())
    middle = np.array(high, dtype=object) @ c
    assert max(abs(v) for v in middle.ravel()) < 2**53
    c, second = narrowed(middle.tolist())
    last = c @ np.array(wide, dtype=object).T
    assert max(abs(v) for v in last.ravel()) < 2**53
    expected = (last.astype(np.float64) * (first * second * 2.0 ** (-2 * BITS))).astype(np.float32)
    assert np.array_equal(from_cosines(found, tiling).view(shape).numpy(), expected)


def test_the_integer_transform_is_as_accurate_as_fp32() -> None:
    tiling = Tiling.of((128, 192), 64)
    found = torch.zeros(tiling.size).scatter_(1, torch.randint(0, 4096, (6, 32)), torch.randn(6, 32))
    found[2] = 0
    ours = from_cosines(found, tiling)
    theirs = from_cosines(found.double(), tiling)
    assert float((ours - theirs).abs().max() / theirs.square().mean().sqrt()) < 5e-6
    assert not bool(ours[2].any())  # what nobody sent stays exactly 0, and its sign too
