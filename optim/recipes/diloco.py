"""DiLoCo, Streaming DiLoCo and eager updates on the network: one outer step on the mean pseudo-gradient."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from optim.codecs import Buffer, Codec
from optim.outer import DilocoOuter
from optim.recipes.dense import DenseCoding, Feedback
from optim.recipes.interface import Coding, Recipe, Turn


class DilocoRecipe(Recipe):
    """`fragments`: the stretches of the flat vector of which a round exchanges the next set in turn; DiLoCo has one,
    the whole vector (arXiv 2311.08105); Streaming DiLoCo several (2501.18512). A round that is discarded is retried
    with the same fragment, since the turn is counted in commits."""

    shared = ("momentum",)

    def __init__(self, fragments: Sequence[Sequence[slice]], up: Codec, down: Codec, outer: DilocoOuter) -> None:
        self._codings = [DenseCoding(places, up, down) for places in fragments]
        self._outer = outer
        self._feedback = Feedback()

    def coding(self, turn: Turn, state: Sequence[torch.Tensor]) -> DenseCoding:
        return self._codings[(turn.round - 1) % len(self._codings)]

    def step_into(
        self, turn: Turn, after: Sequence[torch.Tensor], before: Sequence[torch.Tensor], update: torch.Tensor
    ) -> None:
        self._outer.step_into(after[0], after[1], before[0], before[1], update)

    def encode(self, turn: Turn, coding: Coding, product: torch.Tensor, out: Sequence[torch.Tensor]) -> list[float]:
        assert isinstance(coding, DenseCoding)
        return self._feedback.encode(coding, product, out)

    def take_back(self, turn: Turn, coding: Coding, messages: Sequence[Buffer]) -> None:
        assert isinstance(coding, DenseCoding)
        self._feedback.take_back(coding, messages)
