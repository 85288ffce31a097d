"""Synchronous large batches (DeDLOC, arXiv 2106.10207) with AdamW (1711.05101) or LAMB (1904.00962)."""

from __future__ import annotations

from typing import Final

import numpy as np

from tests.optim.support.trajectory import SHAPES, AdamWReference, Arrays, replayed

LR: Final = 1e-2
DECAY: Final = 0.1  # of matrices
CLIP_NORM: Final = 1.0
ACCUMULATED: Final = 2


def allreduce(optimizer: str) -> list[Arrays]:
    """Return the weights of one process with the whole batch: every two steps, one step on the mean of all workers'
    gradients, clipped."""
    reference, batch = AdamWReference(), []

    def advance(step: int, workers: list[Arrays], grads: list[Arrays]) -> None:
        batch.extend(grads)
        if step % ACCUMULATED:
            return
        params = workers[0]
        whole = {n: np.mean([g[n] for g in batch], axis=0) for n in SHAPES}
        norm = np.sqrt(sum((g**2).sum() for g in whole.values()))
        clipped = {n: g * min(1.0, CLIP_NORM / norm) for n, g in whole.items()}
        for n, direction in reference.directions(clipped).items():
            move = direction + (DECAY * params[n] if params[n].ndim > 1 else 0.0)
            trust = np.linalg.norm(params[n]) / np.linalg.norm(move) if optimizer == "lamb" else 1.0
            params[n] = params[n] - LR * trust * move
        batch.clear()
        for w in workers[1:]:
            w.update({n: v.copy() for n, v in params.items()})

    return replayed(advance)
