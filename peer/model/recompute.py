"""Activation recomputation: what a block keeps for its backward pass, and what it computes a second time there."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from peer.footprint.workload import Recompute

_aten = torch.ops.aten
_PRODUCTS: Final = [
    _aten.mm.default,
    _aten.addmm.default,
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_cudnn_attention.default,
]


def run_block(block: Callable[..., Tensor], recompute: Recompute, *inputs: Tensor) -> Tensor:
    """Return the block's output. For the backward it keeps everything ("none"), the outputs of matrix products and of
    the attention ("selective", arXiv 2205.05198), or its inputs alone ("full", arXiv 1604.06174)."""
    if recompute == "none" or not torch.is_grad_enabled():
        return block(*inputs)
    contexts: dict[str, Any] = {}
    if recompute == "selective":
        contexts["context_fn"] = partial(create_selective_checkpoint_contexts, _PRODUCTS)
    out: Tensor = checkpoint(block, *inputs, use_reentrant=False, preserve_rng_state=False, **contexts)
    return out
