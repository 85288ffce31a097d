"""Distributed Lion (arXiv 2404.00438)."""

from __future__ import annotations

from typing import Final

import numpy as np

from tests.optim.reference.ties import sign
from tests.optim.support.trajectory import SHAPES, Arrays, K, replayed

LR: Final = 2e-3
B1: Final = 0.9
B2: Final = 0.99
DECAY: Final = 0.1


def lion(vote: str) -> list[Arrays]:
    """Return the workers' weights. `vote`: "majority" or "average"."""
    moments = [{n: np.zeros(s) for n, s in SHAPES.items()} for _ in range(K)]

    def advance(step: int, workers: list[Arrays], grads: list[Arrays]) -> None:
        for n in SHAPES:
            votes = sum(sign(B1 * m[n] + (1 - B1) * g[n]) for m, g in zip(moments, grads, strict=True))
            move = np.sign(votes) if vote == "majority" else votes / K
            for m, g, w in zip(moments, grads, workers, strict=True):
                m[n] = B2 * m[n] + (1 - B2) * g[n]
                w[n] = w[n] - LR * (move + DECAY * w[n])

    return replayed(advance)
