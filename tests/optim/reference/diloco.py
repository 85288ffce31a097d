"""DiLoCo (arXiv 2311.08105)."""

from __future__ import annotations

import torch

from optim.algorithms.outer_step import DilocoOuter
from peer.errors import ConfigError
from peer.model.layout import FlatLayout
from tests.optim.reference.interface import Dense


class Diloco(Dense):
    """DiLoCo. Every H inner steps: delta = theta - local; theta <- outer step on the mean delta; local <- theta.

    With outer momentum 0 and outer lr 1, theta becomes the mean of the local weights: federated averaging, with an
    adaptive inner optimizer in place of SGD.
    """

    def __init__(self, layout: FlatLayout, theta: torch.Tensor, H: int, outer: DilocoOuter | None = None) -> None:
        super().__init__(layout, theta)
        if H < 1:
            raise ConfigError(f"H is {H}: set at least 1 inner step a round")
        self.every = H
        self.outer = outer or DilocoOuter()
        self.velocity = torch.zeros_like(theta)

    def sends(self, step: int) -> bool:
        return step % self.every == 0

    def outgoing(self, local: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        return self.theta - local

    def incoming(self, merged: torch.Tensor | None, local: torch.Tensor) -> None:
        assert merged is not None
        self.outer.step(self.theta, self.velocity, merged)
        local.copy_(self.theta)

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {"velocity": self.velocity}
