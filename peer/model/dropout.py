"""Dropout before the adapter of a layer, as LoRA has it (arXiv 2106.09685).

What is dropped depends on the sample, the layer and the place alone: the same in a pass that is repeated for its
backward, in micro-batches of another size, and in stages. Imported only where something is dropped, as torch takes a
second to load what it defines operators with.
"""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import Tensor


@torch.library.custom_op("barnraise::drop", mutates_args=())
def drop(x: Tensor, samples: Tensor, layer: str, rate: float) -> Tensor:
    """Return x (B, ..., C) with about `rate` of its values zero and the others divided by 1 - rate. `samples` (B,)
    int64, on the CPU: the number of each row's sample."""
    kept = torch.empty_like(x)
    for row, sample in zip(kept, samples.tolist(), strict=True):
        word = hashlib.blake2b(f"{layer}:{sample}".encode(), digest_size=4).digest()  # a CPU's generator takes 32 bits
        generator = torch.Generator(x.device).manual_seed(int.from_bytes(word, "big"))
        row.bernoulli_(1 - rate, generator=generator)
    return kept.mul_(x).div_(1 - rate)


@drop.register_fake
def _(x: Tensor, samples: Tensor, layer: str, rate: float) -> Tensor:
    return torch.empty_like(x)


def _remember(ctx: Any, inputs: tuple[Tensor, Tensor, str, float], output: Tensor) -> None:
    ctx.save_for_backward(inputs[1])
    ctx.layer, ctx.rate = inputs[2:]


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
    return drop(gradient, *ctx.saved_tensors, ctx.layer, ctx.rate), None, None, None


drop.register_autograd(_backward, setup_context=_remember)
