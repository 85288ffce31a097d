"""DiLoCo, Streaming DiLoCo and eager updates on the network: one outer step on the merged pseudo-gradient."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from optim.algorithms.outer_step import DilocoOuter
from optim.codecs import Buffer
from optim.codecs.interface import as_bytes
from optim.kernels import kernels_for
from optim.strategies.dense import DenseCoding, MessageFormat
from optim.strategies.interface import Check, Coding, OuterStrategy, RoundInfo, go_on


class DilocoStrategy(OuterStrategy):
    """DiLoCo (arXiv 2311.08105) with one fragment, the whole vector, or Streaming DiLoCo (2501.18512) with several.

    Each round exchanges the next fragment of `wire`. Fragments follow the count of commits, so a discarded round is
    retried with the same fragment."""

    shared = ("momentum",)

    def __init__(self, message_format: MessageFormat, outer: DilocoOuter) -> None:
        self._format = message_format
        self._outer = outer

    def coding(self, round_info: RoundInfo, state: Sequence[torch.Tensor], check: Check = go_on) -> Coding:
        turn = (round_info.round - 1) // self._format.fragments
        return self._format.coding(self._fragment(round_info), state[1], check, turn)

    def slices(self, round_info: RoundInfo) -> int:
        return self._format.slices(self._fragment(round_info))

    def _fragment(self, round_info: RoundInfo) -> int:
        return (round_info.round - 1) % self._format.fragments

    def step_into(
        self, round_info: RoundInfo, after: Sequence[torch.Tensor], before: Sequence[torch.Tensor], update: torch.Tensor
    ) -> None:
        self._outer.step_into(after[0], after[1], before[0], before[1], update)

    def apply(
        self,
        round_info: RoundInfo,
        coding: Coding,
        index: int,
        result: Buffer,
        after: Sequence[torch.Tensor],
        before: Sequence[torch.Tensor],
    ) -> None:
        """Step in one pass with the decoding, where there are kernels for that."""
        if not (isinstance(coding, DenseCoding) and self._apply_encoded(coding, index, result, after, before)):
            super().apply(round_info, coding, index, result, after, before)

    def _apply_encoded(
        self,
        coding: DenseCoding,
        index: int,
        result: Buffer,
        after: Sequence[torch.Tensor],
        before: Sequence[torch.Tensor],
    ) -> bool:
        """Return False, with `after` partly written, if no kernels step so or they refuse the result."""
        numel = coding.size(index)
        encoded = as_bytes(result, coding.down.encoded_size(numel))
        kernels = kernels_for(coding.down.name, encoded, *after, *before)
        return kernels is not None and all(
            kernels.step(encoded, numel, part.start, self._outer, [t[place] for t in before], [t[place] for t in after])
            for place, part in coding.placed(index)
        )

    def weights(self, tokens: Sequence[int], norms: Sequence[float]) -> tuple[float, ...]:
        return self._format.rule.weights(tokens, norms)

    def encode(
        self, round_info: RoundInfo, coding: Coding, product: torch.Tensor, out: Sequence[torch.Tensor]
    ) -> list[float]:
        return self._format.encode(coding, product, out)

    def memory(self, coding: Coding) -> Sequence[torch.Tensor]:
        return self._format.memory(coding)

    def restore_residual(self, round_info: RoundInfo, coding: Coding, messages: Sequence[Buffer]) -> None:
        self._format.restore_residual(coding, messages)
