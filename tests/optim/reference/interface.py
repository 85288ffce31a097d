"""The interface between a paper's algorithm and its driver, `tests.optim.reference.group.Group`.

An algorithm object is one peer's part. After inner step t (from 1) the driver asks

    algorithm.sends(t)    -> message = algorithm.outgoing(local, gradient)     this peer's message
                             merged  = algorithm.merge(messages, weights)      a pure function
    algorithm.applies(t)  -> algorithm.incoming(merged, local)                 theta moves; `local` is overwritten

Between `sends` and `applies` an exchange is in flight and the worker continues; in plain algorithms both happen at the
same step. All vectors are flat, of one dtype and layout. The network's strategies (`optim.strategies`) have an
interface of their own; both use the formulas of `optim.algorithms`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar, Generic, TypeVar

import torch

from peer.model.layout import FlatLayout

M = TypeVar("M")


class OuterAlgorithm(ABC, Generic[M]):
    """One peer's part of an algorithm. `theta`, (n,): the weights shared with the others; only `incoming` changes
    it."""

    takes_gradients: ClassVar[bool] = False
    """Whether messages are made from each step's gradient. Otherwise an inner optimizer moves `local`, and messages are
    made from its movement."""
    exchanges: ClassVar[int] = 1
    """Consecutive merges at each synchronization."""
    lag: ClassVar[int] = 0
    """How many synchronizations later a merged message is applied."""

    def __init__(self, layout: FlatLayout, theta: torch.Tensor) -> None:
        self.layout = layout
        self.theta = theta.clone()

    @abstractmethod
    def sends(self, step: int) -> bool: ...

    def applies(self, step: int) -> bool:
        return self.sends(step)

    @abstractmethod
    def outgoing(self, local: torch.Tensor, gradient: torch.Tensor) -> M:
        """Return this peer's message. `local`: its weights after the inner step; `gradient`: of that step. Both are
        only read."""

    @abstractmethod
    def merge(self, messages: Sequence[M], weights: Sequence[float]) -> torch.Tensor:
        """Merge the group's messages; every peer gets the same bits. `weights` sum to 1."""

    @abstractmethod
    def incoming(self, merged: torch.Tensor | None, local: torch.Tensor) -> None:
        """Apply the merged message (None: there is none yet, see `lag`) and overwrite `local` with the next start."""

    def partners(self, exchange: int, peers: int) -> list[list[int]]:
        """Return the groups that merge in the `exchange`-th exchange: by default, all peers together."""
        return [list(range(peers))]

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return what a restart needs besides theta."""
        return {}


class Dense(OuterAlgorithm[torch.Tensor]):
    """An algorithm whose messages are flat vectors that are averaged: any codec carries them, `merge_part` merges
    them."""

    def merge(self, messages: Sequence[torch.Tensor], weights: Sequence[float]) -> torch.Tensor:
        return weighted_sum(messages, weights)


def weighted_sum(vectors: Sequence[torch.Tensor], weights: Sequence[float]) -> torch.Tensor:
    """Sum weight * vector in the order given, with one rounding an operation, as `optim.merge.merge_part` does."""
    total = vectors[0] * weights[0]
    for vector, weight in zip(vectors[1:], weights[1:], strict=True):
        total.add_(vector * weight)
    return total
