"""Distributed Lion (arXiv 2404.00438): signs up, a majority vote or an average down."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from optim.algorithms.interface import Dense, weighted_sum
from peer.errors import ConfigError
from peer.model.layout import FlatLayout


@dataclass(frozen=True)
class LionRule:
    """u = sign(b1 * m + (1 - b1) * g); m <- b2 * m + (1 - b2) * g, mine alone; theta <- theta - lr * (D + wd * theta),
    wd on all parameters. What simulation and network share."""

    b1: float = 0.9
    b2: float = 0.99
    wd: float = 0.0

    def vote(self, momentum: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        """My vote; `momentum` takes in the gradient."""
        ballot = (momentum * self.b1).add_(gradient * (1 - self.b1)).sign_()
        momentum.mul_(self.b2).add_(gradient * (1 - self.b2))
        return ballot

    def step_into(self, after: torch.Tensor, before: torch.Tensor, decision: torch.Tensor, lr: float) -> None:
        """Elementwise; `after` may be `before`."""
        torch.sub(before, (before * self.wd).add_(decision).mul_(lr), out=after)


class DistributedLion(Dense):
    """D = sign(sum of u) for `vote` "majority" (or True), the mean of u for "average" (or False). A tie moves nothing,
    as the paper's formula has it; its authors' code (kyleliang919/distributed-lion-pytorch) sends one bit, in which 0
    is -1, and a tie is -1 too."""

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
            raise ConfigError(f'vote is {vote!r}: choose "majority" or "average".')
        self.lr, self.rule = lr, LionRule(b1, b2, wd)
        self.majority = vote in ("majority", True)
        self.momentum = torch.zeros_like(theta)

    def sends(self, step: int) -> bool:
        return True

    def outgoing(self, local: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        return self.rule.vote(self.momentum, gradient)

    def merge(self, messages: Sequence[torch.Tensor], weights: Sequence[float]) -> torch.Tensor:
        """One peer, one vote: the sum is one of small integers, so that a tie is exactly 0."""
        votes = weighted_sum(messages, [1.0] * len(messages))
        return votes.sign_() if self.majority else votes.div_(len(messages))

    def incoming(self, merged: torch.Tensor | None, local: torch.Tensor) -> None:
        assert merged is not None
        self.rule.step_into(self.theta, self.theta, merged, self.lr)
        local.copy_(self.theta)

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {"momentum": self.momentum}
