"""The work of training, in FLOPs."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import chain
from typing import Final

from peer.config import ModelConfig
from peer.footprint.parameters import base_of, parameter_shapes

BACKWARD_WORK: Final = 2.0  # of the forward pass's


@dataclass(frozen=True)
class PartWork:
    """FLOPs of a token's forward pass through parts of a model, and the parts' parameters. A `group` is the blocks that
    share parameters; one block where none do. A lookup in the embedding takes no time."""

    group: float
    head: float
    group_parameters: int
    embedding_parameters: int
    head_parameters: int
    """0 of a tied head."""


def part_work(model: ModelConfig, seq_len: int) -> PartWork:
    """Return the work of the model's parts on sequences of that length."""
    matrices = norms = 0
    parts = (base_of(model),) if model.adapter is None else (base_of(model), model)
    for name, shape in chain.from_iterable(parameter_shapes(part, range(model.shared_blocks)) for part in parts):
        if name.startswith("model.layers."):
            matrices += math.prod(shape) * (len(shape) == 2)
            norms += math.prod(shape) * (len(shape) == 1)
    # Queries against half of the keys (the mask), then the same with the values.
    attention = 2.0 * seq_len * model.heads * model.head_size
    values = model.vocab_size * model.hidden_size
    return PartWork(
        group=model.shared_blocks * (2.0 * matrices + attention),
        head=2.0 * values,
        group_parameters=matrices + norms,
        embedding_parameters=values,
        head_parameters=0 if model.tie_embeddings else values,
    )


def training_work(model: ModelConfig, blocks: range, seq_len: int, recompute: bool = False) -> float:
    """Return the FLOPs of a token forward and backward through some blocks; with `recompute` forward twice. Of a frozen
    base the backward pass makes no gradients of weights; those of its adapter, about a hundredth, are left out."""
    parts = part_work(model, seq_len)
    forward = len(blocks) // model.shared_blocks * parts.group + (blocks.stop == model.layers) * parts.head
    return (1 + BACKWARD_WORK / (2 if model.adapter else 1) + recompute) * forward
