"""A state moves from donors to a joiner over real sockets, whatever some of the donors do."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
import trio

from peer.chunks import StateTree, hash_state
from peer.errors import NetworkError, RemoteError, ResourceError
from peer.events import Event, EventLog
from peer.host import Host, HostConfig, open_host
from peer.identity import Identity
from peer.rpc import Buffer, Call, Method, Reply
from swarm.fetch import HOPELESS_S, Fetched, fetch_state
from swarm.lending import ShelfLimits
from swarm.part_file import PartFile
from swarm.snapshots import SnapshotShelf
from swarm.state import AskChunk, AskManifest, AskResult, Piece, ResultPart, StateMethods
from tests.swarm.donor_child import seeded_state

NUMEL = 500_000  # 4 MB of state: 62 chunks of 64 KiB
SEED = 7
STATE = seeded_state(NUMEL, SEED)
TREE = hash_state(STATE)
METHODS = StateMethods.of(TREE.size_bytes, 1 << 16)
CHILD = Path(__file__).with_name("donor_child.py")
REPO = Path(__file__).parents[2]
"""Fast enough for the test, slow enough that something can happen on the way: 2 MB/s each."""
SLOW = ShelfLimits(rate=2e6, wait_max_s=60.0)


@dataclass
class Joiner:
    host: Host
    part_file: Path
    events: EventLog
    seen: list[Event] = field(default_factory=list)

    async def fetch(self, *donors: Host | str, root: bytes = TREE.root) -> Fetched:
        names = [self.know(donor) if isinstance(donor, Host) else donor for donor in donors]
        return await self.fetch_from(lambda: names, root)

    async def fetch_from(self, donors: Callable[[], Sequence[str]], root: bytes = TREE.root) -> Fetched:
        with self.events.subscribed(self.seen.append), trio.fail_after(40):
            return await fetch_state(self.host.rpc, donors, root, TREE.size_bytes, self.part_file, self.events)

    def know(self, donor: Host) -> str:
        self.host.book.add(donor.peer_id, donor.addresses)
        return donor.peer_id

    @property
    def struck(self) -> set[str]:
        return {str(event.fields["peer"]) for event in self.seen if event.name == "peer_struck"}


@pytest.fixture
async def joiner(tmp_path: Path) -> AsyncIterator[Joiner]:
    events = EventLog()
    async with open_host(HostConfig(identity=Identity.generate(), events=events)) as host:
        yield Joiner(host, tmp_path / "state.part", events)


@asynccontextmanager
async def donors(*limits: ShelfLimits) -> AsyncIterator[list[Host]]:
    """Honest donors of STATE."""
    async with AsyncExitStack() as stack:
        hosts = []
        for limit in limits:
            shelf = SnapshotShelf(TREE.size_bytes, 1 << 16, limit)
            shelf.publish(TREE, STATE)
            hosts.append(await stack.enter_async_context(bare_host()))
            shelf.serve(hosts[-1].rpc)
        yield hosts


def bare_host() -> object:
    return open_host(HostConfig(identity=Identity.generate(), events=EventLog()))


ChunkHandler = Callable[[bytes, int], "tuple[Piece, Buffer]"]


@asynccontextmanager
async def odd_donor(
    chunk: ChunkHandler, manifest: bytes = b"".join(TREE.hashes), methods: StateMethods = METHODS
) -> AsyncIterator[Host]:
    """A donor that answers chunk requests with `chunk(what is right, index)`."""
    joined = b"".join(tensor.numpy().tobytes() for tensor in STATE)

    async def on_manifest(call: Call[AskManifest]) -> tuple[Piece, Buffer]:
        return Piece("here"), manifest

    async def on_chunk(call: Call[AskChunk]) -> tuple[Piece, Buffer]:
        return chunk(joined[slice(*TREE.span(call.body.index))], call.body.index)

    async with bare_host() as host:
        host.rpc.serve(methods.manifest, on_manifest)
        host.rpc.serve(methods.chunk, on_chunk)
        yield host


def flipped(right: bytes, index: int) -> tuple[Piece, Buffer]:
    return Piece("here"), right[:-1] + bytes([right[-1] ^ 1])


def arrived_whole(fetched: Fetched) -> bool:
    return torch.equal(fetched.tensors[0], STATE[0]) and torch.equal(fetched.tensors[1], STATE[1])


async def test_a_state_arrives_bit_for_bit_from_all_donors(joiner: Joiner) -> None:
    async with donors(*[ShelfLimits()] * 3) as hosts:
        fetched = await joiner.fetch(*hosts)
    assert arrived_whole(fetched) and fetched.tree == TREE
    assert set(fetched.donors) == {host.peer_id for host in hosts}
    assert sum(fetched.donors.values()) == TREE.size_bytes and fetched.resumed_bytes == 0
    assert not joiner.part_file.exists()


async def test_one_donor_is_enough(joiner: Joiner) -> None:
    async with donors(ShelfLimits()) as hosts:
        assert arrived_whole(await joiner.fetch(*hosts))


@pytest.mark.parametrize("numel", [1, 1000, 20_000])
async def test_small_states_come_from_two_donors_where_they_have_two_chunks(joiner: Joiner, numel: int) -> None:
    state = seeded_state(numel, 1)
    tree = hash_state(state)
    async with bare_host() as one, bare_host() as two:
        for host in (one, two):
            shelf = SnapshotShelf(tree.size_bytes, 1 << 16)
            shelf.publish(tree, state)
            shelf.serve(host.rpc)
            joiner.know(host)
        names = [one.peer_id, two.peer_id]
        fetched = await fetch_state(
            joiner.host.rpc, lambda: names, tree.root, tree.size_bytes, joiner.part_file, joiner.events
        )
    assert torch.equal(fetched.tensors[0], state[0]) and torch.equal(fetched.tensors[1], state[1])
    assert len(fetched.donors) == min(2, len(tree.hashes))


def too_short(right: bytes, index: int) -> tuple[Piece, Buffer]:
    return Piece("here"), right[:-4]


def nothing(right: bytes, index: int) -> tuple[Piece, Buffer]:
    return Piece("here"), b""


def another_chunk(right: bytes, index: int) -> tuple[Piece, Buffer]:
    return Piece("here"), bytes(len(right))


@pytest.mark.parametrize("lie", [flipped, too_short, nothing, another_chunk])
async def test_a_donor_that_sends_wrong_bytes_is_struck_and_dropped(joiner: Joiner, lie: ChunkHandler) -> None:
    asked: list[int] = []

    def counted(right: bytes, index: int) -> tuple[Piece, Buffer]:
        asked.append(index)
        return lie(right, index)

    async with donors(ShelfLimits()) as [good], odd_donor(counted) as bad:
        fetched = await joiner.fetch(bad, good)
    assert arrived_whole(fetched) and set(fetched.donors) == {good.peer_id}
    assert joiner.struck == {bad.peer_id}
    assert len(asked) <= 3  # what was already under way


async def test_a_donor_that_sends_more_than_a_chunk_is_struck(joiner: Joiner) -> None:
    loose = StateMethods(
        METHODS.manifest, Method("state.chunk", AskChunk, Piece, reply_payload_max=1 << 22), METHODS.result
    )

    def too_long(right: bytes, index: int) -> tuple[Piece, Buffer]:
        return Piece("here"), right + bytes(1 << 20)

    async with donors(ShelfLimits()) as [good], odd_donor(too_long, methods=loose) as bad:
        assert arrived_whole(await joiner.fetch(bad, good))
    assert joiner.struck == {bad.peer_id}


@pytest.mark.parametrize("manifest", [bytes(32 * len(TREE.hashes)), b"".join(TREE.hashes[:-1]), b""])
async def test_a_forged_list_of_hashes_is_not_believed(joiner: Joiner, manifest: bytes) -> None:
    async with odd_donor(flipped, manifest) as bad:
        with pytest.raises(NetworkError, match="1 sent wrong bytes"):
            await joiner.fetch(bad)
        async with donors(ShelfLimits()) as [good]:
            assert arrived_whole(await joiner.fetch(bad, good))
    assert joiner.struck == {bad.peer_id}


@pytest.mark.parametrize("retry_after_s", [0.0, float("nan"), 1e300])
async def test_a_busy_donor_makes_the_joiner_go_elsewhere(joiner: Joiner, retry_after_s: float) -> None:
    asked: list[int] = []

    def busy(right: bytes, index: int) -> tuple[Piece, Buffer]:
        asked.append(index)
        return Piece("busy", retry_after_s), b""

    async with donors(ShelfLimits()) as [good], odd_donor(busy) as full:
        fetched = await joiner.fetch(full, good)
    assert arrived_whole(fetched) and set(fetched.donors) == {good.peer_id}
    assert not joiner.struck and len(asked) < 3 * (fetched.seconds / 0.1 + 2)  # three calls, no hot loop


async def test_a_donor_without_the_state_is_not_needed(joiner: Joiner) -> None:
    async with donors(ShelfLimits()) as [good], bare_host() as other_run, bare_host() as late:
        SnapshotShelf(TREE.size_bytes, 1 << 16).serve(late.rpc)
        assert arrived_whole(await joiner.fetch(other_run, late, good))
    assert not joiner.struck


async def test_when_no_donor_has_the_state_the_error_says_so(joiner: Joiner) -> None:
    async with donors(ShelfLimits()) as hosts:
        with pytest.raises(NetworkError, match="1 do not hold it any more"):
            await joiner.fetch(*hosts, root=bytes(32))
    with pytest.raises(NetworkError, match="no donor is known"):
        await joiner.fetch()


async def test_peers_that_lend_no_states_are_not_waited_for(joiner: Joiner) -> None:
    """As when only the authority's signed head is known, and the authority trains nothing."""
    async with bare_host() as authority:
        joiner.know(authority)
        began = trio.current_time()
        with pytest.raises(NetworkError, match="1 lend no state"):
            await joiner.fetch(authority)
        assert trio.current_time() - began < HOPELESS_S


async def test_what_nobody_holds_any_more_leaves_no_file_behind(joiner: Joiner) -> None:
    gone = False

    def until_half(right: bytes, index: int) -> tuple[Piece, Buffer]:
        nonlocal gone
        gone = gone or index >= len(TREE.hashes) // 2
        return (Piece("gone"), b"") if gone else (Piece("here"), right)

    async with odd_donor(until_half) as donor:
        with pytest.raises(NetworkError, match="1 do not hold it any more"):
            await joiner.fetch(donor)
        assert not joiner.part_file.exists()
        async with donors(ShelfLimits()) as [other]:
            assert arrived_whole(await joiner.fetch(donor, other))


async def test_what_somebody_may_still_hold_is_kept(joiner: Joiner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swarm.fetch.HOPELESS_FAILURES", 1)
    async with bare_host() as away:
        joiner.know(away)
    part = PartFile(joiner.part_file, TREE.size_bytes)
    part.close()
    with pytest.raises(NetworkError, match="1 cannot be reached"):
        await joiner.fetch(away)
    assert joiner.part_file.exists()


async def test_a_donor_that_turns_up_during_the_fetch_is_used(joiner: Joiner) -> None:
    async with donors(SLOW, ShelfLimits()) as [slow, quick]:
        names = [joiner.know(slow), joiner.know(quick)]
        polls = 0

        def known() -> list[str]:
            nonlocal polls
            polls += 1
            return names[:1] if polls < 3 else names

        fetched = await joiner.fetch_from(known)
    assert arrived_whole(fetched) and set(fetched.donors) == set(names)


async def test_an_interrupted_fetch_goes_on_where_it_was(joiner: Joiner) -> None:
    half = trio.CancelScope()
    served = 0

    def until_half(right: bytes, index: int) -> tuple[Piece, Buffer]:
        nonlocal served
        served += 1
        if served == len(TREE.hashes) // 2:
            half.cancel()
        return Piece("here"), right

    async with odd_donor(until_half) as donor:
        with half:
            await joiner.fetch(donor)
        assert half.cancelled_caught
    part = PartFile(joiner.part_file, TREE.size_bytes)
    kept = sorted(part.intact(TREE))
    part.close()
    assert 1 < len(kept) < len(TREE.hashes)
    with joiner.part_file.open("r+b") as file:  # a torn write, as after a power cut
        file.seek(TREE.span(kept[0])[0] + 5)
        file.write(b"torn")
    async with donors(ShelfLimits()) as [quick]:
        fetched = await joiner.fetch(quick)
    assert arrived_whole(fetched)
    assert fetched.resumed_bytes == sum(end - start for start, end in map(TREE.span, kept[1:]))
    assert sum(fetched.donors.values()) == TREE.size_bytes - fetched.resumed_bytes


async def test_left_overs_of_another_state_do_no_harm(joiner: Joiner) -> None:
    joiner.part_file.write_bytes(os.urandom(2 * TREE.size_bytes))
    async with donors(ShelfLimits()) as hosts:
        fetched = await joiner.fetch(*hosts)
    assert arrived_whole(fetched) and fetched.resumed_bytes == 0


@pytest.fixture
def tiny_disk(tmp_path: Path) -> object:
    where = tmp_path / "disk"
    where.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", where], capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        pytest.skip(f"this test mounts a tmpfs, which needs root: {done.stderr.strip()}")
    yield where
    subprocess.run(["umount", where], check=True)


async def test_a_full_disk_is_reported_before_anything_is_fetched(joiner: Joiner, tiny_disk: Path) -> None:
    joiner.part_file = tiny_disk / "state.part"
    with pytest.raises(ResourceError, match=r"is full, 4 MiB are needed .*free some space"):
        await joiner.fetch("nobody")
    assert not joiner.part_file.exists()
    subprocess.run(["mount", "-o", "remount,ro", tiny_disk], check=True)
    with pytest.raises(ResourceError, match="choose a writable folder"):
        await joiner.fetch("nobody")


# -- the shelf -----------------------------------------------------------------------------------------------


async def test_commits_do_not_disturb_a_joiner_and_the_shelf_does_not_grow(joiner: Joiner) -> None:
    shelf = SnapshotShelf(TREE.size_bytes, 1 << 16, SLOW)
    shelf.publish(TREE, STATE)
    async with bare_host() as host:
        shelf.serve(host.rpc)
        commits = 0

        def known() -> list[str]:  # asked ten times a second: as good a clock for commits as any
            nonlocal commits
            if host.bytes_up > TREE.chunk_size and commits < 12:  # once the joiner is reading
                commits += 1
                newer = seeded_state(NUMEL, 100 + commits)
                shelf.publish(hash_state(newer), newer)
            return [joiner.know(host)]

        fetched = await joiner.fetch_from(known)
        assert arrived_whole(fetched) and commits > 3 and not joiner.struck
        assert len(shelf.state_hashes) == 2


async def test_a_joiner_that_asks_and_does_not_read_costs_bounded_memory() -> None:
    shelf = SnapshotShelf(TREE.size_bytes, 1 << 16, ShelfLimits(lent_per_joiner=TREE.chunk_size * 2))
    shelf.publish(TREE, STATE)
    call = Call("joiner", AskChunk(TREE.root, 1), memoryview(b""))
    held = [await shelf._on_chunk(call) for _ in range(3)]
    outcomes = [answer[0].outcome if isinstance(answer, tuple) else answer.outcome for answer in held]
    assert outcomes == ["here", "here", "busy"]
    other = await shelf._on_chunk(Call("other", call.body, call.payload))
    assert isinstance(other, tuple)
    held.clear()
    assert isinstance(await shelf._on_chunk(call), tuple)  # what has left is not counted any more


async def test_requests_outside_the_state_are_violations() -> None:
    async with donors(ShelfLimits()) as [host], bare_host() as asker:
        asker.book.add(host.peer_id, host.addresses)
        for index in (-1, len(TREE.hashes), 1 << 62):
            with pytest.raises(RemoteError) as caught:
                await asker.rpc.call(host.peer_id, METHODS.chunk, AskChunk(TREE.root, index), timeout_s=5)
            assert caught.value.code == "ProtocolViolation"


async def test_during_an_exchange_joiners_get_a_trickle(joiner: Joiner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swarm.lending._TELLING_BYTES", 1 << 30)  # so that the speed stays what it was
    monkeypatch.setattr("swarm.lending._SPEED_FIRST", 20e6)
    shelf = SnapshotShelf(TREE.size_bytes, 1 << 16, ShelfLimits(share_in_exchange=0.1))
    shelf.publish(TREE, STATE)
    async with bare_host() as host:
        shelf.serve(host.rpc)
        with shelf.stepping_back():
            held_back = await joiner.fetch(host)
        free = await joiner.fetch(host)
    assert held_back.seconds > 0.8 * TREE.size_bytes / 2e6
    assert free.seconds < held_back.seconds


# -- missed results ------------------------------------------------------------------------------------------


async def test_the_results_of_the_last_rounds_are_kept(joiner: Joiner) -> None:
    shelf = SnapshotShelf(TREE.size_bytes, 1 << 16, ShelfLimits(results=3))
    states = [seeded_state(1000, seed) for seed in range(6)]
    trees = [hash_state(state) for state in states]
    for n in range(6):
        parts = [bytes([n, part]) * 100 for part in range(5)]
        shelf.publish(trees[n], states[n], head=b"head %d" % n, parts=parts if n != 4 else ())
    async with bare_host() as host:
        shelf.serve(host.rpc)
        joiner.know(host)

        async def ask(after: int, part: int) -> Reply[ResultPart]:
            question = AskResult(trees[after].root, part)
            return await joiner.host.rpc.call(host.peer_id, METHODS.result, question, timeout_s=10)

        for after in (1, 2, 4):
            for part in range(5):
                reply = await ask(after, part)
                assert bytes(reply.payload) == bytes([after + 1, part]) * 100
                assert reply.body.leads_to == trees[after + 1].root and reply.body.parts == 5
                assert reply.body.head == b"head %d" % (after + 1)
        assert (await ask(0, 0)).body.outcome == "gone"  # too long ago
        assert (await ask(3, 0)).body.outcome == "gone"  # state 4 was fetched: no result led to it
        with pytest.raises(RemoteError, match="asked for part 5 of 5"):
            await ask(1, 5)


# -- donors in processes of their own ------------------------------------------------------------------------


@dataclass(frozen=True)
class ChildDonor:
    process: trio.Process
    peer: str
    addresses: tuple[str, ...]


@asynccontextmanager
async def child_donors(*faults: str) -> AsyncIterator[list[ChildDonor]]:
    """One donor process for each of `faults` (a BARNRAISE_FAULT, or "")."""
    command = [sys.executable, str(CHILD), str(NUMEL), str(SEED)]
    processes = [
        await trio.lowlevel.open_process(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": str(REPO), "BARNRAISE_FAULT": fault},
        )
        for fault in faults
    ]
    try:
        ready = []
        for process in processes:
            assert process.stdout is not None
            hello = json.loads(await process.stdout.receive_some(1 << 16))
            ready.append(ChildDonor(process, hello["peer"], tuple(hello["addresses"])))
        yield ready
    finally:
        for process in processes:
            process.kill()
            with trio.CancelScope(shield=True):
                await process.wait()


@pytest.mark.process
@pytest.mark.parametrize("fault", ["kill", "stop"])
async def test_a_donor_that_dies_or_freezes_in_the_middle(joiner: Joiner, fault: str) -> None:
    """The fault fires when the donor is asked for a chunk; a corrupt donor stands beside it."""
    async with child_donors(f"{fault}:during_state_transfer:1", "") as [bad, good], odd_donor(flipped) as liar:
        for child in (bad, good):
            joiner.host.book.add(child.peer, child.addresses)
        fetched = await joiner.fetch(bad.peer, joiner.know(liar), good.peer)
        assert arrived_whole(fetched)
        assert set(fetched.donors) == {good.peer} and joiner.struck == {liar.peer_id}
        assert fetched.seconds < 15  # a chunk's first deadline is 30 s: it was not waited for
        if fault == "kill":
            assert await bad.process.wait() == -signal.SIGKILL


@pytest.mark.process
async def test_a_frozen_donor_alone_is_waited_for(joiner: Joiner) -> None:
    async with child_donors("stop:during_state_transfer:1") as [donor]:
        joiner.host.book.add(donor.peer, donor.addresses)
        stopped = trio.Event()

        async def thaw() -> None:
            await trio.to_thread.run_sync(os.waitid, os.P_PID, donor.process.pid, os.WSTOPPED)
            stopped.set()
            donor.process.send_signal(signal.SIGCONT)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(thaw)
            fetched = await joiner.fetch(donor.peer)
        assert stopped.is_set() and arrived_whole(fetched)


def test_the_test_state_has_enough_chunks() -> None:
    assert isinstance(TREE, StateTree) and len(TREE.hashes) > 30
