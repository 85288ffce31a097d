"""A joiner and donors of a state, honest and faulty ones, over real sockets: for the tests of state transfer."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
import trio

from peer.checkpoint.hash_tree import hash_state
from peer.events import Event, EventLog
from peer.identity import Identity
from peer.net.host import Host, open_host
from peer.net.rpc import Buffer, Call
from swarm.state.chunk_fetch import Holders
from swarm.state.fetch import Fetched, FetchedRanges, fetch_ranges, fetch_state
from swarm.state.messages import AskChunk, AskHashes, StateMethods, StateReply
from swarm.state.ranges import ByteRange
from swarm.state.server import serve_snapshots
from swarm.state.snapshots import SnapshotStore
from swarm.state.upload_limits import SnapshotLimits
from tests.swarm.support.donor_child import generation, seeded_state

NUMEL = 500_000  # 4 MB of state: 62 chunks of 64 KiB
SEED = 7
STATE = seeded_state(NUMEL, SEED)
TREE = hash_state(STATE)
METHODS = StateMethods.of(TREE.size_bytes, 1 << 16)
"""Fast enough for the test, slow enough that something can happen on the way: 2 MB/s each."""
SLOW = SnapshotLimits(rate=2e6, wait_max_s=60.0)


@dataclass
class Joiner:
    host: Host
    part_file: Path
    events: EventLog
    seen: list[Event] = field(default_factory=list)

    async def fetch(self, *donors: Host | str, root: bytes = TREE.root, certain: Sequence[str] = ()) -> Fetched:
        names = [self.know(donor) if isinstance(donor, Host) else donor for donor in donors]
        return await self.fetch_from(lambda: names, root, certain)

    async def fetch_from(
        self, donors: Callable[[], Sequence[str]], root: bytes = TREE.root, certain: Sequence[str] = ()
    ) -> Fetched:
        rpc, size_bytes = self.host.rpc, TREE.size_bytes
        with self.events.subscribed(self.seen.append), trio.fail_after(120):
            holders = Holders(donors, certain)
            return await fetch_state(rpc, holders, root, size_bytes, self.part_file, self.events)

    async def fetch_ranges(self, ranges: Sequence[ByteRange], *donors: Host) -> FetchedRanges:
        names, size_bytes = [self.know(donor) for donor in donors], TREE.size_bytes
        with self.events.subscribed(self.seen.append), trio.fail_after(120):
            return await fetch_ranges(
                self.host.rpc, lambda: names, TREE.root, size_bytes, ranges, self.part_file, self.events
            )

    def know(self, donor: Host) -> str:
        self.host.book.add(donor.peer_id, donor.addresses)
        return donor.peer_id

    @property
    def penalized(self) -> set[str]:
        return {str(event.fields["peer"]) for event in self.seen if event.name == "peer_penalized"}


@pytest.fixture
async def joiner(tmp_path: Path) -> AsyncIterator[Joiner]:
    events = EventLog()
    async with open_host(identity=Identity.generate(), events=events) as host:
        yield Joiner(host, tmp_path / "state.part", events)


@asynccontextmanager
async def donors(*limits: SnapshotLimits) -> AsyncIterator[list[Host]]:
    """Honest donors of STATE."""
    async with AsyncExitStack() as stack:
        hosts: list[Host] = []
        for limit in limits:
            snapshots = SnapshotStore(TREE.size_bytes, 1 << 16, limit)
            snapshots.publish(generation(STATE, TREE))
            hosts.append(await stack.enter_async_context(bare_host()))
            serve_snapshots(hosts[-1].rpc, [snapshots])
        yield hosts


def bare_host() -> AbstractAsyncContextManager[Host]:
    return open_host(identity=Identity.generate(), events=EventLog())


ChunkHandler = Callable[[bytes, int], "tuple[StateReply, Buffer]"]


@asynccontextmanager
async def odd_donor(
    chunk: ChunkHandler, hashes: bytes = b"".join(TREE.hashes), methods: StateMethods = METHODS
) -> AsyncIterator[Host]:
    """A donor that answers chunk requests with `chunk(what is right, index)`."""
    joined = b"".join(tensor.numpy().tobytes() for tensor in STATE)

    async def on_hashes(call: Call[AskHashes]) -> tuple[StateReply, Buffer]:
        return StateReply("here"), hashes

    async def on_chunk(call: Call[AskChunk]) -> tuple[StateReply, Buffer]:
        return chunk(joined[slice(*TREE.span(call.body.index))], call.body.index)

    async with bare_host() as host:
        host.rpc.register(methods.hashes, on_hashes)
        host.rpc.register(methods.chunk, on_chunk)
        yield host


def flipped(right: bytes, index: int) -> tuple[StateReply, Buffer]:
    return StateReply("here"), right[:-1] + bytes([right[-1] ^ 1])


def arrived_whole(fetched: Fetched) -> bool:
    return torch.equal(fetched.tensors[0], STATE[0]) and torch.equal(fetched.tensors[1], STATE[1])
