"""The donor's side of state transfer: a store of recent states and results, served without delaying a round.

A committed state is served from where it lies, and no later one overwrites it (`peer.checkpoint.generation`). So no
round waits for a joiner and nothing is copied. A snapshot whose readers make progress stays (`swarm.state.leases`);
`swarm.state.upload_limits` decides how fast they are served.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final

import trio

from peer import faults
from peer.checkpoint.generation import StateGeneration
from peer.checkpoint.hash_tree import StateBytes, StateTree
from peer.errors import ProtocolViolation
from peer.events import EventLog
from peer.footprint import kept
from peer.net.rpc import Buffer, Call
from swarm.state.leases import Lease, LeaseClock
from swarm.state.messages import AskChunk, AskHashes, AskResult, ResultPart, StateReply
from swarm.state.upload_limits import SnapshotLimits, UploadSlots

ASKED_S: Final = 60.0  # after a joiner has asked, states are kept for as long without readers, too


@dataclass(eq=False)
class _Snapshot:
    """One state of the store."""

    state: StateGeneration
    bytes: StateBytes
    tree: StateTree
    lease: Lease


@dataclass(frozen=True)
class _Result:
    head: bytes
    leads_to: bytes
    parts: tuple[memoryview, ...]

    @property
    def size_bytes(self) -> int:
        return sum(part.nbytes for part in self.parts)


@dataclass
class SnapshotStore:
    """Recent states and results. `publish` at every commit, in any thread; `swarm.state.server` serves it.

    `events` reports readers that lose their snapshot to a newer one."""

    size_bytes: int
    part_bytes_max: int
    limits: SnapshotLimits = field(default_factory=SnapshotLimits)
    events: EventLog = field(default_factory=EventLog)
    slots: UploadSlots | None = None
    """Of the peer, where it serves other data as well; None: of its own."""

    def __post_init__(self) -> None:
        self._lock = threading.Lock()  # held for a moment
        self._snapshots: list[_Snapshot] = []  # in the order of publishing
        self._results: OrderedDict[bytes, _Result] = OrderedDict()
        self._newest: bytes | None = None
        self._asked_at = float("-inf")  # a joiner, for any state
        self._slots = self.slots or UploadSlots(self.limits)
        self._clock = LeaseClock()

    def publish(self, state: StateGeneration, head: bytes = b"", parts: Sequence[Buffer] = ()) -> None:
        """Serve the committed state; it must not change. Earlier ones stay available while joiners read them, or have
        recently asked for any, and if they are small: their round may have been over before one could ask.

        `parts`: the encoded merged result that led here from the state published before, with the opaque `head` it
        led to. Empty if there was none, as after a fetch.

        Where too many are being read, the readers with the weakest claim lose theirs: they are answered that it is
        gone, and fetch this newer state. Event: snapshot_taken_back.
        """
        tree = state.tree
        with self._lock:
            if parts and self._newest is not None:
                self._results[self._newest] = _Result(head, tree.root, tuple(memoryview(p).cast("B") for p in parts))
                self._trim_results()
            self._newest = tree.root
            known = self._find(tree.root)
            if known is not None:
                self._snapshots.remove(known)
                self._snapshots.append(known)
                return
            taken = self._make_room()
            lease = Lease(self.limits, len(tree.hashes), self._clock)
            self._snapshots.append(_Snapshot(state, StateBytes(list(state.tensors.values())), tree, lease))
        for one in taken:
            self.events.emit(
                "snapshot_taken_back",
                state_hash=one.tree.root.hex(),
                readers=one.lease.readers,
                idle_s=round(one.lease.idle_s, 3),
            )

    def _make_room(self) -> list[_Snapshot]:
        """Let go of what no joiner wants. Where there are too many still, let go of the oldest without a lease, else of
        that of the lease with the weakest claim. Return what was being read."""
        if not self._is_wanted:
            self._snapshots = [snapshot for snapshot in self._snapshots if snapshot.lease.is_on]
        taken = []
        while len(self._snapshots) > self._most:
            free = next((s for s in self._snapshots if not s.lease.is_on), None)
            gone = free or min(self._snapshots, key=lambda s: s.lease.claim)
            if free is None:
                taken.append(gone)
            self._snapshots.remove(gone)
        return taken

    def _trim_results(self) -> None:
        limits = self.limits
        most_bytes = max(limits.results_share * self.size_bytes, limits.small_bytes)
        held = sum(result.size_bytes for result in self._results.values())
        while len(self._results) > limits.results and (held > most_bytes or len(self._results) > limits.results_max):
            held -= self._results.popitem(last=False)[1].size_bytes

    @contextmanager
    def stepping_back(self) -> Iterator[None]:
        """Give joiners only a small share of the link inside the block: the round comes first. Blocks may overlap."""
        with self._lock:
            self._clock.begin()
        try:
            with self._slots.stepping_back():
                yield
        finally:
            with self._lock:
                self._clock.end()

    @property
    def state_hashes(self) -> tuple[bytes, ...]:
        """The states that a joiner can get here now."""
        with self._lock:
            return tuple(s.tree.root for s in self._snapshots)

    def serves(self, state_hash: bytes) -> bool:
        """Return whether a joiner can get that state here now."""
        return state_hash in self.state_hashes

    def _find(self, state_hash: bytes) -> _Snapshot | None:
        return next((s for s in self._snapshots if s.tree.root == state_hash), None)

    @property
    def _is_wanted(self) -> bool:
        """Whether a state is kept without readers: while there are joiners, and where it is small."""
        small = (self.limits.snapshots + 1) * self.size_bytes <= self.limits.small_bytes
        return small or self._clock.now - self._asked_at < ASKED_S

    @property
    def _most(self) -> int:
        """How many states may be kept beside the newest."""
        limits = self.limits
        return max(limits.snapshots, min(limits.snapshots_max, limits.small_bytes // max(1, self.size_bytes)) - 1)

    async def send_hashes(self, call: Call[AskHashes]) -> StateReply | tuple[StateReply, Buffer]:
        """Answer a request for the chunk hashes of a state."""
        faults.reach("during_state_transfer", 0)
        with self._lock:
            self._asked_at = self._clock.now
            snapshot = self._find(call.body.state_hash)
            if snapshot is None:
                return StateReply("gone")
            for other in self._snapshots:
                if other.lease is not snapshot.lease:
                    other.lease.end(call.peer)
            snapshot.lease.begin(call.peer)
            return StateReply("here"), b"".join(snapshot.tree.hashes)

    async def send_chunk(self, call: Call[AskChunk]) -> StateReply | tuple[StateReply, Buffer]:
        """Answer a request for one chunk of a state."""
        faults.reach("during_state_transfer", 1)
        with self._lock:
            snapshot = self._find(call.body.state_hash)
            if snapshot is None:
                return StateReply("gone")
            if not 0 <= call.body.index < len(snapshot.tree.hashes):
                raise ProtocolViolation(f"asked for chunk {call.body.index} of {len(snapshot.tree.hashes)}")
            start, end = snapshot.tree.span(call.body.index)
            lease, reader, index = snapshot.lease, call.peer, call.body.index
        pin = await self._slots.acquire(reader, end - start, lambda: lease.left(reader, index))
        if isinstance(pin, float):
            return StateReply("busy", pin)
        with self._lock:  # the wait may have been long: look again
            snapshot = self._find(call.body.state_hash)
            if snapshot is None:
                return StateReply("gone")
            lease.upload(reader, index, end - start)
        pieces = snapshot.bytes.pieces(start, end)
        if self.size_bytes > kept.SMALL_BYTES:
            await trio.to_thread.run_sync(_copy, pieces, pin)  # they may lie on a slow disk
        else:
            _copy(pieces, pin)
        return StateReply("here"), pin

    async def send_result(self, call: Call[AskResult]) -> ResultPart | tuple[ResultPart, Buffer]:
        """Answer a request for one part of a round's merged result."""
        result = self._results.get(call.body.after)
        if result is None:
            return ResultPart("gone")
        if not 0 <= call.body.index < len(result.parts):
            raise ProtocolViolation(f"asked for part {call.body.index} of {len(result.parts)}")
        part = result.parts[call.body.index]
        pin = await self._slots.acquire(call.peer, part.nbytes)
        if isinstance(pin, float):
            return ResultPart("busy", pin)
        pin += part
        return ResultPart("here", 0.0, len(result.parts), result.leads_to, result.head), pin


def _copy(pieces: Sequence[memoryview], target: bytearray) -> None:
    for piece in pieces:
        target += piece
