"""Distributed Lion (arXiv 2404.00438)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch

from optim.algorithms.lion import LionRule
from peer.errors import ConfigError
from peer.model.layout import FlatLayout
from tests.optim.reference.interface import Dense, weighted_sum


class DistributedLion(Dense):
    """Distributed Lion. `vote`: "majority" (or True) or "average" (or False)."""

    takes_gradients = True

    def __init__(
        self,
        layout: FlatLayout,
        theta: torch.Tensor,
        lr: float,
        b1: float = 0.9,
        b2: float = 0.99,
        wd: float = 0.0,
        vote: Literal["majority", "average"] | bool = "majority",
    ) -> None:
        super().__init__(layout, theta)
        if vote not in ("majority", "average", True, False):
            raise ConfigError(f'vote is {vote!r}: choose "majority" or "average"')
        self.lr, self.rule = lr, LionRule(b1, b2, wd)
        self.majority = vote in ("majority", True)
        self.momentum = torch.zeros_like(theta)

    def sends(self, step: int) -> bool:
        return True

    def outgoing(self, local: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        return self.rule.vote(self.momentum, gradient)

    def merge(self, messages: Sequence[torch.Tensor], weights: Sequence[float]) -> torch.Tensor:
        """Count one vote a peer. Sums of small integers are exact, so a tie is 0."""
        votes = weighted_sum(messages, [1.0] * len(messages))
        return votes.sign() if self.majority else votes / len(messages)

    def incoming(self, merged: torch.Tensor | None, local: torch.Tensor) -> None:
        assert merged is not None
        self.rule.step_into(self.theta, self.theta, merged, self.lr)
        local.copy_(self.theta)

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {"momentum": self.momentum}
