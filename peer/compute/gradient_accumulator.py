"""The sum of the gradients of a stage's micro-batches.

Each gradient is that of the loss in nats summed over the tokens of a micro-batch, so that micro-batches of any size add
up. The mean over all tokens is taken once, at the end. P: parameters of the stage.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from peer.ipc.stage_spec import MicroBatch, Taken
from peer.model.layout import FlatLayout


class GradientSum:
    """The gradient sum `flat` (P fp32) of the micro-batches `counted` (id -> epoch, in the order of their backwards),
    which have `tokens` tokens in all."""

    def __init__(self, layout: FlatLayout, names: Sequence[str], like: Tensor) -> None:
        """`names` are those of the parameters, in the order in which `add` gets their gradients."""
        self.flat = torch.zeros_like(like)
        self.tokens = 0
        self.counted: dict[str, int] = {}
        views = layout.views(self.flat)
        self._views = [views[name] for name in names]

    def add(self, micro_batch: MicroBatch, tokens: int, gradients: Sequence[Tensor], scale: float = 1.0) -> None:
        """Add the gradients of one micro-batch of so many tokens, which are multiplied by `scale`."""
        for total, one in zip(self._views, gradients, strict=True):
            total.add_(one, alpha=1 / scale)
        self.counted[micro_batch.id] = micro_batch.epoch
        self.tokens += tokens

    def mean(self, out: Tensor | None = None) -> Tensor:
        """Return the mean over the tokens, (P,), in `out` if given; zero if there are no tokens."""
        flat = self.flat if out is None else self.flat.to(out.device)
        return torch.div(flat, max(1, self.tokens), out=out)

    def forget(self, norm: float = 0.0) -> Taken:
        """Clear the sum and return its content; `norm` is that of the mean."""
        taken = self.taken(norm)
        self.flat.zero_()
        self.counted, self.tokens = {}, 0
        return taken

    def taken(self, norm: float) -> Taken:
        """Return the content of the sum; `norm` is that of the mean."""
        return Taken(tuple(self.counted), self.tokens, norm)
