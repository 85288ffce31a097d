"""NoLoCo (arXiv 2506.10911): outer steps in pairs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tests.optim.support.trajectory import AdamWReference, Arrays, K, initial, replayed


def gossip(
    H: int, pairs: Sequence[Sequence[Sequence[int]]], constants: tuple[float, float, float], pull: float = 1.0
) -> list[Arrays]:
    """Return the workers' weights. `pairs`: who meets in each round; `constants`: alpha, beta, gamma.

    With phi a worker's outer weights and means over the pair: move <- alpha * move - beta * mean(phi - local) -
    gamma * (phi - mean(phi)); phi <- phi + move. A wrong `pull` is -1: the last term's sign."""
    alpha, beta, gamma = constants
    phi, inner = [initial() for _ in range(K)], [AdamWReference() for _ in range(K)]
    moves = [{n: np.zeros_like(v) for n, v in initial().items()} for _ in range(K)]

    def advance(step: int, workers: list[Arrays], grads: list[Arrays]) -> None:
        for optimizer, params, grad in zip(inner, workers, grads, strict=True):
            optimizer.step(params, grad)
        if step % H:
            return
        for pair in pairs[step // H - 1]:
            for n in phi[0]:
                delta = np.mean([phi[i][n] - workers[i][n] for i in pair], axis=0)
                middle = np.mean([phi[i][n] for i in pair], axis=0)
                for i in pair:
                    moves[i][n] = alpha * moves[i][n] - beta * delta - pull * gamma * (phi[i][n] - middle)
                    phi[i][n] = phi[i][n] + moves[i][n]
                    workers[i][n] = phi[i][n].copy()

    return replayed(advance)
