"""The canonical flat vector of a model: which parameter lies where, and how it starts.

Everything peers exchange, hash and store is one flat fp32 vector. Its order is fixed here, by name, and belongs to the
protocol: two programs that disagree about it cannot train together.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import msgspec
import torch
from torch import Tensor

from peer.config import ModelConfig


class TensorSlot(NamedTuple):
    """Where one parameter lies in the flat vector, in elements."""

    offset: int
    shape: tuple[int, ...]
    numel: int


def parameter_shapes(config: ModelConfig, layers: range | None = None) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Hugging Face names and shapes of the stage that holds `layers` (None: the whole model), in canonical order.

    The first stage holds the embedding, the last one the final norm and the head. A tied head is not a parameter, and
    of blocks that share theirs only the first has any.
    """
    layers = range(config.layers) if layers is None else layers
    hidden, inter, dim = config.hidden_size, config.intermediate_size, config.head_size
    q_rows, kv_rows = config.heads * dim, config.kv_heads * dim
    if layers.start == 0:
        yield "model.embed_tokens.weight", (config.vocab_size, hidden)
    for index in layers:
        if index % config.shared_blocks:
            continue
        at = f"model.layers.{index}."
        yield at + "input_layernorm.weight", (hidden,)
        for name, rows in (("q", q_rows), ("k", kv_rows), ("v", kv_rows)):
            yield at + f"self_attn.{name}_proj.weight", (rows, hidden)
            if config.attention_bias:
                yield at + f"self_attn.{name}_proj.bias", (rows,)
        if config.qk_norm:
            yield at + "self_attn.q_norm.weight", (dim,)
            yield at + "self_attn.k_norm.weight", (dim,)
        yield at + "self_attn.o_proj.weight", (hidden, q_rows)
        yield at + "post_attention_layernorm.weight", (hidden,)
        yield at + "mlp.gate_proj.weight", (inter, hidden)
        yield at + "mlp.up_proj.weight", (inter, hidden)
        yield at + "mlp.down_proj.weight", (hidden, inter)
    if layers.stop == config.layers:
        yield "model.norm.weight", (hidden,)
        if not config.tie_embeddings:
            yield "lm_head.weight", (config.vocab_size, hidden)


@dataclass(frozen=True)
class FlatLayout:
    """Canonical name -> Slot, in order and without gaps; `numel` is the length of the flat vector."""

    slots: Mapping[str, TensorSlot]
    numel: int

    @classmethod
    def of(cls, config: ModelConfig, layers: range | None = None) -> FlatLayout:
        slots: dict[str, TensorSlot] = {}
        offset = 0
        for name, shape in parameter_shapes(config, layers):
            slots[name] = TensorSlot(offset, shape, math.prod(shape))
            offset += slots[name].numel
        return cls(slots, offset)

    def views(self, flat: Tensor) -> dict[str, Tensor]:
        """Each parameter as a view into `flat` (1-D, `numel` elements, any dtype and device)."""
        if flat.shape != (self.numel,):
            raise ValueError(f"the flat vector has shape {tuple(flat.shape)}, the layout needs ({self.numel},)")
        return {
            name: flat[slot.offset : slot.offset + slot.numel].view(slot.shape) for name, slot in self.slots.items()
        }

    @cached_property
    def digest(self) -> bytes:
        """32 bytes that are equal exactly when names, order and shapes are."""
        text = "".join(f"{name} {slot.shape}\n" for name, slot in self.slots.items())
        return hashlib.blake2b(text.encode(), digest_size=32).digest()


def split_flat(config: ModelConfig, flat: Tensor, stages: Sequence[tuple[int, int]]) -> list[Tensor]:
    """Each stage's flat vector, a view into the whole model's `flat` (1-D, any dtype).

    `stages`: the blocks of each, (first, past the last), in order. The canonical order is that of the computation, so a
    stage's vector is one stretch of the model's; nothing is copied, converted or reordered.
    """
    lengths = [FlatLayout.of(config, range(*stage)).numel for stage in stages]
    if flat.shape != (sum(lengths),):
        raise ValueError(f"the flat vector has shape {tuple(flat.shape)}, these stages need ({sum(lengths)},)")
    return list(flat.split(lengths))


def join_flat(config: ModelConfig, parts: Sequence[Tensor], stages: Sequence[tuple[int, int]]) -> Tensor:
    """The whole model's flat vector of its stages': the inverse of `split_flat`, to the bit."""
    for part, stage in zip(parts, stages, strict=True):
        numel = FlatLayout.of(config, range(*stage)).numel
        if part.shape != (numel,):
            raise ValueError(f"the stage of blocks {stage} has shape {tuple(part.shape)}, its layout needs ({numel},)")
    whole = torch.cat(list(parts))
    if whole.shape != (FlatLayout.of(config).numel,):
        raise ValueError(f"the stages {list(stages)} are not the whole model of {config.layers} blocks")
    return whole


def untie(config: ModelConfig, flat: Tensor) -> tuple[ModelConfig, Tensor]:
    """The same model with a head of its own, a copy of the embedding: what a pipeline needs, since there the embedding
    lies on the first stage and the head on the last. It computes the same; from the first step on the two part."""
    if not config.tie_embeddings:
        return config, flat
    embedding = FlatLayout.of(config).views(flat)["model.embed_tokens.weight"]
    return msgspec.structs.replace(config, tie_embeddings=False), torch.cat([flat, embedding.flatten()])


def init_flat(config: ModelConfig, seed: int, out: Tensor | None = None, layers: range | None = None) -> Tensor:
    """Starting weights as one flat fp32 CPU vector; the same bits on every machine, and a stage equals its slice.

    Norm gains are 1, biases 0, embeddings uniform with standard deviation 0.02 and matrices fan_in ** -0.5, those that
    write to the residual stream divided by sqrt(2 * layers). Uniform and not normal: a normal sample goes through
    log and cos, whose last bits differ between CPUs.
    """
    layout = FlatLayout.of(config, layers)
    flat = torch.empty(layout.numel) if out is None else out
    for name, view in layout.views(flat).items():
        if view.dim() == 1:
            view.fill_(0.0 if name.endswith("bias") else 1.0)
            continue
        if name.endswith("embed_tokens.weight"):
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
