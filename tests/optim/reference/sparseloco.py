"""SparseLoCo (arXiv 2508.15706), with Templar's quantizer."""

from __future__ import annotations

from typing import Final

import numpy as np

from tests.optim.reference.ties import largest, rounded
from tests.optim.reference.tiles import tiles
from tests.optim.support.trajectory import SHAPES, AdamWReference, Arrays, K, initial, replayed

STEPS: Final = 5
LR: Final = 0.6
DECAY: Final = 0.9
KEPT: Final = 4


def quantized(values: np.ndarray, bins: int) -> np.ndarray:
    """Return what the values decode to: the mean of their bin. Bins have equal width over +-3 standard deviations."""
    shift = values.mean()
    centred = values - shift
    scale = 6 * np.sqrt((centred**2).sum() / (values.size - 1)) / bins
    q = np.clip(rounded(centred / scale + bins // 2), 0, bins - 1)
    out = np.zeros_like(centred)
    for b in range(bins):
        if (q == b).any():
            out[q == b] = centred[q == b].mean()
    return out + shift


def sparseloco(bins: int | None, clip: bool, over_k: bool = False) -> list[Arrays]:
    """Return the workers' weights. `over_k`, which is wrong: values are averaged over all peers, not over senders."""
    theta, inner = initial(), [AdamWReference() for _ in range(K)]
    error = [{n: np.zeros(s) for n, s in SHAPES.items()} for _ in range(K)]

    def advance(step: int, workers: list[Arrays], grads: list[Arrays]) -> None:
        for optimizer, params, grad in zip(inner, workers, grads, strict=True):
            optimizer.step(params, grad)
        if step % STEPS:
            return
        for n, shape in SHAPES.items():
            sent, masks = [], []
            for e, w in zip(error, workers, strict=True):
                e[n] = DECAY * e[n] + theta[n] - w[n]
                mask = np.zeros(shape, dtype=bool)
                for tile in tiles(shape):
                    size = e[n][tile].size
                    mask[tile] = largest(e[n][tile], min(KEPT, size - size % 2))
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
            theta[n] = theta[n] - LR * total / (K if over_k else senders)
            for w in workers:
                w[n] = theta[n].copy()

    return replayed(advance)
