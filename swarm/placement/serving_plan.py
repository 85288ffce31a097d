"""A served model's demands on a machine. Pure, without torch."""

from __future__ import annotations

import msgspec

from peer.config import ModelConfig, Quantization
from peer.footprint.stored import stored_tensors
from peer.footprint.workload import DeviceKind
from peer.ipc.block_messages import HIDDEN_BYTES, PAGE_TOKENS, HiddenType
from peer.ipc.span import Span
from peer.model.parameter_names import EMBEDDING, HEAD
from swarm.serving.memory import FREE_SHARE, GPU_SHARE, blocks_that_fit, pages_that_fit
from swarm.serving.weights import EvenWeights


class ServingPlan(msgspec.Struct, frozen=True, kw_only=True):
    """All that `peer plan --serve` says."""

    layers: int
    dtype: HiddenType
    quantization: Quantization | None
    device: DeviceKind
    memory_bytes: float
    """For weights and caches together."""
    embedding_bytes: int
    blocks_bytes: int
    head_bytes: int
    token_bytes: int
    """Keys and values of one token in all blocks."""
    blocks_that_fit: int
    tokens_kept: int
    """Of all sessions together, beside as many blocks as fit."""
    fits: bool
    """Whether one such machine serves the whole model."""

    @property
    def servers(self) -> int:
        """How many such machines serve the whole model; 0 if none holds a block."""
        return -(-self.layers // self.blocks_that_fit) if self.blocks_that_fit else 0


def plan_serving(
    model: ModelConfig,
    dtype: HiddenType,
    quantization: Quantization | None,
    device: DeviceKind,
    machine_bytes: float,
) -> ServingPlan:
    """Return the plan of a machine with this much memory, that of its GPU if it has one. Raises ConfigError if the
    model cannot be quantized so."""
    model = msgspec.structs.replace(model, tie_embeddings=False)  # the last server has a head of its own
    weights = EvenWeights(model, dtype, quantization)
    memory = (FREE_SHARE if device == "cpu" else GPU_SHARE) * machine_bytes
    room = min(blocks_that_fit(weights, memory), model.layers)
    step = model.shared_blocks
    room -= room % step
    ends = {tensor.of: tensor.size_bytes for tensor in stored_tensors(model, None, dtype, None)}
    whole = sum(tensor.size_bytes for tensor in stored_tensors(model, None, dtype, quantization))
    pages = pages_that_fit(weights, Span(0, room, model.layers), memory) if room else 0
    return ServingPlan(
        layers=model.layers,
        dtype=dtype,
        quantization=quantization,
        device=device,
        memory_bytes=memory,
        embedding_bytes=ends[EMBEDDING],
        blocks_bytes=whole - ends[EMBEDDING] - ends[HEAD],
        head_bytes=ends[HEAD],
        token_bytes=2 * model.kv_heads * model.head_size * HIDDEN_BYTES[dtype] * model.layers,
        blocks_that_fit=room,
        tokens_kept=pages * PAGE_TOKENS,
        fits=room == model.layers,
    )
