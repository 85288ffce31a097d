"""Layouts of any tensors, without a model."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from peer.model.layout import FlatLayout, TensorSlot


def layout_of(tensors: Mapping[str, torch.Tensor]) -> FlatLayout:
    """Return the layout of these tensors in their order."""
    slots, offset = {}, 0
    for name, tensor in tensors.items():
        slots[name] = TensorSlot(offset, tuple(tensor.shape), tensor.numel())
        offset += tensor.numel()
    return FlatLayout(slots, offset)
