"""The hash tree of a flat state: it names the state, and lets untrusted peers deliver it chunk by chunk.

The state is the bytes of its buffers one after the other (outer weights, then outer momentum), cut into chunks. The
root, a hash over the chunk hashes and the size, is the *state hash* that peers vote on. The root is enough to check the
list of chunk hashes, and the list to check each chunk before it is written.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from typing import Annotated, Final

import msgspec
from blake3 import blake3
from torch import Tensor

from peer.bounds import Hash, Number
from peer.machine import usable_cores

HASH_BYTES: Final = 32
MIN_CHUNK: Final = 64 << 10
MAX_CHUNK: Final = 4 << 20  # large against per-call costs, small enough that a bad chunk from a donor is cheap
_CHUNKS_WANTED: Final = 64  # a state below 256 MiB has smaller chunks, so that several donors can share the work


def chunk_size_for(size_bytes: int) -> int:
    """Return the chunk size of a state of `size_bytes`: a power of two that every peer derives alike."""
    size = MIN_CHUNK
    while size < MAX_CHUNK and size * _CHUNKS_WANTED < size_bytes:
        size *= 2
    return size


class StateTree(msgspec.Struct, frozen=True, dict=True):
    """The chunk hashes of one state; `hashes[i]` is the blake3 of the bytes `span(i)`."""

    chunk_size: Number
    size_bytes: Number
    hashes: Annotated[tuple[Hash, ...], msgspec.Meta(max_length=1 << 20)]

    @cached_property
    def root(self) -> bytes:
        """32 bytes that name the state: blake3 over its size, its chunk size and all chunk hashes."""
        return blake3(
            struct.pack("<QQ", self.size_bytes, self.chunk_size) + b"".join(self.hashes),
            derive_key_context="barnraise/1/state-tree",
        ).digest()

    def span(self, index: int) -> tuple[int, int]:
        """Return the half-open byte range of chunk `index`; the last chunk may be short."""
        start = index * self.chunk_size
        return start, min(start + self.chunk_size, self.size_bytes)

    def matches(self, index: int, data: bytes | bytearray | memoryview) -> bool:
        """Whether `data` is exactly chunk `index`."""
        start, end = self.span(index)
        return len(data) == end - start and blake3(data).digest() == self.hashes[index]

    @classmethod
    def of_hashes(cls, size_bytes: int, joined: bytes | memoryview) -> StateTree | None:
        """Return the tree of a state of `size_bytes` from its joined chunk hashes; None if their number is wrong.

        The caller must compare the `root` with the wanted one.
        """
        if len(joined) != hash_list_bytes(size_bytes):
            return None
        hashes = tuple(bytes(joined[i : i + HASH_BYTES]) for i in range(0, len(joined), HASH_BYTES))
        return cls(chunk_size_for(size_bytes), size_bytes, hashes)


def hash_list_bytes(size_bytes: int) -> int:
    """Return the size of the joined chunk hashes of a state of `size_bytes`."""
    return -(-size_bytes // chunk_size_for(size_bytes)) * HASH_BYTES


def hash_list_bytes_max(size_bytes: int) -> int:
    """Return the size of the longest list of a state of at most `size_bytes`: a smaller one may have more chunks."""
    return max(hash_list_bytes(size_bytes), _CHUNKS_WANTED * HASH_BYTES)


class StateBytes:
    """Several contiguous CPU tensors as one sequence of bytes, without a copy."""

    def __init__(self, buffers: Sequence[Tensor]) -> None:
        self._views: list[tuple[int, memoryview]] = []
        self.size = 0
        for buffer in buffers:
            if not buffer.is_contiguous() or buffer.device.type != "cpu":
                raise ValueError("a buffer is not a contiguous CPU tensor: copy it first")
            view = memoryview(buffer.detach().numpy().view("u1").data)
            self._views.append((self.size, view))
            self.size += len(view)

    def pieces(self, start: int, end: int) -> list[memoryview]:
        """Return views of the bytes [start, end): more than one if the range crosses buffers."""
        found = []
        for offset, view in self._views:
            piece = view[max(start - offset, 0) : max(end - offset, 0)]
            if len(piece):
                found.append(piece)
        return found

    def copy(self, start: int, end: int) -> bytes:
        """Return a copy of the bytes [start, end)."""
        return b"".join(self.pieces(start, end))


def hash_state(buffers: Sequence[Tensor], hashed: Callable[[int], None] | None = None) -> StateTree:
    """Hash flat buffers in the given order, on all cores (blake3 and the views release the GIL). `hashed` is called
    with the bytes of each chunk that is done, in the thread that hashed it.

    Blocks for about 0.2 s per GB: call it in a thread.
    """
    state = StateBytes(buffers)
    chunk = chunk_size_for(state.size)

    def digest(start: int) -> bytes:
        hasher, end = blake3(), min(start + chunk, state.size)
        for piece in state.pieces(start, end):
            hasher.update(piece)
        if hashed is not None:
            hashed(end - start)
        return hasher.digest()

    starts = range(0, state.size, chunk)
    if len(starts) < 4:
        hashes = tuple(map(digest, starts))
    else:
        with ThreadPoolExecutor(usable_cores(), thread_name_prefix="hash") as pool:
            hashes = tuple(pool.map(digest, starts))
    return StateTree(chunk, state.size, hashes)


class StreamHasher:
    """Hashes a state whose bytes come in pieces, one after the other, on one core."""

    def __init__(self, size_bytes: int) -> None:
        self._size_bytes, self._chunk = size_bytes, chunk_size_for(size_bytes)
        self._hashes: list[bytes] = []
        self._hasher, self._room = blake3(), self._chunk

    def passed(self, piece: memoryview) -> memoryview:
        """Hash the next bytes, and return them."""
        rest = piece
        while len(rest) >= self._room:
            self._hashes.append(self._hasher.update(rest[: self._room]).digest())
            rest, self._hasher, self._room = rest[self._room :], blake3(), self._chunk
        self._hasher.update(rest)
        self._room -= len(rest)
        return piece

    def tree(self) -> StateTree:
        """Return the tree, once all bytes have passed."""
        last = [self._hasher.digest()] if self._room < self._chunk else []
        return StateTree(self._chunk, self._size_bytes, (*self._hashes, *last))
