"""Eager updates (arXiv 2502.12996) in the paper's form: each peer has weights of its own."""

from __future__ import annotations

import numpy as np

from tests.optim.reference.diloco import outer_step
from tests.optim.support.trajectory import AdamWReference, Arrays, K, initial, replayed


def updates(deltas: list[np.ndarray], before: list[np.ndarray]) -> list[np.ndarray]:
    """Return what each peer steps with: its own fresh delta, and the others' of the round before (none in the first
    round), each over the number of peers."""
    others = [sum(before[:k] + before[k + 1 :], np.zeros(())) for k in range(len(deltas))]
    return [(own + rest) / len(deltas) for own, rest in zip(deltas, others, strict=True)]


def eager(H: int, first_round_whole: bool = False) -> list[Arrays]:
    """Return the workers' weights. `first_round_whole`, which is wrong: a first delta counts as the whole mean."""
    thetas, inner = [initial() for _ in range(K)], [AdamWReference() for _ in range(K)]
    velocities = [{n: np.zeros_like(v) for n, v in initial().items()} for _ in range(K)]
    before: list[Arrays] = []

    def advance(step: int, workers: list[Arrays], grads: list[Arrays]) -> None:
        for optimizer, params, grad in zip(inner, workers, grads, strict=True):
            optimizer.step(params, grad)
        if step % H:
            return
        deltas = [{n: t[n] - w[n] for n in t} for t, w in zip(thetas, workers, strict=True)]
        for n in thetas[0]:
            fresh = [delta[n] for delta in deltas]
            whole = first_round_whole and not before
            for k, update in enumerate(fresh if whole else updates(fresh, [delta[n] for delta in before])):
                thetas[k][n], velocities[k][n] = outer_step(thetas[k][n], velocities[k][n], update)
                workers[k][n] = thetas[k][n].copy()
        before[:] = deltas

    return replayed(advance)
