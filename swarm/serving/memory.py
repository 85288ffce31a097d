"""How many blocks and pages a server has memory for."""

from __future__ import annotations

from typing import Final

from peer.free_memory import free_memory_bytes
from peer.ipc.block_messages import HIDDEN_BYTES, PAGE_TOKENS
from peer.ipc.span import Span
from swarm.run.manifest import ServedModelManifest
from swarm.serving.parts import part_bytes, part_spans

FREE_SHARE: Final = 0.6
CACHE_SHARE: Final = 0.25
"""Of the memory, at least so much is for keys and values."""
PAGES_MAX: Final = 1 << 16
SESSIONS_WANTED: Final = 64
"""More pages than these sessions can fill are of no use."""


def pages_that_fit(manifest: ServedModelManifest, span: Span, memory_bytes: float | None) -> int:
    """Return how many pages of keys and values there is room for beside the weights of a span; at least one session's
    of the shortest useful length."""
    weights = sum(part_bytes(manifest.model, manifest.dtype, part) for part in _inside(manifest, span))
    left = _memory(memory_bytes) - weights
    useful = SESSIONS_WANTED * -(-manifest.model.max_seq_len // PAGE_TOKENS)
    return int(max(4, min(left / (_page_bytes(manifest) * span.count), useful, PAGES_MAX)))


def blocks_that_fit(manifest: ServedModelManifest, memory_bytes: float | None) -> int:
    """Return how many blocks there is room for, with a share of the memory for keys and values."""
    room = (1 - CACHE_SHARE) * _memory(memory_bytes)
    largest = sorted((part_bytes(manifest.model, manifest.dtype, span), span.count) for span in part_spans(manifest))
    blocks = 0
    for size, count in reversed(largest):  # embedding and head are counted first: any window may have them
        room -= size
        if room < 0:
            return blocks
        blocks += count
    return blocks


def _memory(memory_bytes: float | None) -> float:
    return FREE_SHARE * free_memory_bytes() if memory_bytes is None else memory_bytes


def _inside(manifest: ServedModelManifest, span: Span) -> list[Span]:
    return [part for part in part_spans(manifest) if span.first <= part.first < span.end]


def _page_bytes(manifest: ServedModelManifest) -> int:
    """Return what one page of one block takes."""
    model = manifest.model
    return 2 * model.kv_heads * model.head_size * PAGE_TOKENS * HIDDEN_BYTES[manifest.dtype]
