"""Distributed Lion (arXiv 2404.00438): votes up, their majority or mean down."""

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
    """Lion's formulas, shared by `DistributedLion` and the network's strategy.

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


def majority_of(votes: torch.Tensor) -> torch.Tensor:
    """Return the decision by majority of summed votes, in place."""
    return votes.sign_()


def mean_of(votes: torch.Tensor, voters: int) -> torch.Tensor:
    """Return the mean vote of summed votes, in place."""
    return votes.div_(voters)


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
        return majority_of(votes) if self.majority else mean_of(votes, len(messages))

    def incoming(self, merged: torch.Tensor | None, local: torch.Tensor) -> None:
        assert merged is not None
        self.rule.step_into(self.theta, self.theta, merged, self.lr)
        local.copy_(self.theta)

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {"momentum": self.momentum}
