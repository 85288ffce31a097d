"""Synchronous large-batch training, as in DeDLOC (arXiv 2106.10207)."""

from __future__ import annotations

from collections.abc import Callable

import torch

from optim.inner import InnerOptimizer
from optim.methods.interface import Dense
from peer.layout import FlatLayout


class AllReduce(Dense):
    """Peers add up gradients for `accumulate` steps each; their mean, over all peers and steps, makes one optimizer
    step everywhere. Equal to one process with the whole batch. The optimizer's state is a function of the merged
    gradients, so all peers hold the same."""

    takes_gradients = True

    def __init__(
        self,
        layout: FlatLayout,
        theta: torch.Tensor,
        optimizer: Callable[[FlatLayout, torch.Tensor], InnerOptimizer],
        accumulate: int = 1,
    ) -> None:
        super().__init__(layout, theta)
        self.optimizer = optimizer(layout, theta)
        self.accumulate = accumulate
        self.sum = torch.zeros_like(theta)
        self._added = 0

    def sends(self, step: int) -> bool:
        return step % self.accumulate == 0

    def add(self, gradient: torch.Tensor) -> None:
        """One more micro-batch of mine."""
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
