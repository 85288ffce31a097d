"""The donor's side of state transfer: a store of recent states and results, served without delaying a round.

A commit copies the new state into the store, and joiners read that copy. So no round waits for a joiner, and no commit
tears what a joiner reads. A snapshot whose readers make progress stays; newer ones use a second buffer.
`swarm.state.upload_limits` decides how fast joiners are served.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from peer import faults
from peer.checkpoint.hash_tree import StateBytes, StateTree
from peer.errors import ProtocolViolation
from peer.net.rpc import Buffer, Call, Rpc
from swarm.state.messages import AskChunk, AskHashes, AskResult, ResultPart, StateMethods, StateReply
from swarm.state.upload_limits import SnapshotLimits, UploadSlots


class Lease:
    """The time for which a snapshot is kept for its readers: while a new chunk is on its way to one, and a pause after.

    A reader that makes progress holds a buffer until it has all chunks or turns to another state. One that is slow,
    repeats itself or has died holds it for seconds. Times are `time.monotonic`, since commits and readers are in
    different threads.
    """

    def __init__(self, limits: SnapshotLimits, chunks: int) -> None:
        """`chunks`: of which the state consists."""
        self._limits, self._chunks = limits, chunks
        self._began = float("-inf")
        self._until: dict[str, float] = {}  # by reader
        self._had: dict[str, set[int]] = {}
        self._on_their_way: dict[tuple[str, int], float] = {}  # with the time after which it counts no more

    @property
    def is_on(self) -> bool:
        """Whether the snapshot must stay."""
        now = time.monotonic()
        held = any(now < until for until in (*tuple(self._until.values()), *tuple(self._on_their_way.values())))
        return held and now - self._began < self._limits.lease_max_s

    def begin(self, reader: str) -> None:
        """Note the first request of a reader. Later calls change nothing."""
        if self._began == float("-inf"):
            self._began = time.monotonic()
        if len(self._until) < self._limits.lease_readers:
            self._until.setdefault(reader, time.monotonic() + self._limits.lease_pause_s)

    def upload(self, reader: str, index: int, size_bytes: int) -> None:
        """Note that a chunk is being sent to `reader`."""
        self.begin(reader)
        if reader not in self._until:
            return
        had = self._had.setdefault(reader, set())
        if index not in had:
            had.add(index)
            self._on_their_way[reader, index] = time.monotonic() + size_bytes / self._limits.lease_rate

    def left(self, reader: str, index: int) -> None:
        """Note that the chunk has left. Takes no lock: the garbage collector may call this at any time."""
        if time.monotonic() < self._on_their_way.pop((reader, index), float("-inf")):
            whole = len(self._had[reader]) == self._chunks
            until = float("-inf") if whole else time.monotonic() + self._limits.lease_pause_s
            self._until[reader] = until if whole else max(self._until[reader], until)

    def end(self, reader: str) -> None:
        """Note that the reader has turned to another state."""
        if reader in self._until:
            self._until[reader] = float("-inf")

    def extend(self, seconds: float) -> None:
        """Add time in which this donor held the readers back."""
        for reader, until in tuple(self._until.items()):
            if time.monotonic() - seconds < until:
                self._until[reader] = until + seconds


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
    """Recent states and results. `publish` at every commit, `serve` once. The two may run in different threads."""

    size_bytes: int
    part_bytes_max: int
    limits: SnapshotLimits = field(default_factory=SnapshotLimits)

    def __post_init__(self) -> None:
        self._lock = threading.Lock()  # held for one memory copy of a chunk at most
        self._snapshots: list[_Snapshot] = []
        self._results: OrderedDict[bytes, _Result] = OrderedDict()
        self._newest: bytes | None = None
        self._slots = UploadSlots(self.limits)

    def publish(
        self, tree: StateTree, buffers: Sequence[Tensor], head: bytes = b"", parts: Sequence[Buffer] = ()
    ) -> None:
        """Copy the committed state into the store. `buffers` may change as soon as this returns.

        `parts`: the encoded merged result that led here from the state published before, with the opaque `head` it
        led to. Empty if there was none, as after a fetch.

        Blocks for one memory copy of the state. If every buffer is being read, the state is left out. Joiners then get
        the next one, or fetch from another donor.
        """
        with self._lock:
            if parts and self._newest is not None:
                self._results[self._newest] = _Result(head, tree.root, tuple(memoryview(p).cast("B") for p in parts))
                self._trim_results()
            self._newest = tree.root
            snapshot = None if self._find(tree.root) is not None else self._buffer_for(buffers)
            if snapshot is None:
                return
            snapshot.tree = None
        for target, source in zip(snapshot.buffers, buffers, strict=True):
            target.copy_(source)
        with self._lock:
            snapshot.tree = tree
            snapshot.lease = Lease(self.limits, len(tree.hashes))

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
        """Give joiners only a small share of the link inside the block: the round comes first."""
        began = time.monotonic()
        try:
            with self._slots.stepping_back():
                yield
        finally:
            with self._lock:
                for snapshot in self._snapshots:
                    snapshot.lease.extend(time.monotonic() - began)

    @property
    def state_hashes(self) -> tuple[bytes, ...]:
        """The states that a joiner can get here now."""
        with self._lock:
            return tuple(s.tree.root for s in self._snapshots if s.tree is not None)

    def _find(self, state_hash: bytes) -> _Snapshot | None:
        for snapshot in self._snapshots:
            if snapshot.tree is not None and snapshot.tree.root == state_hash:
                return snapshot
        return None

    def _buffer_for(self, buffers: Sequence[Tensor]) -> _Snapshot | None:
        """Return a buffer that may be overwritten: a new one, else the oldest without a lease, else None."""
        limits, held = self.limits, (len(self._snapshots) + 1) * self.size_bytes
        few = len(self._snapshots) < limits.snapshots
        if few or (held <= limits.small_bytes and len(self._snapshots) < limits.snapshots_max):
            copies = [torch.empty_like(buffer) for buffer in buffers]
            self._snapshots.append(_Snapshot(copies, StateBytes(copies), Lease(self.limits, 0)))
            return self._snapshots[-1]
        snapshot = next((s for s in self._snapshots if not s.lease.is_on), None)
        if snapshot is not None:
            self._snapshots.remove(snapshot)
            self._snapshots.append(snapshot)  # in the order of publishing
        return snapshot

    async def send_hashes(self, call: Call[AskHashes]) -> StateReply | tuple[StateReply, Buffer]:
        """Answer a request for the chunk hashes of a state."""
        faults.reach("during_state_transfer", 0)
        with self._lock:
            snapshot = self._find(call.body.state_hash)
            if snapshot is None or snapshot.tree is None:
                return StateReply("gone")
            for other in self._snapshots:
                if other is not snapshot:
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
            if snapshot.tree is None or snapshot.tree.root != call.body.state_hash:
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
