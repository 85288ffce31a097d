"""DeMo (arXiv 2411.19870)."""

from __future__ import annotations

from functools import cache
from typing import Final

import numpy as np

from tests.optim.reference.ties import largest, sign
from tests.optim.reference.tiles import tiles
from tests.optim.support.trajectory import SHAPES, Arrays, K, replayed

LR: Final = 2.0**-9
WEIGHT_DECAY: Final = 2.0**-3  # 1 - LR * WEIGHT_DECAY is exact in fp32: its rounding would add up over the steps
DECAY: Final = 0.99
KEPT: Final = 3


@cache
def cosine_matrix(n: int) -> np.ndarray:
    """Row b: the b-th cosine, orthonormal."""
    rows = np.array([[np.cos(np.pi * (2 * j + 1) * b / (2 * n)) for j in range(n)] for b in range(n)])
    return rows * np.sqrt(np.where(np.arange(n) == 0, 1, 2) / n)[:, None]


def cosines(x: np.ndarray) -> np.ndarray:
    """Return the cosine transform of a vector or a matrix."""
    x = cosine_matrix(x.shape[0]) @ x
    return x @ cosine_matrix(x.shape[1]).T if x.ndim == 2 else x


def from_cosines(x: np.ndarray) -> np.ndarray:
    """Invert `cosines`."""
    x = cosine_matrix(x.shape[0]).T @ x
    return x @ cosine_matrix(x.shape[1]) if x.ndim == 2 else x


def demo(variant: str = "") -> list[Arrays]:
    """Return the workers' weights. The wrong variants are "mean over K" and "decay after the step"."""
    delta = [{n: np.zeros(s) for n, s in SHAPES.items()} for _ in range(K)]

    def advance(step: int, workers: list[Arrays], grads: list[Arrays]) -> None:
        for n, shape in SHAPES.items():
            move = np.zeros(shape)
            for d, g in zip(delta, grads, strict=True):
                d[n] = DECAY * d[n] + LR * g[n]
            for tile in tiles(shape):
                total, senders = np.zeros(move[tile].shape), np.zeros(move[tile].shape)
                for d in delta:
                    c = cosines(d[n][tile])
                    mask = largest(c, min(KEPT, c.size))
                    d[n][tile] -= from_cosines(np.where(mask, c, 0))
                    total += np.where(mask, c, 0)
                    senders += mask
                move[tile] = from_cosines(total / (K if variant == "mean over K" else np.maximum(senders, 1)))
            for w in workers:
                if variant == "decay after the step":
                    w[n] = (w[n] - LR * sign(move)) * (1 - LR * WEIGHT_DECAY)
                else:
                    w[n] = w[n] * (1 - LR * WEIGHT_DECAY) - LR * sign(move)

    return replayed(advance)
