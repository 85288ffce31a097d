"""The head and its loss a part of the tokens at a time, so that the logits of a whole batch never exist.

Shapes: N tokens, C hidden_size, V vocab_size. Logits are 4 V bytes a token, 0.5 GB for each thousand tokens of a
vocabulary of 128,256. Their gradient is known as soon as they are: it becomes that of the hidden state and of the head
at once, and the backward pass only scales both (as Liger Kernel does, arXiv 2410.10989; `F.linear_cross_entropy` of
torch 2.13 has the same idea, but this program runs with 2.6 and later).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from peer.footprint.device import part_rows


def head_losses(hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sum of the losses, which has a gradient, and the losses (N,) in nats, which have none. fp32.

    hidden (N, C), weight (V, C), targets (N,) int64. Products are in the type of autocast where it is on, all else is
    fp32. The sum's gradient may be taken once.
    """
    kind = hidden.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else weight.dtype
    with torch.autocast(kind, enabled=False):
        total, losses = _HeadLoss.apply(hidden, weight, targets, dtype, torch.is_grad_enabled())  # type: ignore[no-untyped-call]
    return total, losses


class _HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, dtype: torch.dtype, with_gradients: bool
    ) -> tuple[Tensor, Tensor]:
        of_hidden = torch.empty_like(hidden) if with_gradients and ctx.needs_input_grad[0] else None
        of_weight = torch.zeros_like(weight) if with_gradients and ctx.needs_input_grad[1] else None
        narrow, losses = weight.to(dtype), torch.empty(len(hidden), dtype=weight.dtype, device=hidden.device)
        rows = part_rows(len(weight))
        for start in range(0, len(hidden), rows):
            at = slice(start, start + rows)
            given = hidden[at].to(dtype)
            logs = F.log_softmax(F.linear(given, narrow).to(weight.dtype), dim=1)
            wanted = targets[at, None]
            losses[at] = -logs.gather(1, wanted)[:, 0]
            if of_hidden is None and of_weight is None:
                continue
            slope = logs.exp_().scatter_add_(1, wanted, -torch.ones_like(wanted, dtype=logs.dtype)).to(dtype)
            if of_hidden is not None:
                of_hidden[at] = slope @ narrow
            if of_weight is not None:
                of_weight += slope.T @ given
        ctx.save_for_backward(of_hidden, of_weight)
        ctx.mark_non_differentiable(losses)
        return losses.sum(), losses

    @staticmethod
    def backward(ctx: Any, *seeds: Tensor) -> tuple[Tensor | None, ...]:
        of_hidden, of_weight = (None if one is None else one.mul_(seeds[0]) for one in ctx.saved_tensors)
        return of_hidden, of_weight, None, None, None
