"""The donor's side of state transfer: recent states and results on a shelf, handed out without holding up a
round.

A commit copies the new state onto the shelf; joiners read that copy, so no round waits for a joiner and no
commit tears what a joiner is reading. A snapshot that is being read stays while others take its place in a
second buffer.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final

import torch
import trio
from torch import Tensor

from peer import faults
from peer.chunks import StateBytes, StateTree
from peer.errors import ProtocolViolation
from peer.rpc import Buffer, Call, Rpc
from swarm.state import AskChunk, AskManifest, AskResult, Piece, ResultPart, StateMethods

BUSY_RETRY_S: Final = 0.25


@dataclass(frozen=True)
class ShelfLimits:
    """What a donor spends on joiners. Rates in bytes per second, sizes in bytes."""

    snapshots: int = 2
    """Buffers of the size of the state: the last commits, or what joiners are still reading."""
    results: int = 4
    """Rounds whose merged results are kept, for those who missed only these."""
    lease_s: float = 30.0
    """A snapshot counts as being read this long after the last request."""
    lease_min_s: float = 3.0
    """Where all buffers are being read, one that nobody asked for this long gives way to a new commit."""
    lease_max_s: float = 1800.0
    """No snapshot is kept longer for its readers."""
    rate: float | None = None
    """While no exchange is going on; None: as fast as the link takes it (the host's upload cap applies)."""
    rate_in_exchange: float = 32e6
    """While a round's exchange needs the link and the cores."""
    wait_max_s: float = 1.0
    """A request that the rate would delay for longer is answered "busy"."""
    lent_per_joiner: int = 32 << 20
    lent_in_total: int = 256 << 20
    """Copies that have not left yet: a joiner that asks and never reads costs this much memory, no more."""


@dataclass(eq=False)
class _Snapshot:
    """One buffer of the shelf. `tree` is None while it is being overwritten."""

    buffers: list[Tensor]
    bytes: StateBytes
    tree: StateTree | None = None
    read_at: float = float("-inf")
    first_read_at: float = float("-inf")


@dataclass(frozen=True)
class _Result:
    head: bytes
    leads_to: bytes
    parts: tuple[memoryview, ...]


class _Loan(bytearray):
    """Bytes on their way to a joiner. When the last view of it is gone, the transport is done with it."""


class _Pace:
    """Spaces serves so that their sum stays below a rate."""

    def __init__(self) -> None:
        self._free_at = 0.0

    def wait_s(self) -> float:
        """How long the next serve has to wait."""
        return max(self._free_at - trio.current_time(), 0.0)

    def spend(self, size_bytes: int, rate: float | None) -> None:
        if rate is not None:
            self._free_at = trio.current_time() + self.wait_s() + size_bytes / rate


@dataclass
class SnapshotShelf:
    """`publish` at every commit, `serve` once. Reading and publishing may happen in different threads."""

    size_bytes: int
    part_bytes_max: int
    limits: ShelfLimits = field(default_factory=ShelfLimits)

    def __post_init__(self) -> None:
        self._lock = threading.Lock()  # held for one memory copy of a chunk at most
        self._snapshots: list[_Snapshot] = []
        self._results: OrderedDict[bytes, _Result] = OrderedDict()
        self._newest: bytes | None = None
        self._pace = _Pace()
        self._exchanges = 0
        self._lent: Counter[str] = Counter()

    def publish(
        self, tree: StateTree, buffers: Sequence[Tensor], head: bytes = b"", parts: Sequence[Buffer] = ()
    ) -> None:
        """Put the state just committed on the shelf; `buffers` may change as soon as this returns.

        `parts`: the encoded merged result that led here from the state published before (empty: there was
        none, as after a fetch), with the opaque `head` it led to. Blocks for one memory copy of the state.
        Where every buffer is being read the state is left out; joiners get it a round later, or from another
        donor.
        """
        with self._lock:
            if parts and self._newest is not None:
                self._results[self._newest] = _Result(head, tree.root, tuple(memoryview(p).cast("B") for p in parts))
                while len(self._results) > self.limits.results:
                    self._results.popitem(last=False)
            self._newest = tree.root
            snapshot = None if self._find(tree.root) is not None else self._buffer_for(buffers)
            if snapshot is None:
                return
            snapshot.tree = None
        for target, source in zip(snapshot.buffers, buffers, strict=True):
            target.copy_(source)
        with self._lock:
            snapshot.tree = tree
            snapshot.read_at = snapshot.first_read_at = float("-inf")

    def serve(self, rpc: Rpc) -> None:
        """Answer joiners from now on."""
        methods = StateMethods.of(self.size_bytes, self.part_bytes_max)
        rpc.serve(methods.manifest, self._on_manifest)
        rpc.serve(methods.chunk, self._on_chunk)
        rpc.serve(methods.result, self._on_result)

    @contextmanager
    def stepping_back(self) -> Iterator[None]:
        """Inside the block joiners get `rate_in_exchange`: the round comes first."""
        self._exchanges += 1
        try:
            yield
        finally:
            self._exchanges -= 1

    @property
    def state_hashes(self) -> tuple[bytes, ...]:
        """States a joiner could get here now."""
        with self._lock:
            return tuple(s.tree.root for s in self._snapshots if s.tree is not None)

    def _find(self, state_hash: bytes) -> _Snapshot | None:
        for snapshot in self._snapshots:
            if snapshot.tree is not None and snapshot.tree.root == state_hash:
                return snapshot
        return None

    def _buffer_for(self, buffers: Sequence[Tensor]) -> _Snapshot | None:
        """A buffer that may be overwritten: a new one, else the oldest nobody reads, else one whose reader dawdles."""
        now, limits = time.monotonic(), self.limits
        if len(self._snapshots) < limits.snapshots:
            copies = [torch.empty_like(buffer) for buffer in buffers]
            self._snapshots.append(_Snapshot(copies, StateBytes(copies)))
            return self._snapshots[-1]
        longest_unread = sorted(self._snapshots, key=lambda snapshot: snapshot.read_at)
        for snapshot in longest_unread:
            if now - snapshot.read_at > limits.lease_s or now - snapshot.first_read_at > limits.lease_max_s:
                break
        else:
            snapshot = longest_unread[0]
            if now - snapshot.read_at < limits.lease_min_s:
                return None
        self._snapshots.remove(snapshot)
        self._snapshots.append(snapshot)  # in the order of publishing
        return snapshot

    async def _on_manifest(self, call: Call[AskManifest]) -> Piece | tuple[Piece, Buffer]:
        faults.reach("during_state_transfer", 0)
        with self._lock:
            snapshot = self._find(call.body.state_hash)
            if snapshot is None or snapshot.tree is None:
                return Piece("gone")
            self._touch(snapshot)
            return Piece("here"), b"".join(snapshot.tree.hashes)

    async def _on_chunk(self, call: Call[AskChunk]) -> Piece | tuple[Piece, Buffer]:
        faults.reach("during_state_transfer", 1)
        with self._lock:
            snapshot = self._find(call.body.state_hash)
            if snapshot is None or snapshot.tree is None:
                return Piece("gone")
            if not 0 <= call.body.index < len(snapshot.tree.hashes):
                raise ProtocolViolation(f"asked for chunk {call.body.index} of {len(snapshot.tree.hashes)}")
            self._touch(snapshot)
            start, end = snapshot.tree.span(call.body.index)
        loan = await self._turn(call.peer, end - start)
        if isinstance(loan, float):
            return Piece("busy", loan)
        with self._lock:  # its turn may have taken a while: look again
            if snapshot.tree is None or snapshot.tree.root != call.body.state_hash:
                return Piece("gone")
            for piece in snapshot.bytes.pieces(start, end):
                loan += piece
        return Piece("here"), loan

    async def _on_result(self, call: Call[AskResult]) -> ResultPart | tuple[ResultPart, Buffer]:
        result = self._results.get(call.body.after)
        if result is None:
            return ResultPart("gone")
        if not 0 <= call.body.index < len(result.parts):
            raise ProtocolViolation(f"asked for part {call.body.index} of {len(result.parts)}")
        part = result.parts[call.body.index]
        loan = await self._turn(call.peer, part.nbytes)
        if isinstance(loan, float):
            return ResultPart("busy", loan)
        loan += part
        return ResultPart("here", 0.0, len(result.parts), result.leads_to, result.head), loan

    async def _turn(self, joiner: str, size_bytes: int) -> _Loan | float:
        """Wait for this serve's turn: an empty loan to fill, or in how many seconds a busy donor should be
        asked again."""
        limits = self.limits
        mine, all_lent = self._lent[joiner], self._lent.total()
        if mine and mine + size_bytes > limits.lent_per_joiner:
            return BUSY_RETRY_S
        if all_lent and all_lent + size_bytes > limits.lent_in_total:
            return BUSY_RETRY_S
        wait_s = self._pace.wait_s()
        if wait_s > limits.wait_max_s:
            return max(wait_s - limits.wait_max_s, BUSY_RETRY_S)
        loan = _Loan()
        self._lent[joiner] += size_bytes
        weakref.finalize(loan, self._returned, joiner, size_bytes).atexit = False
        self._pace.spend(size_bytes, limits.rate_in_exchange if self._exchanges else limits.rate)
        await trio.sleep(wait_s)
        return loan

    def _returned(self, joiner: str, size_bytes: int) -> None:
        self._lent[joiner] -= size_bytes
        if not self._lent[joiner]:
            del self._lent[joiner]

    def _touch(self, snapshot: _Snapshot) -> None:
        snapshot.read_at = time.monotonic()
        if snapshot.first_read_at == float("-inf"):
            snapshot.first_read_at = snapshot.read_at
