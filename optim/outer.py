"""DiLoCo's outer optimizer (arXiv 2311.08105): SGD with Nesterov momentum on the merged pseudo-gradient."""

from __future__ import annotations

from dataclasses import dataclass

import torch

CHUNK = 1 << 16


@dataclass(frozen=True)
class DilocoOuter:
    lr: float = 0.7
    momentum: float = 0.9
    nesterov: bool = True

    def step(self, theta: torch.Tensor, velocity: torch.Tensor, update: torch.Tensor) -> None:
        """velocity = momentum * velocity + update; theta -= lr * (update + momentum * velocity). In place, fp32, (n,).

        Multiplications and additions are rounded one by one (no fused multiply-add), so that every CPU gets the same bits.
        """
        for first in range(0, theta.numel(), CHUNK):
            t, v, u = (x[first : first + CHUNK] for x in (theta, velocity, update))
            v.mul_(self.momentum)
            v.add_(u)
            direction = (v * self.momentum).add_(u) if self.nesterov else v.clone()
            t.sub_(direction.mul_(self.lr))
