"""DiLoCo, Streaming DiLoCo and eager updates on the network: one outer step on the merged pseudo-gradient."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from optim.algorithms.outer_step import DilocoOuter
from optim.codecs import Buffer
from optim.strategies.dense import Wire
from optim.strategies.interface import Coding, OuterStrategy, RoundInfo


class DilocoStrategy(OuterStrategy):
    """DiLoCo (arXiv 2311.08105) with one fragment, the whole vector, or Streaming DiLoCo (2501.18512) with several.

    Each round exchanges the next fragment of `wire`. Fragments follow the count of commits, so a discarded round is
    retried with the same fragment."""

    shared = ("momentum",)

    def __init__(self, wire: Wire, outer: DilocoOuter) -> None:
        self._wire = wire
        self._outer = outer

    def coding(self, round_info: RoundInfo, state: Sequence[torch.Tensor]) -> Coding:
        return self._wire.coding(self._fragment(round_info), state[1])

    def slices(self, round_info: RoundInfo) -> int:
        return self._wire.slices(self._fragment(round_info))

    def _fragment(self, round_info: RoundInfo) -> int:
        return (round_info.round - 1) % self._wire.fragments

    def step_into(
        self, round_info: RoundInfo, after: Sequence[torch.Tensor], before: Sequence[torch.Tensor], update: torch.Tensor
    ) -> None:
        self._outer.step_into(after[0], after[1], before[0], before[1], update)

    def weights(self, tokens: Sequence[int], norms: Sequence[float]) -> tuple[float, ...]:
        return self._wire.rule.weights(tokens, norms)

    def encode(
        self, round_info: RoundInfo, coding: Coding, product: torch.Tensor, out: Sequence[torch.Tensor]
    ) -> list[float]:
        return self._wire.encode(coding, product, out)

    def memory(self, coding: Coding) -> Sequence[torch.Tensor]:
        return self._wire.memory(coding)

    def restore_residual(self, round_info: RoundInfo, coding: Coding, messages: Sequence[Buffer]) -> None:
        self._wire.restore_residual(coding, messages)
