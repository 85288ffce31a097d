"""Synchronous large batches on the network (DeDLOC, arXiv 2106.10207): one optimizer step on the mean gradient."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch

from optim.algorithms.large_batch import LargeBatchStep
from optim.codecs import Buffer
from optim.merge import gradient_weights
from optim.strategies.dense import MessageFormat
from optim.strategies.interface import Check, Coding, OuterStrategy, Product, RoundInfo, go_on
from peer.model.layout import FlatLayout


class AllReduceStrategy(OuterStrategy):
    """Synchronous large batches. AdamW's moments depend on merged gradients alone: members share them, vote on them and
    fetch them like theta. Clipping needs the whole gradient's norm, so the step is made on whole vectors."""

    shared = ("mean", "square")
    product: ClassVar[Product] = "gradient"
    elementwise: ClassVar[bool] = False

    def __init__(self, layout: FlatLayout, message_format: MessageFormat, rule: LargeBatchStep) -> None:
        self.rule = rule
        self._layout, self._format = layout, message_format

    def coding(self, round_info: RoundInfo, state: Sequence[torch.Tensor], check: Check = go_on) -> Coding:
        return self._format.coding(0, state[1], check, round_info.round - 1)

    def slices(self, round_info: RoundInfo) -> int:
        return self._format.slices(0)

    def step_into(
        self, round_info: RoundInfo, after: Sequence[torch.Tensor], before: Sequence[torch.Tensor], update: torch.Tensor
    ) -> None:
        self.rule.step_into(after, before, update, self._layout, round_info.round, round_info.lr)

    def weights(self, tokens: Sequence[int], norms: Sequence[float]) -> tuple[float, ...]:
        return gradient_weights(tokens, norms)

    def encode(
        self, round_info: RoundInfo, coding: Coding, product: torch.Tensor, out: Sequence[torch.Tensor]
    ) -> list[float]:
        return self._format.encode(coding, product, out)

    def memory(self, coding: Coding) -> Sequence[torch.Tensor]:
        return self._format.memory(coding)

    def restore_residual(self, round_info: RoundInfo, coding: Coding, messages: Sequence[Buffer]) -> None:
        self._format.restore_residual(coding, messages)
