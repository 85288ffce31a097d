"""How many blocks and pages a server has memory for."""

from __future__ import annotations

from typing import Final

import msgspec

from peer.config import HiddenType, ModelConfig, Quantization
from peer.errors import ConfigError, ResourceError
from peer.footprint.parameters import EMBEDDING, HEAD
from peer.footprint.stored import stored_tensors
from peer.footprint.workload import DeviceKind
from peer.ipc.block_messages import HIDDEN_BYTES, PAGE_TOKENS
from peer.ipc.span import Span
from peer.machine import free_memory_bytes
from swarm.parts.weights import EvenWeights, Weights, part_bytes, part_spans

FREE_SHARE: Final = 0.6
"""Of the machine's free memory, where other programs run too."""
GPU_SHARE: Final = 0.9
"""Of a GPU's memory: the rest is for the library's context and what a step computes."""
CACHE_SHARE: Final = 0.15
"""At least this share of the memory is for keys and values."""
PAGES_MAX: Final = 1 << 16
SESSIONS_WANTED: Final = 64
"""More pages than these sessions can fill are of no use."""


def pages_that_fit(weights: Weights, span: Span, memory_bytes: float | None) -> int:
    """Return how many pages of keys and values there is room for beside the weights of a span; at least one session's
    of the shortest useful length."""
    held = sum(part_bytes(weights, part) for part in _inside(weights, span))
    left = memory_for(memory_bytes) - held
    useful = SESSIONS_WANTED * -(-weights.model.max_seq_len // PAGE_TOKENS)
    return int(max(4, min(left / (_page_bytes(weights) * span.count), useful, PAGES_MAX)))


def check_room(weights: Weights, blocks: tuple[int, int] | None, memory_bytes: float | None) -> int:
    """Return how many blocks there is room for. Raises ConfigError for `blocks` that the model has not, ResourceError
    where these, or for None a single one, do not fit."""
    layers = weights.model.layers
    first, end = blocks or (0, 1)
    if not 0 <= first < end <= layers:
        raise ConfigError(f"--blocks {first}:{end} is not inside the model's {layers} blocks: choose others")
    room = blocks_that_fit(weights, memory_bytes)
    if room < 1:
        raise ResourceError("there is no memory for a single block: free some, or raise --memory")
    if end - first > room:
        raise ResourceError(
            f"{end - first} blocks need more memory than is free, which is enough for {room}: choose fewer, or raise"
            " --memory"
        )
    return room


def blocks_that_fit(weights: Weights, memory_bytes: float | None) -> int:
    """Return how many blocks there is room for, with a share of the memory for keys and values."""
    room = (1 - CACHE_SHARE) * memory_for(memory_bytes)
    largest = sorted((part_bytes(weights, span), span.count) for span in part_spans(weights))
    blocks = 0
    for size, count in reversed(largest):  # embedding and head are counted first: any window may have them
        room -= size
        if room < 0:
            return blocks
        blocks += count
    return blocks


def given_memory(gigabytes: float | None, device_bytes: int) -> float | None:
    """Return the bytes for weights and caches: what the user gave, else a share of a GPU's `device_bytes`; None where
    there is no GPU, for `memory_for`."""
    if gigabytes is not None:
        return gigabytes * 1e9
    return GPU_SHARE * device_bytes if device_bytes else None


def memory_for(memory_bytes: float | None) -> float:
    """Return the bytes for weights and caches: what was given, else a share of what is free now."""
    return FREE_SHARE * free_memory_bytes() if memory_bytes is None else memory_bytes


def _inside(weights: Weights, span: Span) -> list[Span]:
    return [part for part in part_spans(weights) if span.first <= part.first < span.end]


def _page_bytes(weights: Weights) -> int:
    """Return what one page of one block takes."""
    model = weights.model
    return 2 * model.kv_heads * model.head_size * PAGE_TOKENS * HIDDEN_BYTES[weights.dtype]


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
