"""Distributed Lion (arXiv 2404.00438): votes up, their majority or mean down."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class LionRule:
    """Lion's formulas.

        vote       u = sign(b1 * m + (1 - b1) * g)            -1, 0 or 1
        momentum   m <- b2 * m + (1 - b2) * g                 each peer's own
        step       theta <- theta - lr * (D + wd * theta)     wd on all parameters

    The decision D is sign(sum of u) by majority, or the mean of u.

    A tie moves nothing, as the paper's formula has it. Its authors' code (kyleliang919/distributed-lion-pytorch) sends
    one bit, in which 0 is -1, and decides a tie as -1.
    """

    b1: float = 0.9
    b2: float = 0.99
    wd: float = 0.0

    def vote(self, momentum: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        """Return the vote and add the gradient to `momentum`."""
        ballot = (momentum * self.b1).add_(gradient * (1 - self.b1)).sign_()
        momentum.mul_(self.b2).add_(gradient * (1 - self.b2))
        return ballot

    def step_into(self, after: torch.Tensor, before: torch.Tensor, decision: torch.Tensor, lr: float) -> None:
        """Step elementwise; `after` may be `before`."""
        torch.sub(before, (before * self.wd).add_(decision).mul_(lr), out=after)
