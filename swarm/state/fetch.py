"""The joiner's side of state transfer: a state, or byte ranges of it, from several donors at once.

The hash of the state comes from a certified head (`swarm.protocol.agreement`). The list of chunk hashes is checked
against it, and each chunk against the list before it is written, so no donor is trusted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import trio
from torch import Tensor

from peer.checkpoint.generation import StateGeneration
from peer.checkpoint.hash_tree import StateTree, hash_state
from peer.checkpoint.mapped_floats import FLOAT_BYTES, map_floats
from peer.errors import ResourceError
from peer.events import EventLog
from peer.net.rpc import Rpc
from swarm.state.chunk_fetch import ChunkFetch, Holders, StateGone
from swarm.state.partial_file import PartFile
from swarm.state.ranges import ByteRange, chunks_of

Donors = Callable[[], Iterable[str]]
"""The peers to ask. Called again and again: peers may be added during a fetch."""


@dataclass(frozen=True)
class StateFiles:
    """Where a fetched state lies."""

    part: Path
    """While it arrives."""
    kept: Path | None = None
    """From then on: the file is moved there, and synced. None: its name is removed, and it is gone with the last reader
    of the state."""


@dataclass(frozen=True)
class Fetched:
    """A whole state, mapped from the file that it was fetched to."""

    tensors: tuple[Tensor, ...]
    """Flat fp32, each of shape (P,)."""
    tree: StateTree
    donors: dict[str, int]
    """Bytes taken from each."""
    resumed_bytes: int
    """Chunks that an earlier attempt left in the part file."""
    seconds: float

    def named(self, vectors: Sequence[str]) -> StateGeneration:
        """Return the state with its vectors' names."""
        return StateGeneration(dict(zip(vectors, self.tensors, strict=True)), self.tree)


@dataclass(frozen=True)
class FetchedRanges:
    """Byte ranges of a state, mapped from the part file."""

    flat: Tensor
    """The whole state as flat fp32. Outside the fetched chunks it is undefined: use `floats`."""
    chunks: frozenset[int]
    """The chunks that were fetched or there already: those that overlap the ranges."""
    tree: StateTree
    donors: dict[str, int]
    """Bytes taken from each."""
    resumed_bytes: int
    """Chunks that earlier fetches left in the part file."""
    seconds: float

    def floats(self, first: int, end: int) -> Tensor:
        """Return bytes [first, end) as flat fp32, mapped. ValueError unless they are whole floats and fetched."""
        chunks = chunks_of(self.tree.size_bytes, [(first, end)])
        if first % FLOAT_BYTES or end % FLOAT_BYTES or not chunks <= self.chunks:
            raise ValueError(f"bytes {first} to {end} are not whole floats of the fetched ranges")
        return self.flat[first // FLOAT_BYTES : end // FLOAT_BYTES]


async def fetch_state(
    rpc: Rpc,
    donors: Donors | Holders,
    root: bytes,
    size_bytes: int,
    part_file: Path | StateFiles,
    events: EventLog,
    vectors: int = 2,
) -> Fetched:
    """Fetch the whole state whose hash is `root`: `vectors` vectors of one length.

    If this fails or is cancelled, verified chunks stay in `part_file` for the next attempt. The file is removed when no
    donor holds the state any more, and at success, unless it is kept (`StateFiles`). Events: state_progress,
    peer_penalized.

    Raises NetworkError if no donor has the state (any more) or none delivers for a minute, and ResourceError if the
    disk is full or read-only.
    """
    started = trio.current_time()
    files = part_file if isinstance(part_file, StateFiles) else StateFiles(part_file)
    part = await trio.to_thread.run_sync(PartFile, files.part, size_bytes)
    try:
        fetch = ChunkFetch(rpc, donors, root, part, events)
        await fetch.run()
        tensors = (await trio.to_thread.run_sync(part.mapped)).chunk(vectors)
        arrived = await trio.to_thread.run_sync(hash_state, tensors)
        if arrived.root == root and files.kept is not None:
            await trio.to_thread.run_sync(part.keep, files.kept)
        else:
            part.discard()
        if arrived.root != root:
            raise _misread(files.part)
    except StateGone:
        part.discard()
        raise
    finally:
        part.close()
    return Fetched(tensors, arrived, fetch.taken_bytes, fetch.resumed_bytes, trio.current_time() - started)


async def fetch_ranges(
    rpc: Rpc,
    donors: Donors,
    root: bytes,
    size_bytes: int,
    ranges: Sequence[ByteRange],
    part_file: Path,
    events: EventLog,
) -> FetchedRanges:
    """Fetch the chunks that overlap `ranges` of the state of `size_bytes` whose hash is `root`.

    Only these chunks are asked for. `part_file` has the size of the state, with holes for other chunks. It stays: a
    later fetch of other ranges of the same state adds to it and reuses its chunks. The caller removes it.

    Raises and emits what `fetch_state` does, and ValueError if a range is not inside the state.
    """
    started = trio.current_time()
    part = await trio.to_thread.run_sync(PartFile, part_file, size_bytes, ranges)
    try:
        fetch = ChunkFetch(rpc, donors, root, part, events)
        tree = await fetch.run()
        assert isinstance(tree, StateTree)
        if await trio.to_thread.run_sync(part.intact, tree) != part.chunks:
            raise _misread(part_file)
        flat = map_floats(part_file, size_bytes)
    finally:
        part.close()
    seconds = trio.current_time() - started
    return FetchedRanges(flat, part.chunks, tree, fetch.taken_bytes, fetch.resumed_bytes, seconds)


def _misread(part_file: Path) -> ResourceError:
    return ResourceError(f"{part_file} reads back other bytes than were written: check that disk")
