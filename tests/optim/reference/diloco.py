"""DiLoCo (arXiv 2311.08105)."""

from __future__ import annotations

from typing import Final

import numpy as np

from tests.optim.support.trajectory import AdamWReference, Arrays, K, initial, replayed

LR: Final = 0.7
MOMENTUM: Final = 0.9


def outer_step(
    theta: np.ndarray,
    m: np.ndarray,
    delta: np.ndarray,
    kind: str = "nesterov",
    lr: float = LR,
    momentum: float = MOMENTUM,
) -> tuple[np.ndarray, np.ndarray]:
    """Return the next weights and momentum. The wrong kinds are "heavy ball" and "dampened"."""
    m = momentum * m + (1 - momentum if kind == "dampened" else 1.0) * delta
    return theta - lr * (m if kind == "heavy ball" else delta + momentum * m), m


def diloco(H: int, kind: str = "nesterov") -> list[Arrays]:
    """Return the workers' weights: every H steps of AdamW, an outer step on the mean of theta - local."""
    theta, inner = initial(), [AdamWReference() for _ in range(K)]
    velocity = {n: np.zeros_like(v) for n, v in theta.items()}

    def advance(step: int, workers: list[Arrays], grads: list[Arrays]) -> None:
        for optimizer, params, grad in zip(inner, workers, grads, strict=True):
            optimizer.step(params, grad)
        if step % H == 0:
            for n in theta:
                delta = np.mean([theta[n] - w[n] for w in workers], axis=0)
                theta[n], velocity[n] = outer_step(theta[n], velocity[n], delta, kind)
                for w in workers:
                    w[n] = theta[n].copy()

    return replayed(advance)
