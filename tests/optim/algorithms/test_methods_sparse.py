"""DeMo and SparseLoCo against float64 re-derivations, and their wrong variants."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from optim.algorithms.dct_tiles import Tiling, from_cosines, to_cosines
from optim.algorithms.sparseloco import quantize
from optim.wire_sizes import largest_divisor
from tests.optim.reference.group import Group
from tests.optim.support.trajectory import SHAPES, AdamWReference, Arrays, K, apart, initial, replayed, simulated

CLOSE = 1e-9
CHUNK = 4


def blocks(shape: tuple[int, ...]) -> list[tuple[slice, ...]]:
    """The tiles of a parameter, by plain loops."""
    cuts = []
    for n in shape:
        width = max(d for d in range(1, CHUNK + 1) if n % d == 0)
        cuts.append([slice(i, i + width) for i in range(0, n, width)])
    return [(a,) for a in cuts[0]] if len(shape) == 1 else [(a, b) for a in cuts[0] for b in cuts[1]]


def cosine_matrix(n: int) -> np.ndarray:
    """Row b: the b-th cosine, orthonormal."""
    rows = np.array([[np.cos(np.pi * (2 * j + 1) * b / (2 * n)) for j in range(n)] for b in range(n)])
    return rows * np.sqrt(np.where(np.arange(n) == 0, 1, 2) / n)[:, None]


def dct(x: np.ndarray) -> np.ndarray:
    x = cosine_matrix(x.shape[0]) @ x
    return x @ cosine_matrix(x.shape[1]).T if x.ndim == 2 else x


def idct(x: np.ndarray) -> np.ndarray:
    x = cosine_matrix(x.shape[0]).T @ x
    return x @ cosine_matrix(x.shape[1]) if x.ndim == 2 else x


def chosen(x: np.ndarray, k: int) -> np.ndarray:
    """True at the k largest magnitudes."""
    mask = np.zeros(x.size, dtype=bool)
    mask[np.argsort(-np.abs(x.ravel()), kind="stable")[:k]] = True
    return mask.reshape(x.shape)


def demo_by_formula(variant: str = "") -> list[Arrays]:
    lr, decay, k, wd = 2e-3, 0.99, 3, 0.1
    delta = [{n: np.zeros(s) for n, s in SHAPES.items()} for _ in range(K)]

    def advance(step: int, workers: list[Arrays], grads: list[Arrays]) -> None:
        for n, shape in SHAPES.items():
            move = np.zeros(shape)
            for d, g in zip(delta, grads, strict=True):
                d[n] = decay * d[n] + lr * g[n]
            for tile in blocks(shape):
                total, senders = np.zeros(move[tile].shape), np.zeros(move[tile].shape)
                for d in delta:
                    c = dct(d[n][tile])
                    mask = chosen(c, k)
                    d[n][tile] -= idct(np.where(mask, c, 0))
                    total += np.where(mask, c, 0)
                    senders += mask
                over = K if variant == "mean over K" else np.maximum(senders, 1)
                move[tile] = idct(total / over)
            for w in workers:
                if variant == "decay after the step":
                    w[n] = (w[n] - lr * np.sign(move)) * (1 - lr * wd)
                else:
                    w[n] = w[n] * (1 - lr * wd) - lr * np.sign(move)

    return replayed(advance)


def ours_demo() -> list[Arrays]:
    return simulated("demo", lr=2e-3, decay=0.99, topk=3, chunk=CHUNK, wd=0.1)[1]


def test_demo() -> None:
    assert apart(ours_demo(), demo_by_formula()) < CLOSE


@pytest.mark.parametrize("variant", ["mean over K", "decay after the step"])
def test_wrong_variants_of_demo_differ(variant: str) -> None:
    assert apart(ours_demo(), demo_by_formula(variant)) > 1e-8


def quantized(values: np.ndarray, bins: int) -> np.ndarray:
    """Templar's quantizer: equal bins over +-3 sigma, decoded to the bins' means, in fp32 from the centred value on."""
    shift = values.mean()
    scale = 6 * np.sqrt(((values - shift) ** 2).sum() / (values.size - 1)) / bins
    centred = (values - shift).astype(np.float32)
    q = np.clip(np.rint(centred / np.float32(scale) + np.float32(bins // 2)), 0, bins - 1)
    out = np.zeros_like(centred)
    for b in range(bins):
        if (q == b).any():
            out[q == b] = np.float32(centred[q == b].astype(np.float64).mean())
    return (out + np.float32(shift)).astype(np.float64)


def sparseloco_by_formula(bins: int | None, clip: bool, over_k: bool = False) -> list[Arrays]:
    H, k, decay, outer_lr = 5, 4, 0.9, 0.6
    theta, inner = initial(), [AdamWReference() for _ in range(K)]
    error = [{n: np.zeros(s) for n, s in SHAPES.items()} for _ in range(K)]

    def advance(step: int, workers: list[Arrays], grads: list[Arrays]) -> None:
        for optimizer, params, grad in zip(inner, workers, grads, strict=True):
            optimizer.step(params, grad)
        if step % H:
            return
        for n, shape in SHAPES.items():
            sent, masks = [], []
            for e, w in zip(error, workers, strict=True):
                e[n] = decay * e[n] + theta[n] - w[n]
                mask = np.zeros(shape, dtype=bool)
                for tile in blocks(shape):
                    size = e[n][tile].size
                    mask[tile] = chosen(e[n][tile], min(k, size - size % 2))
                values = np.zeros(shape)
                values[mask] = quantized(e[n][mask], bins) if bins else e[n][mask]
                e[n] = e[n] - values
                sent.append(values)
                masks.append(mask)
            norms = [float(np.linalg.norm(v)) for v in sent]
            usual = sorted(norms)[(K - 1) // 2]
            factors = [min(1.0, usual / (norm + 1e-8)) if clip else 1.0 for norm in norms]
            total = sum(v * f for v, f in zip(sent, factors, strict=True))
            senders = np.maximum(sum(m.astype(float) for m in masks), 1)
            theta[n] = theta[n] - outer_lr * total / (K if over_k else senders)
            for w in workers:
                w[n] = theta[n].copy()

    return replayed(advance)


def ours_sparseloco(bins: int | None, clip: bool) -> list[Arrays]:
    settings = {"H": 5, "topk": 4, "chunk": CHUNK, "bins": bins, "outer_lr": 0.6, "ef_decay": 0.9, "clip_norm": clip}
    return simulated("sparseloco", **settings)[1]


@pytest.mark.parametrize("clip", [True, False])
def test_sparseloco_unquantized(clip: bool) -> None:
    assert apart(ours_sparseloco(None, clip), sparseloco_by_formula(None, clip)) < CLOSE


def test_sparseloco_two_bits() -> None:
    """Levels travel in fp32, and their sums may differ in the last bit of it: hence not 1e-9."""
    assert apart(ours_sparseloco(4, True), sparseloco_by_formula(4, True)) < 1e-6


def test_wrong_variants_of_sparseloco_differ() -> None:
    ours = ours_sparseloco(None, True)
    assert apart(ours, sparseloco_by_formula(None, True, over_k=True)) > 1e-4
    assert apart(ours, sparseloco_by_formula(None, False)) > 1e-5


@pytest.mark.parametrize("bins", [None, 4])
def test_decoded_plus_kept_is_the_input(bins: int | None) -> None:
    init = {n: torch.from_numpy(v) for n, v in initial().items()}
    group = Group("sparseloco", init, 1, H=1, topk=4, chunk=CHUNK, bins=bins, clip_norm=False)
    method = group.methods[0]
    local = method.theta + torch.randn(method.theta.shape, dtype=torch.float64)
    sent = method.merge([method.outgoing(local, local)], [1.0])
    assert torch.allclose(sent + method.state_dict()["error"], method.theta - local, rtol=0, atol=1e-15)


def test_quantized_codes_fit_their_bits() -> None:
    value = torch.randn(50, 8, dtype=torch.float64)
    q, levels, _ = quantize(value, 4)
    assert q.dtype == torch.uint8
    assert int(q.max()) <= 3
    assert levels.dtype == torch.float32
    q, levels, shift = quantize(torch.full((3, 2), 2.5), 4)  # no spread at all
    assert torch.equal(levels[q.long()] + shift, torch.full((3, 2), 2.5))


@pytest.mark.parametrize(("n", "chunk", "found"), [(64, 64, 64), (96, 64, 48), (67, 64, 1), (1, 64, 1), (50, 64, 50)])
def test_the_largest_divisor_is_taken(n: int, chunk: int, found: int) -> None:
    assert largest_divisor(n, chunk) == found


@pytest.mark.parametrize("shape", [(), (5,), (12, 8), (8, 3, 2)])
def test_cutting_and_transforming_can_be_inverted(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape, dtype=torch.float64)
    tiling = Tiling.of(shape, 4)
    tiles = tiling.cut(x)
    assert tiles.shape == tiling.size
    assert torch.equal(tiling.join(tiles).view(shape), x)
    assert torch.allclose(from_cosines(to_cosines(tiles, tiling), tiling), tiles, atol=1e-14)
    assert float(to_cosines(tiles, tiling).norm()) == pytest.approx(float(tiles.norm()))
