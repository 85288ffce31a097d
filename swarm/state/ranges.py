"""Byte ranges of a state, and the chunks that hold them."""

from __future__ import annotations

from collections.abc import Iterable

from peer.checkpoint.hash_tree import chunk_size_for

ByteRange = tuple[int, int]
"""Half-open: (first, end)."""


def chunks_of(size_bytes: int, ranges: Iterable[ByteRange]) -> set[int]:
    """Return the chunks of a state of `size_bytes` that overlap `ranges`. ValueError if a range is not inside it."""
    chunk = chunk_size_for(size_bytes)
    found: set[int] = set()
    for first, end in ranges:
        if not 0 <= first < end <= size_bytes:
            raise ValueError(f"the range {first} to {end} is not inside a state of {size_bytes} bytes")
        found.update(range(first // chunk, -(-end // chunk)))
    return found


def spans_of(size_bytes: int, chunks: Iterable[int]) -> list[ByteRange]:
    """Return the byte ranges of `chunks`, adjacent ones joined, in order."""
    chunk = chunk_size_for(size_bytes)
    spans: list[ByteRange] = []
    for index in sorted(chunks):
        first, end = index * chunk, min((index + 1) * chunk, size_bytes)
        if spans and spans[-1][1] == first:
            spans[-1] = (spans[-1][0], end)
        else:
            spans.append((first, end))
    return spans
