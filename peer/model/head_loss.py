"""The head and its loss a part of the tokens at a time, so that the logits of a whole batch never exist.

Shapes: N tokens, C hidden_size, V rows of the head here. Logits are 4 V bytes a token, 0.5 GB for each thousand tokens
of a vocabulary of 128,256. Their gradient is known as soon as they are: it becomes that of the hidden state and of the
head at once, and the backward pass only scales both (as Liger Kernel does, arXiv 2410.10989; `F.linear_cross_entropy`
of torch 2.13 has the same idea, but this program runs with 2.6 and later). Where the vocabulary is cut among several
devices, two vectors of the tokens go between them: the largest logit, then the sum of exponentials with the wanted one
(as in Megatron-LM, arXiv 1909.08053).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from peer.footprint.device import part_rows


@dataclass(frozen=True)
class VocabularyPart:
    """The rows of the head that this device has: those from `first` on. `largest` and `total` reduce a tensor over all
    parts, element by element, and return it. Parts are equally large, and each calls both for the same tokens."""

    first: int
    largest: Callable[[Tensor], Tensor]
    total: Callable[[Tensor], Tensor]


def head_losses(
    hidden: Tensor,
    head: Tensor,
    targets: Tensor,
    part: VocabularyPart | None = None,
    marked: bool = False,
    weight: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Return the sum of the losses, which has a gradient, and the losses (N,) in nats, which have none. fp32.

    hidden (N, C) fp32, head (V, C), targets (N,) int64. Products are in the type of autocast where it is on, all else
    is fp32, also where a frozen head is in bf16. The sum's gradient may be taken once. With a `part` the losses are
    those of the whole vocabulary, and the gradient of `hidden` is this part's share of it: the shares of all parts
    add up to it. `marked`: targets below 0 have no loss and no gradient (`peer.model.marks`). `weight`, above 0, is
    about the gradient that the sum will get: products in fp16 are of gradients that large, as they would be if they
    were computed in the backward pass.
    """
    kind = hidden.device.type
    wide = torch.promote_types(hidden.dtype, head.dtype)  # split weights, and a frozen base, have fewer bits
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else wide
    with torch.autocast(kind, enabled=False):
        way = _Way(dtype, torch.is_grad_enabled(), marked, weight if dtype == torch.float16 else 1.0)
        total, losses = _HeadLoss.apply(hidden, head, targets, way, part)  # type: ignore[no-untyped-call]
    return total, losses


class _Way(NamedTuple):
    """How the losses are computed."""

    dtype: torch.dtype
    """Of the products."""
    with_gradients: bool
    marked: bool
    weight: float
    """Of the gradients that the forward pass computes."""


class _HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        way: _Way,
        part: VocabularyPart | None,
    ) -> tuple[Tensor, Tensor]:
        dtype, with_gradients, marked, scale = way
        counts = targets >= 0 if marked else None
        targets = targets.clamp(min=0) if marked else targets
        of_hidden = torch.empty_like(hidden) if with_gradients and ctx.needs_input_grad[0] else None
        wide = torch.promote_types(weight.dtype, torch.float32)  # of all but the products
        of_weight = torch.zeros_like(weight, dtype=wide) if with_gradients and ctx.needs_input_grad[1] else None
        narrow, losses = weight.to(dtype), torch.empty(len(hidden), dtype=wide, device=hidden.device)
        rows = part_rows(len(weight))
        for start in range(0, len(hidden), rows):
            at = slice(start, start + rows)
            given = hidden[at].to(dtype)
            logits = F.linear(given, narrow).to(wide)
            if part is None:
                logs, wanted, is_here = F.log_softmax(logits, dim=1), targets[at, None], None
                losses[at] = -logs.gather(1, wanted)[:, 0]
            else:
                logs, wanted, is_here = _cut_log_softmax(logits, targets[at, None], part, losses[at])
            if counts is not None:
                losses[at] *= counts[at]
            del logits
            if of_hidden is None and of_weight is None:
                continue
            ones = torch.ones_like(wanted, dtype=logs.dtype) if is_here is None else is_here.to(logs.dtype)
            slope = logs.exp_().scatter_add_(1, wanted, -ones)
            slope = (slope if scale == 1.0 else slope.mul_(scale)).to(dtype)
            if counts is not None:
                slope *= counts[at, None]
            if of_hidden is not None:
                of_hidden[at] = slope @ narrow
            if of_weight is not None:
                of_weight += slope.T @ given
        ctx.save_for_backward(of_hidden, of_weight)
        ctx.scale = scale
        ctx.mark_non_differentiable(losses)
        return losses.sum(), losses

    @staticmethod
    def backward(ctx: Any, *seeds: Tensor) -> tuple[Tensor | None, ...]:
        seed = seeds[0] if ctx.scale == 1.0 else seeds[0] / ctx.scale
        of_hidden, of_weight = (None if one is None else one.mul_(seed) for one in ctx.saved_tensors)
        return of_hidden, of_weight, None, None, None


def _cut_log_softmax(
    logits: Tensor, targets: Tensor, part: VocabularyPart, losses: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Turn logits (n, V) of one part into logarithms of the probabilities in the whole vocabulary, in place, and fill
    `losses` (n,). Return them, the columns of the targets (n, 1), and whether they lie in this part."""
    columns = targets - part.first
    is_here = (columns >= 0) & (columns < logits.shape[1])
    columns = columns.where(is_here, 0)
    logits -= part.largest(logits.amax(1, keepdim=True))
    wanted = logits.gather(1, columns).where(is_here, 0)
    sums = part.total(torch.cat([logits.exp().sum(1, keepdim=True), wanted], dim=1))
    log_sum = sums[:, :1].log()
    losses.copy_((log_sum - sums[:, 1:])[:, 0])
    return logits.sub_(log_sum), columns, is_here
