"""The seam between a way to agree on weights and whatever carries the messages.

Two drivers use it: the network's round engine, with peers and codecs, and `optim.simulate`, with K workers in one
process. A method is one peer's half. After inner step t (1-based) the driver asks

    method.sends(t)    -> message = method.outgoing(local, gradient)      my message of this exchange
                          merged  = method.merge(all messages, weights)   a pure function, done by the owners of parts
    method.applies(t)  -> method.incoming(merged, local)                  the shared state moves; `local` is overwritten

Between `sends` and `applies` an exchange is in flight and the worker goes on; in the plain methods both come at the
same step. All vectors are flat, of one dtype and layout: fp32 on the network, float64 if one likes in simulation.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar, Generic, TypeVar

import torch

from peer.model.layout import FlatLayout

M = TypeVar("M")


class OuterAlgorithm(ABC, Generic[M]):
    """One peer's half of a method. `theta`, (n,): the weights it shares with the others, changed by `incoming` only.

    `takes_gradients`: the message is made from each step's gradient; otherwise an inner optimizer moves `local` and
    the message is made from where it went. `exchanges`: merges that follow one another at each synchronization.
    `lag`: how many synchronizations later a merged message is applied. `replicas_equal`: all peers hold the same theta
    after `incoming`; where it is False the round engine can neither vote on a state hash nor checkpoint a group, and
    replay and state transfer give a peer somebody's weights, not the group's.
    """

    takes_gradients: ClassVar[bool] = False
    exchanges: ClassVar[int] = 1
    lag: ClassVar[int] = 0
    replicas_equal: ClassVar[bool] = True

    def __init__(self, layout: FlatLayout, theta: torch.Tensor) -> None:
        self.layout = layout
        self.theta = theta.clone()

    @abstractmethod
    def sends(self, step: int) -> bool: ...

    def applies(self, step: int) -> bool:
        return self.sends(step)

    @abstractmethod
    def outgoing(self, local: torch.Tensor, gradient: torch.Tensor) -> M:
        """My message. `local`: my weights after the inner step; `gradient`: of that step. Neither is changed."""

    @abstractmethod
    def merge(self, messages: Sequence[M], weights: Sequence[float]) -> torch.Tensor:
        """What the group makes of its messages; the same bits whoever computes it. `weights` sum to 1."""

    @abstractmethod
    def incoming(self, merged: torch.Tensor | None, local: torch.Tensor) -> None:
        """Take the merged message (None: there is none yet, see `lag`) and overwrite `local` with where to go on."""

    def partners(self, exchange: int, peers: int) -> list[list[int]]:
        """Who merges with whom in the `exchange`-th exchange: by default, everybody with everybody."""
        return [list(range(peers))]

    def state_dict(self) -> dict[str, torch.Tensor]:
        """What must be kept besides theta, to go on after a restart."""
        return {}


class Dense(OuterAlgorithm[torch.Tensor]):
    """A method whose messages are flat vectors that are averaged: any codec carries them, `merge_part` merges them."""

    def merge(self, messages: Sequence[torch.Tensor], weights: Sequence[float]) -> torch.Tensor:
        return weighted_sum(messages, weights)


def weighted_sum(vectors: Sequence[torch.Tensor], weights: Sequence[float]) -> torch.Tensor:
    """Sum of weight * vector in the order given, each operation rounded by itself: as `optim.merge.merge_part`."""
    total = vectors[0] * weights[0]
    for vector, weight in zip(vectors[1:], weights[1:], strict=True):
        total.add_(vector * weight)
    return total
