"""The canonical flat vector of a model: the place of each parameter, and its starting value.

Peers exchange, hash and store one flat fp32 vector. Its order, fixed here by name, belongs to the protocol: two
programs that disagree about it cannot train together.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, NamedTuple

import msgspec
import torch
from torch import Tensor

from peer.bounds import Number
from peer.config import ModelConfig
from peer.footprint.parameters import EMBEDDING, parameter_shapes
from peer.ipc.span import Span


class TensorSlot(NamedTuple):
    """The place of one parameter in the flat vector, in elements."""

    offset: Number
    shape: Annotated[tuple[Number, ...], msgspec.Meta(max_length=8)]
    numel: Number


@dataclass(frozen=True)
class FlatLayout:
    """Canonical name -> TensorSlot, in order and without gaps; `numel` is the length of the flat vector."""

    slots: Mapping[str, TensorSlot]
    numel: int

    @classmethod
    def of(cls, config: ModelConfig, span: Span | None = None) -> FlatLayout:
        """Build the layout of the blocks `span` (None: the whole model)."""
        slots: dict[str, TensorSlot] = {}
        offset = 0
        for name, shape in parameter_shapes(config, None if span is None else span.blocks):
            slots[name] = TensorSlot(offset, shape, math.prod(shape))
            offset += slots[name].numel
        return cls(slots, offset)

    @property
    def shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Names and shapes, in order."""
        return ((name, slot.shape) for name, slot in self.slots.items())

    def views(self, flat: Tensor) -> dict[str, Tensor]:
        """Return each parameter as a view into `flat` (1-D, `numel` elements, any dtype and device)."""
        if flat.shape != (self.numel,):
            raise ValueError(f"the flat vector has shape {tuple(flat.shape)}, the layout needs ({self.numel},)")
        return {
            name: flat[slot.offset : slot.offset + slot.numel].view(slot.shape) for name, slot in self.slots.items()
        }

    @cached_property
    def digest(self) -> bytes:
        """32 bytes, equal exactly when names, order and shapes are."""
        text = "".join(f"{name} {slot.shape}\n" for name, slot in self.slots.items())
        return hashlib.blake2b(text.encode(), digest_size=32).digest()


def split_flat(config: ModelConfig, flat: Tensor, stages: Sequence[Span]) -> list[Tensor]:
    """Return each stage's flat vector, a view into the whole model's `flat` (1-D, any dtype).

    The canonical order is that of the computation, so a stage's vector is one contiguous part of the model's. Nothing
    is copied, converted or reordered.
    """
    lengths = [FlatLayout.of(config, span).numel for span in stages]
    if flat.shape != (sum(lengths),):
        raise ValueError(f"the flat vector has shape {tuple(flat.shape)}, these stages need ({sum(lengths)},)")
    return list(flat.split(lengths))


def join_flat(config: ModelConfig, parts: Sequence[Tensor], stages: Sequence[Span]) -> Tensor:
    """Return the whole model's flat vector: the inverse of `split_flat`, to the bit."""
    for part, span in zip(parts, stages, strict=True):
        numel = FlatLayout.of(config, span).numel
        if part.shape != (numel,):
            raise ValueError(f"the stage of blocks {span} has shape {tuple(part.shape)}, its layout needs ({numel},)")
    whole = torch.cat(list(parts))
    if whole.shape != (FlatLayout.of(config).numel,):
        raise ValueError(f"the stages {list(map(str, stages))} are not the whole model of {config.layers} blocks")
    return whole


def untie(config: ModelConfig, flat: Tensor) -> tuple[ModelConfig, Tensor]:
    """Return the same model with a head of its own, a copy of the embedding.

    A pipeline needs it: the embedding lies on the first stage and the head on the last. The model computes the same;
    the two parameters diverge from the first step on.
    """
    if not config.tie_embeddings:
        return config, flat
    embedding = FlatLayout.of(config).views(flat)[EMBEDDING]
    return msgspec.structs.replace(config, tie_embeddings=False), torch.cat([flat, embedding.flatten()])


def init_flat(config: ModelConfig, seed: int, out: Tensor | None = None, span: Span | None = None) -> Tensor:
    """Return starting weights as one flat fp32 CPU vector: the same bits on every machine; a stage equals its slice.

    Norm gains are 1, biases and an adapter's B 0. Embeddings are uniform with standard deviation 0.02. Matrices have
    fan_in ** -0.5, divided by sqrt(2 * layers) where they write to the residual stream. The distribution is uniform
    because a normal sample goes through log and cos, whose last bits differ between CPUs.
    """
    layout = FlatLayout.of(config, span)
    flat = torch.empty(layout.numel) if out is None else out
    for name, view in layout.views(flat).items():
        if view.dim() == 1:
            view.fill_(0.0 if name.endswith("bias") else 1.0)
            continue
        if name.endswith(".lora_B.weight"):
            view.zero_()
            continue
        if name.endswith(".lora_A.weight"):
            std = (3 * view.shape[1]) ** -0.5  # uniform within 1 / sqrt(fan_in), as PEFT draws it
        elif name.endswith("embed_tokens.weight"):
            std = 0.02
        elif name.endswith(("o_proj.weight", "down_proj.weight")):
            std = (view.shape[1] * 2 * config.layers) ** -0.5
        else:
            std = view.shape[1] ** -0.5
        word = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=4).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(word, "big"))
        torch.rand(view.shape, generator=generator, out=view)
        view.sub_(0.5).mul_(2 * math.sqrt(3.0) * std)
    return flat
