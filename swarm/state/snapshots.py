"""The donor's side of state transfer: a store of recent states and results, served without delaying a round.

A committed state is served from the replica's own buffers until the next commit, which copies what joiners still read.
So no round waits for a joiner, no commit tears what a joiner reads, and one without readers costs nothing. A snapshot
whose readers make progress stays (`swarm.state.leases`); `swarm.state.upload_limits` decides how fast they are served.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from peer import faults
from peer.checkpoint.hash_tree import StateBytes, StateTree
from peer.errors import ProtocolViolation
from peer.events import EventLog
from peer.footprint import kept
from peer.net.rpc import Buffer, Call, Rpc
from swarm.state.leases import Lease, LeaseClock
from swarm.state.messages import AskChunk, AskHashes, AskResult, ResultPart, StateMethods, StateReply
from swarm.state.partial_file import floats_on_disk
from swarm.state.upload_limits import SnapshotLimits, UploadSlots

ASKED_S: Final = 60.0  # after a joiner has asked, states are kept for as long without readers, too


@dataclass(eq=False)
class _Snapshot:
    """One buffer of the store. `tree` is None while it is being overwritten."""

    buffers: list[Tensor]
    bytes: StateBytes
    lease: Lease
    tree: StateTree | None = None


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
    """Recent states and results. `publish` or `publish_in_place` at every commit, `serve` once: in any threads.

    `events` is told of readers that lose their snapshot to a newer one. Copies of a state that is not small lie in
    `folder`, in files without a name, if it is given and its disk has room; else in memory."""

    size_bytes: int
    part_bytes_max: int
    limits: SnapshotLimits = field(default_factory=SnapshotLimits)
    events: EventLog = field(default_factory=EventLog)
    folder: Path | None = None

    def __post_init__(self) -> None:
        self._lock = threading.Lock()  # held for one memory copy of a chunk at most
        self._snapshots: list[_Snapshot] = []
        self._live: _Snapshot | None = None
        self._taken: list[_Snapshot] = []  # from their readers, of which no event has told yet
        self._results: OrderedDict[bytes, _Result] = OrderedDict()
        self._newest: bytes | None = None
        self._asked_at = float("-inf")  # a joiner, for any state
        self._slots = UploadSlots(self.limits)
        self._clock = LeaseClock()

    def publish(
        self, tree: StateTree, buffers: Sequence[Tensor], head: bytes = b"", parts: Sequence[Buffer] = ()
    ) -> None:
        """Copy the committed state into the store. `buffers` may change as soon as this returns.

        `parts`: the encoded merged result that led here from the state published before, with the opaque `head` it
        led to. Empty if there was none, as after a fetch.

        Blocks for one memory copy of the state. If every buffer is being read, the readers with the weakest claim lose
        theirs: they hear that it is gone, and turn to this newer state. Event: snapshot_taken_back.
        """
        with self._lock:
            self._note(tree, head, parts)
            if self._find(tree.root) is not None:
                return
            snapshot = self._room_for(buffers)
        self._fill(snapshot, buffers, tree, Lease(self.limits, len(tree.hashes), self._clock))

    def publish_in_place(
        self, tree: StateTree, buffers: Sequence[Tensor], head: bytes = b"", parts: Sequence[Buffer] = ()
    ) -> None:
        """As `publish`, but serve the state from `buffers` themselves: they must not change before `detach`."""
        with self._lock:
            self._note(tree, head, parts)
            if self._find(tree.root) is None:
                lease = Lease(self.limits, len(tree.hashes), self._clock)
                self._live = _Snapshot(list(buffers), StateBytes(buffers), lease, tree)

    def detach(self) -> None:
        """Serve from those buffers no longer: they may change as soon as this returns. The state is copied where
        joiners read it, or have lately asked for any, and where it is small: its round may have been over before one
        could ask.

        Blocks for one memory copy of the state. Readers may lose a state as in `publish`, this one or another."""
        with self._lock:
            live, self._live = self._live, None
            if live is None or live.tree is None or not (live.lease.is_on or self._is_wanted):
                return
            snapshot = None if self._is_weakest(live.lease) else self._room_for(live.buffers)
            if snapshot is not None:
                self._live = live  # is read until it is copied
            elif live.lease.is_on:
                self._taken.append(live)
        if snapshot is None:
            self._tell_taken()
            return
        self._fill(snapshot, live.buffers, live.tree, live.lease)
        with self._lock:
            self._live = None

    def _is_weakest(self, lease: Lease) -> bool:
        """Whether there is no room for another copy, and all of those here have a stronger claim."""
        others = [snapshot.lease for snapshot in self._snapshots]
        return not self._has_room and all(other.is_on and lease.claim < other.claim for other in others)

    def _note(self, tree: StateTree, head: bytes, parts: Sequence[Buffer]) -> None:
        """Note what led to the state that is published now."""
        if parts and self._newest is not None:
            self._results[self._newest] = _Result(head, tree.root, tuple(memoryview(p).cast("B") for p in parts))
            self._trim_results()
        self._newest = tree.root

    def _fill(self, snapshot: _Snapshot, buffers: Sequence[Tensor], tree: StateTree, lease: Lease) -> None:
        """Copy a state into a buffer of the store."""
        self._tell_taken()
        for target, source in zip(snapshot.buffers, buffers, strict=True):
            target.copy_(source)
        with self._lock:
            snapshot.tree, snapshot.lease = tree, lease

    def _tell_taken(self) -> None:
        """Tell whose readers have lost it."""
        taken, self._taken = self._taken, []
        for one in taken:
            assert one.tree is not None
            self.events.emit(
                "snapshot_taken_back",
                state_hash=one.tree.root.hex(),
                readers=one.lease.readers,
                idle_s=round(one.lease.idle_s, 3),
            )

    def _trim_results(self) -> None:
        limits = self.limits
        most_bytes = max(limits.results_share * self.size_bytes, limits.small_bytes)
        held = sum(result.size_bytes for result in self._results.values())
        while len(self._results) > limits.results and (held > most_bytes or len(self._results) > limits.results_max):
            held -= self._results.popitem(last=False)[1].size_bytes

    def serve(self, rpc: Rpc) -> None:
        """Answer joiners from now on."""
        methods = StateMethods.of(self.size_bytes, self.part_bytes_max)
        rpc.register(methods.hashes, self.send_hashes)
        rpc.register(methods.chunk, self.send_chunk)
        rpc.register(methods.result, self.send_result)

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
            return tuple(s.tree.root for s in self._all if s.tree is not None)

    def _find(self, state_hash: bytes) -> _Snapshot | None:
        for snapshot in self._all:
            if snapshot.tree is not None and snapshot.tree.root == state_hash:
                return snapshot
        return None

    @property
    def _all(self) -> list[_Snapshot]:
        """The copies, and the state that is served in place, which is the last one."""
        return [*self._snapshots, *([self._live] if self._live is not None else [])]

    @property
    def _is_wanted(self) -> bool:
        """Whether a state is kept without readers: while there are joiners, and where it is small."""
        small = (self.limits.snapshots + 1) * self.size_bytes <= self.limits.small_bytes
        return small or self._clock.now - self._asked_at < ASKED_S

    @property
    def _has_room(self) -> bool:
        """Whether another copy may be made."""
        limits, held = self.limits, (len(self._snapshots) + 1) * self.size_bytes
        few = len(self._snapshots) < limits.snapshots
        return few or (held <= limits.small_bytes and len(self._snapshots) < limits.snapshots_max)

    def _new_copies(self, buffers: Sequence[Tensor]) -> list[Tensor]:
        if self.folder is not None and kept.snapshots_lie_in_files(self.size_bytes):
            with suppress(OSError):
                return floats_on_disk(self.folder, [buffer.numel() for buffer in buffers])
        return [torch.empty_like(buffer) for buffer in buffers]

    def _room_for(self, buffers: Sequence[Tensor]) -> _Snapshot:
        """Return a buffer that may be overwritten: a new one, else the oldest without a lease, else that of the lease
        with the weakest claim."""
        if self._has_room:
            copies = self._new_copies(buffers)
            self._snapshots.append(_Snapshot(copies, StateBytes(copies), Lease(self.limits, 0, self._clock)))
            return self._snapshots[-1]
        free = next((s for s in self._snapshots if not s.lease.is_on), None)
        snapshot = free or min(self._snapshots, key=lambda s: s.lease.claim)
        if free is None:
            self._taken.append(replace(snapshot))
        self._snapshots.remove(snapshot)
        self._snapshots.append(snapshot)  # in the order of publishing
        snapshot.tree = None
        return snapshot

    async def send_hashes(self, call: Call[AskHashes]) -> StateReply | tuple[StateReply, Buffer]:
        """Answer a request for the chunk hashes of a state."""
        faults.reach("during_state_transfer", 0)
        with self._lock:
            self._asked_at = self._clock.now
            snapshot = self._find(call.body.state_hash)
            if snapshot is None or snapshot.tree is None:
                return StateReply("gone")
            for other in self._all:
                if other.lease is not snapshot.lease:
                    other.lease.end(call.peer)
            snapshot.lease.begin(call.peer)
            return StateReply("here"), b"".join(snapshot.tree.hashes)

    async def send_chunk(self, call: Call[AskChunk]) -> StateReply | tuple[StateReply, Buffer]:
        """Answer a request for one chunk of a state."""
        faults.reach("during_state_transfer", 1)
        with self._lock:
            snapshot = self._find(call.body.state_hash)
            if snapshot is None or snapshot.tree is None:
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
            for piece in snapshot.bytes.pieces(start, end):
                pin += piece
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
