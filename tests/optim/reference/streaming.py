"""Streaming DiLoCo (arXiv 2501.18512)."""

from __future__ import annotations

from typing import Final

import numpy as np

from tests.optim.reference.diloco import outer_step
from tests.optim.support.trajectory import AdamWReference, Arrays, K, initial, replayed

FRAGMENTS: Final = [
    {"embed": slice(0, 6), "blocks.0.w": slice(None), "blocks.0.b": slice(None)},
    {"embed": slice(6, 12), "blocks.1.w": slice(None), "blocks.1.b": slice(None)},
]
"""Whole blocks, strided, and an equal share of the embedding's rows."""


def streaming(H: int, tau: int, mix: float, against_mixed: bool = False) -> list[Arrays]:
    """Return the workers' weights: every H / 2 steps the next fragment's outer step, on the deltas of `tau` steps ago.

    `against_mixed`, which is wrong: deltas are taken against the weights after mixing, not against the outer ones."""
    every = H // len(FRAGMENTS)
    theta, inner = initial(), [AdamWReference() for _ in range(K)]
    velocity = {n: np.zeros_like(v) for n, v in theta.items()}
    base = [initial() for _ in range(K)]  # what a delta is taken against
    flying: Arrays = {}

    def advance(step: int, workers: list[Arrays], grads: list[Arrays]) -> None:
        for optimizer, params, grad in zip(inner, workers, grads, strict=True):
            optimizer.step(params, grad)
        slot = -(-step // every)  # the slot this step belongs to, from 1
        fragment = FRAGMENTS[(slot - 1) % len(FRAGMENTS)]
        if step == slot * every - tau:
            for n, at in fragment.items():
                flying[n] = np.mean([b[n][at] - w[n][at] for b, w in zip(base, workers, strict=True)], axis=0)
        if step == slot * every:
            for n, at in fragment.items():
                theta[n][at], velocity[n][at] = outer_step(theta[n][at], velocity[n][at], flying.pop(n))
                for b, w in zip(base, workers, strict=True):
                    w[n][at] = mix * w[n][at] + (1 - mix) * theta[n][at]
                    b[n][at] = w[n][at] if against_mixed else theta[n][at]

    return replayed(advance)
