"""The parameters of a model: names, shapes and number, in the order of the flat vector."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Final

import msgspec

from peer.config import AdapterConfig, ModelConfig

Shape = tuple[int, ...]
EMBEDDING: Final = "model.embed_tokens.weight"
HEAD: Final = "lm_head.weight"


def parameter_shapes(config: ModelConfig, blocks: range | None = None) -> Iterator[tuple[str, Shape]]:
    """Yield the Hugging Face names and shapes of some blocks (None: the whole model), in canonical order.

    The first block brings the embedding, the last one the final norm and the head. A tied head is not a parameter. Of
    blocks that share their parameters only the first has any. Of a model with an adapter these are the adapter's A and
    B, by PEFT's names without its prefix; `base_of` has the others.
    """
    if config.adapter is not None:
        yield from _adapter_shapes(config, config.adapter, blocks)
        return
    blocks = range(config.layers) if blocks is None else blocks
    hidden, inter, dim = config.hidden_size, config.intermediate_size, config.head_size
    q_rows, kv_rows = config.heads * dim, config.kv_heads * dim
    if blocks.start == 0:
        yield EMBEDDING, (config.vocab_size, hidden)
    for index in blocks:
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
        if config.output_bias:
            yield at + "self_attn.o_proj.bias", (hidden,)
        yield at + "post_attention_layernorm.weight", (hidden,)
        yield at + "mlp.gate_proj.weight", (inter, hidden)
        yield at + "mlp.up_proj.weight", (inter, hidden)
        yield at + "mlp.down_proj.weight", (hidden, inter)
    if blocks.stop == config.layers:
        yield "model.norm.weight", (hidden,)
        if not config.tie_embeddings:
            yield HEAD, (config.vocab_size, hidden)


def base_of(config: ModelConfig) -> ModelConfig:
    """Return the model without its adapter."""
    return msgspec.structs.replace(config, adapter=None)


def frozen_shapes(config: ModelConfig, blocks: range | None = None) -> Iterator[tuple[str, Shape]]:
    """Yield the names and shapes of the base beside the adapter of some blocks (None: the whole model). The last blocks
    have the embedding, too, where it is the head as well: no copy of it changes, so a tied base may be cut."""
    blocks = range(config.layers) if blocks is None else blocks
    yield from parameter_shapes(base_of(config), blocks)
    if config.tie_embeddings and blocks.stop == config.layers and blocks.start > 0:
        yield EMBEDDING, (config.vocab_size, config.hidden_size)


def _adapter_shapes(config: ModelConfig, adapter: AdapterConfig, blocks: range | None) -> Iterator[tuple[str, Shape]]:
    for name, shape in parameter_shapes(base_of(config), blocks):
        layer, _, kind = name.rpartition(".")
        if kind == "weight" and layer.rpartition(".")[2] in adapter.targets:
            yield f"{layer}.lora_A.weight", (adapter.rank, shape[1])
            yield f"{layer}.lora_B.weight", (shape[0], adapter.rank)


def parameter_count(config: ModelConfig, blocks: range | None = None) -> int:
    """Return the length of the flat vector of some blocks (None: the whole model)."""
    return sum(math.prod(shape) for _, shape in parameter_shapes(config, blocks))
