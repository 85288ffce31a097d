"""Synchronous large-batch training, as in DeDLOC (arXiv 2106.10207)."""

from __future__ import annotations

import torch

from optim.algorithms.large_batch import LargeBatchStep
from peer.model.layout import FlatLayout
from tests.optim.reference.interface import Dense


class SharedOptimizer:
    """AdamW or LAMB whose state depends on the merged gradients alone, so that all peers hold the same state."""

    def __init__(self, rule: LargeBatchStep, lr: float, layout: FlatLayout, like: torch.Tensor) -> None:
        self.rule, self.lr, self.layout, self.steps = rule, lr, layout, 0
        self.mean, self.square = torch.zeros_like(like), torch.zeros_like(like)

    def step(self, theta: torch.Tensor, gradient: torch.Tensor) -> None:
        """Move theta (n,), in place."""
        self.steps += 1
        state = [theta, self.mean, self.square]
        self.rule.step_into(state, state, gradient, self.layout, self.steps, self.lr)

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {"mean": self.mean, "square": self.square, "steps": torch.tensor(self.steps)}


class AllReduce(Dense):
    """Synchronous large batches: the mean gradient over all peers and `accumulate` steps makes one optimizer step at
    every peer. Equal to one process with the whole batch."""

    takes_gradients = True

    def __init__(
        self, layout: FlatLayout, theta: torch.Tensor, rule: LargeBatchStep, lr: float, accumulate: int = 1
    ) -> None:
        super().__init__(layout, theta)
        self.optimizer = SharedOptimizer(rule, lr, layout, theta)
        self.accumulate = accumulate
        self.sum = torch.zeros_like(theta)
        self._added = 0

    def sends(self, step: int) -> bool:
        return step % self.accumulate == 0

    def add(self, gradient: torch.Tensor) -> None:
        """Add the gradient of one more micro-batch."""
        self.sum.add_(gradient)
        self._added += 1

    def outgoing(self, local: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        return self.sum / self._added

    def incoming(self, merged: torch.Tensor | None, local: torch.Tensor) -> None:
        assert merged is not None
        self.optimizer.step(self.theta, merged)
        self.sum.zero_()
        self._added = 0
        local.copy_(self.theta)

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {"sum": self.sum, **self.optimizer.state_dict()}
