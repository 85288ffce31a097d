"""Eager updates (arXiv 2502.12996) in the paper's form; `optim.algorithms.eager` has the network's."""

from __future__ import annotations

import torch

from optim.algorithms.outer_step import DilocoOuter
from peer.model.layout import FlatLayout
from tests.optim.reference.diloco import Diloco


class Eager(Diloco):
    """DiLoCo whose exchange lasts a whole round, in the paper's form. `share`: this peer's weight in the mean, 1 / K.

    In the first round the others' term is missing, NOT replaced: stepping with delta_k instead of delta_k / K would
    keep the replicas apart permanently. With K = 8, lr 0.7 and momentum 0.9 the method is unstable.
    """

    lag = 1

    def __init__(
        self, layout: FlatLayout, theta: torch.Tensor, H: int, share: float, outer: DilocoOuter | None = None
    ) -> None:
        super().__init__(layout, theta, H, outer)
        self.share = share
        self._fresh = torch.zeros_like(theta)
        self._sent_before = torch.zeros_like(theta)

    def outgoing(self, local: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        self._fresh = self.theta - local
        return self._fresh

    def incoming(self, merged: torch.Tensor | None, local: torch.Tensor) -> None:
        update = self._fresh * self.share
        if merged is not None:
            update.add_(merged).sub_(self._sent_before * self.share)
        self._sent_before = self._fresh
        self.outer.step(self.theta, self.velocity, update)
        local.copy_(self.theta)

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {"velocity": self.velocity, "sent_before": self._sent_before}
