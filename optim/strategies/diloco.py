"""DiLoCo, Streaming DiLoCo and eager updates on the network: one outer step on the mean pseudo-gradient."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from optim.algorithms.outer_step import DilocoOuter
from optim.codecs import Buffer
from optim.strategies.dense import Wire
from optim.strategies.interface import Coding, OuterStrategy, Turn


class DilocoRecipe(OuterStrategy):
    """`wire`: of the fragments of which a round exchanges the next in turn; DiLoCo has one, the whole vector (arXiv
    2311.08105); Streaming DiLoCo several (2501.18512). A round that is discarded is retried with the same fragment,
    since the turn is counted in commits."""

    shared = ("momentum",)

    def __init__(self, wire: Wire, outer: DilocoOuter) -> None:
        self._wire = wire
        self._outer = outer

    def coding(self, turn: Turn, state: Sequence[torch.Tensor]) -> Coding:
        return self._wire.coding((turn.round - 1) % self._wire.fragments, state[1])

    def step_into(
        self, turn: Turn, after: Sequence[torch.Tensor], before: Sequence[torch.Tensor], update: torch.Tensor
    ) -> None:
        self._outer.step_into(after[0], after[1], before[0], before[1], update)

    def encode(self, turn: Turn, coding: Coding, product: torch.Tensor, out: Sequence[torch.Tensor]) -> list[float]:
        return self._wire.encode(coding, product, out)

    def memory(self, coding: Coding) -> Sequence[torch.Tensor]:
        return self._wire.memory(coding)

    def take_back(self, turn: Turn, coding: Coding, messages: Sequence[Buffer]) -> None:
        self._wire.take_back(coding, messages)
