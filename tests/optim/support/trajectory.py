"""A small problem whose gradients depend on the worker, the step and the weights, and how far two runs are apart."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

K, STEPS = 4, 60
SHAPES = {"embed": (12, 6), "blocks.0.w": (8, 6), "blocks.0.b": (8,), "blocks.1.w": (6, 16), "blocks.1.b": (6,)}
Arrays = dict[str, np.ndarray]


def initial() -> Arrays:
    rng = np.random.default_rng(7)
    return {name: rng.normal(size=shape) * 0.5 for name, shape in SHAPES.items()}


def gradient(k: int, step: int, params: Arrays) -> Arrays:
    """Smooth in the weights, different for each worker and step."""
    rng = np.random.default_rng(1000 * step + k)
    return {
        name: np.sin(value + 0.3 * k) + 0.5 * value + 0.3 * rng.normal(size=value.shape)
        for name, value in params.items()
    }


def replayed(advance: Callable[[int, list[Arrays], list[Arrays]], None]) -> list[Arrays]:
    """Run independently: `advance(step, weights of every worker, gradients of every worker)` moves the weights."""
    workers = [initial() for _ in range(K)]
    for step in range(1, STEPS + 1):
        advance(step, workers, [gradient(k, step, workers[k]) for k in range(K)])
    return workers


def apart(ours: list[Arrays], theirs: list[Arrays]) -> float:
    """The largest relative distance of any parameter of any worker."""
    return max(
        float(np.linalg.norm(a[n] - b[n]) / np.linalg.norm(b[n])) for a, b in zip(ours, theirs, strict=True) for n in b
    )


class AdamWReference:
    """Kingma and Ba with decoupled decay, straight from the formulas."""

    def __init__(self, lr: float = 1e-2, b1: float = 0.9, b2: float = 0.95, eps: float = 1e-8, wd: float = 0.1) -> None:
        self.lr, self.b1, self.b2, self.eps, self.wd = lr, b1, b2, eps, wd
        self.m: Arrays = {}
        self.v: Arrays = {}
        self.t = 0

    def directions(self, grads: Arrays) -> Arrays:
        self.t += 1
        for name, g in grads.items():
            self.m[name] = self.b1 * self.m.get(name, np.zeros_like(g)) + (1 - self.b1) * g
            self.v[name] = self.b2 * self.v.get(name, np.zeros_like(g)) + (1 - self.b2) * g**2
        return {
            n: (self.m[n] / (1 - self.b1**self.t)) / (np.sqrt(self.v[n] / (1 - self.b2**self.t)) + self.eps)
            for n in grads
        }

    def step(self, params: Arrays, grads: Arrays) -> None:
        for name, direction in self.directions(grads).items():
            params[name] = params[name] - self.lr * (self.wd * params[name] + direction)
