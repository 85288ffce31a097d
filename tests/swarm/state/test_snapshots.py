"""What a donor spends on joiners: how long it keeps a snapshot, and how fast it sends it."""

from __future__ import annotations

from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from peer.checkpoint.hash_tree import StateBytes, StateTree, hash_state
from peer.events import Event, EventLog
from peer.footprint import kept
from peer.net.rpc import Call
from swarm.state import snapshots as module
from swarm.state.messages import AskChunk, AskHashes, StateReply
from swarm.state.snapshots import SnapshotStore
from swarm.state.upload_limits import SnapshotLimits, UploadSlots
from tests.swarm.support.donor_child import seeded_state
from tests.swarm.support.state_donors import NUMEL, STATE, TREE


class Time:
    """Replaces `time` in `swarm.state.leases`."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Time:
    clock = Time()
    monkeypatch.setattr("swarm.state.leases.time", clock)
    return clock


async def read(snapshots: SnapshotStore, root: bytes, index: int, reader: str = "reader") -> memoryview:
    """Return a chunk. It is on its way until the last reference to it is gone."""
    answer = await snapshots.send_chunk(Call(reader, AskChunk(root, index), memoryview(b"")))
    assert isinstance(answer, tuple)
    return memoryview(answer[1])


@cache
def other_state(seed: int) -> tuple[list[Tensor], StateTree]:
    state = seeded_state(NUMEL, seed)
    return list(state), hash_state(state)


def commit(snapshots: SnapshotStore, seed: int) -> bytes:
    """Publish a new state, which must be there to be read. Return its hash."""
    state, tree = other_state(seed)
    snapshots.publish(tree, state)
    assert tree.root in snapshots.state_hashes
    return tree.root


def store(**limits: Any) -> SnapshotStore:
    """A store of two buffers with TREE in it."""
    snapshots = SnapshotStore(TREE.size_bytes, 1 << 16, SnapshotLimits(small_bytes=0, **limits))
    snapshots.publish(TREE, STATE)
    return snapshots


def keeps(snapshots: SnapshotStore, root: bytes = TREE.root) -> bool:
    """Return whether a state is still there after two more commits."""
    for seed in (91, 92):
        commit(snapshots, seed)
    assert len(snapshots.state_hashes) == 2
    return root in snapshots.state_hashes


async def test_a_reader_that_makes_progress_keeps_its_snapshot(clock: Time) -> None:
    snapshots = store()
    for index in range(len(TREE.hashes) - 1):  # the last one is shorter
        chunk = await read(snapshots, TREE.root, index)
        clock.now += 0.9 * TREE.chunk_size / snapshots.limits.lease_rate  # a slow link
        assert keeps(snapshots)
        chunk.release()
        clock.now += 0.9 * snapshots.limits.lease_pause_s  # and a slow disk
        assert keeps(snapshots)
    clock.now += 0.2 * snapshots.limits.lease_pause_s
    assert not keeps(snapshots)


async def test_copies_of_a_large_state_lie_in_a_folder(
    clock: Time, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept, "SMALL_BYTES", 0)
    snapshots = SnapshotStore(TREE.size_bytes, 1 << 16, folder=tmp_path)
    root = commit(snapshots, 8)
    data = await read(snapshots, root, 0)
    assert data == StateBytes(other_state(8)[0]).copy(*TREE.span(0))
    maps = Path("/proc/self/maps").read_text()
    assert f"{tmp_path}/" in maps and not list(tmp_path.iterdir()), "a file without a name"


async def test_copies_stay_in_memory_where_the_system_cannot_reserve_room(
    clock: Time, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on macOS."""
    monkeypatch.setattr(kept, "SMALL_BYTES", 0)
    monkeypatch.delattr("os.posix_fallocate")
    snapshots = SnapshotStore(TREE.size_bytes, 1 << 16, folder=tmp_path)
    assert await read(snapshots, commit(snapshots, 8), 0) == StateBytes(other_state(8)[0]).copy(*TREE.span(0))
    assert f"{tmp_path}/" not in Path("/proc/self/maps").read_text()


async def test_the_newest_state_is_there_whoever_reads(clock: Time) -> None:
    """Once each buffer was read, new states were left out, for as long as half an hour: all joiners heard that the head
    just committed is gone."""
    events = EventLog()
    seen: list[Event] = []
    snapshots = SnapshotStore(TREE.size_bytes, 1 << 16, SnapshotLimits(small_bytes=0), events)
    with events.subscribed(seen.append):
        snapshots.publish(TREE, STATE)
        other = commit(snapshots, 8)
        await read(snapshots, TREE.root, 0, "one")
        clock.now += 1
        await read(snapshots, other, 0, "two")
        newest = commit(snapshots, 9)
        assert snapshots.state_hashes == (TREE.root, newest), "the one that has read for longer comes to an end"
        [event] = seen
        assert event.name == "snapshot_taken_back" and event.fields["readers"] == 1
        assert event.fields["state_hash"] == other.hex()
    answer = await snapshots.send_chunk(Call("two", AskChunk(other, 1), memoryview(b"")))
    assert isinstance(answer, StateReply) and answer.outcome == "gone"


async def test_the_lease_with_the_oldest_progress_gives_way(clock: Time) -> None:
    snapshots = store(lease_rate=1.0)
    slow = await read(snapshots, TREE.root, 0, "slow")  # it may take hours by its link
    clock.now += snapshots.limits.lease_pause_s + 1
    other = commit(snapshots, 8)
    await read(snapshots, other, 0, "quick")
    newest = commit(snapshots, 9)
    assert snapshots.state_hashes == (other, newest)
    del slow


async def test_readers_that_repeat_themselves_do_not_hold_a_buffer(clock: Time) -> None:
    """Each asks again and again for the hashes and a chunk that it had, to hold the donor's memory."""
    snapshots = store()
    for _ in range(1 + int(snapshots.limits.lease_pause_s / 0.1)):
        await snapshots.send_hashes(Call("one", AskHashes(TREE.root), memoryview(b"")))
        await read(snapshots, TREE.root, 0, "one")
        clock.now += 0.1
    assert not keeps(snapshots)


async def test_readers_that_never_read_do_not_hold_a_buffer(clock: Time) -> None:
    snapshots = store()
    unread = await read(snapshots, TREE.root, 0)
    assert keeps(snapshots)
    clock.now += snapshots.limits.lease_pause_s + TREE.chunk_size / snapshots.limits.lease_rate
    assert not keeps(snapshots)
    del unread


async def test_a_reader_that_is_done_holds_nothing(clock: Time) -> None:
    snapshots = store()
    for index in range(len(TREE.hashes)):
        assert not index or keeps(snapshots)
        await read(snapshots, TREE.root, index)
    assert not keeps(snapshots)


async def test_a_reader_that_follows_the_group_holds_one_buffer(clock: Time) -> None:
    """It has asked for a state that is gone before it has all of it, and turns to the next one, again and again."""
    snapshots = SnapshotStore(TREE.size_bytes, 1 << 16, SnapshotLimits(small_bytes=0))
    newest = b""
    for seed in range(8):
        assert not newest or len(snapshots.state_hashes) == min(seed, 2)
        newest = commit(snapshots, seed)
        await snapshots.send_hashes(Call("reader", AskHashes(newest), memoryview(b"")))
        await read(snapshots, newest, 0)
    assert newest in snapshots.state_hashes


async def test_many_names_of_one_reader_do_not_hold_a_buffer(clock: Time) -> None:
    snapshots = store()
    for number in range(3 * snapshots.limits.lease_readers):
        await read(snapshots, TREE.root, 0, f"reader {number}")
        clock.now += 0.9 * snapshots.limits.lease_pause_s
    assert not keeps(snapshots)


async def test_an_exchange_costs_a_reader_no_lease(clock: Time) -> None:
    snapshots = store()
    await read(snapshots, TREE.root, 0)
    with snapshots.stepping_back():
        clock.now += 500
        assert keeps(snapshots)
    assert keeps(snapshots)
    clock.now += snapshots.limits.lease_pause_s
    assert not keeps(snapshots)


async def test_time_in_exchanges_that_overlap_counts_once(clock: Time) -> None:
    """Each of three exchanges gave a lease its own length, so that it outlived its pause by minutes."""
    snapshots = store()
    await read(snapshots, TREE.root, 0)
    with ExitStack() as first, ExitStack() as second:
        first.enter_context(snapshots.stepping_back())
        clock.now += 100
        second.enter_context(snapshots.stepping_back())
        clock.now += 100
        first.close()
        with snapshots.stepping_back():
            clock.now += 100
    clock.now += 0.9 * snapshots.limits.lease_pause_s
    assert keeps(snapshots)
    clock.now += 0.2 * snapshots.limits.lease_pause_s
    assert not keeps(snapshots)


async def test_a_lease_that_begins_in_an_exchange_lasts_one_pause_after_it(clock: Time) -> None:
    snapshots = store()
    with snapshots.stepping_back():
        clock.now += 500
        await read(snapshots, TREE.root, 0)
        clock.now += 1
    clock.now += 0.9 * snapshots.limits.lease_pause_s
    assert keeps(snapshots)
    clock.now += 0.2 * snapshots.limits.lease_pause_s
    assert not keeps(snapshots)


async def test_no_exchange_makes_a_lease_longer_than_the_longest(clock: Time) -> None:
    snapshots = store()
    await read(snapshots, TREE.root, 0)
    with snapshots.stepping_back():
        clock.now += snapshots.limits.lease_max_s
        assert not keeps(snapshots)


async def test_the_share_follows_the_speed_of_uploads(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Time()
    monkeypatch.setattr("swarm.state.upload_limits.time", clock)
    slots = UploadSlots(SnapshotLimits(share_in_exchange=0.1, uploading_per_joiner=1 << 30))

    async def upload(seconds: float) -> float:
        pin = await slots.acquire("joiner", 4 << 20)
        clock.now += seconds
        del pin
        with slots.stepping_back():
            assert slots.rate is not None
            return slots.rate

    assert slots.rate is None  # between exchanges, as fast as they go
    for _ in range(40):
        quick = await upload(0.04)
    assert quick == pytest.approx(0.1 * (4 << 20) / 0.04, rel=1e-3)
    for _ in range(40):
        slow = await upload(0.4)
    assert slow == pytest.approx(0.1 * (4 << 20) / 0.4, rel=1e-3)
    for _ in range(40):
        stuck = await upload(900.0)  # a slow reader tells nothing about the donor's link
    assert stuck == pytest.approx(0.1 * (4 << 20), rel=1e-3)


def test_small_states_are_kept_for_longer_than_their_rounds_take(clock: Time) -> None:
    """A joiner asks for a state that it has heard of: rounds of a small one may be over sooner than that."""
    limits = SnapshotLimits(small_bytes=5 * TREE.size_bytes)
    snapshots = SnapshotStore(TREE.size_bytes, 1 << 16, limits)
    hashes = [commit(snapshots, seed) for seed in range(12)]
    assert snapshots.state_hashes == tuple(hashes[-5:])
    snapshots = SnapshotStore(TREE.size_bytes, 1 << 16, SnapshotLimits(snapshots_max=4))
    hashes = [commit(snapshots, seed) for seed in range(12)]
    assert snapshots.state_hashes == tuple(hashes[-4:])


# -- states that are served in place -----------------------------------------------------------------------------


def live_store(**limits: Any) -> tuple[SnapshotStore, list[Tensor]]:
    """A store that serves TREE from these vectors."""
    snapshots, mine = SnapshotStore(TREE.size_bytes, 1 << 16, SnapshotLimits(**limits)), [v.clone() for v in STATE]
    snapshots.publish_in_place(TREE, mine)
    return snapshots, mine


async def test_a_state_without_readers_is_never_copied(clock: Time) -> None:
    """Each commit copied the whole state, before the next round could begin."""
    snapshots, _ = live_store(small_bytes=0)
    chunk = await read(snapshots, TREE.root, 0)
    assert bytes(chunk) == StateBytes(STATE).copy(*TREE.span(0))
    chunk.release()
    clock.now += 2 * snapshots.limits.lease_pause_s
    snapshots.detach()
    assert not snapshots.state_hashes and not snapshots._snapshots
    newer, tree = other_state(8)
    snapshots.publish_in_place(tree, newer)
    assert snapshots.state_hashes == (tree.root,) and not snapshots._snapshots


async def test_what_a_joiner_reads_is_copied_before_it_changes(clock: Time) -> None:
    snapshots, mine = live_store(small_bytes=0)
    await snapshots.send_hashes(Call("reader", AskHashes(TREE.root), memoryview(b"")))
    snapshots.detach()
    for vector in mine:
        vector.fill_(float("nan"))
    newer, tree = other_state(8)
    snapshots.publish_in_place(tree, newer)
    assert snapshots.state_hashes == (TREE.root, tree.root)
    for index in range(len(TREE.hashes)):
        assert bytes(await read(snapshots, TREE.root, index)) == StateBytes(STATE).copy(*TREE.span(index))
        snapshots.detach()
        snapshots.publish_in_place(tree, newer)


async def test_a_request_that_waits_while_its_state_goes_is_told_so(
    clock: Time, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would be sent what the vectors hold by then, under the hash of the state before."""
    snapshots, mine = live_store(small_bytes=0)
    acquire = snapshots._slots.acquire

    async def late(*arguments: Any) -> Any:
        clock.now += 2 * snapshots.limits.lease_pause_s
        snapshots.detach()
        mine[0].fill_(1.0)
        return await acquire(*arguments)

    monkeypatch.setattr(snapshots._slots, "acquire", late)
    answer = await snapshots.send_chunk(Call("reader", AskChunk(TREE.root, 0), memoryview(b"")))
    assert isinstance(answer, StateReply) and answer.outcome == "gone"


async def test_of_too_many_states_that_are_read_the_one_read_for_the_shortest_time_goes(clock: Time) -> None:
    events = EventLog()
    seen: list[Event] = []
    snapshots = SnapshotStore(TREE.size_bytes, 1 << 16, SnapshotLimits(small_bytes=0), events)
    read_ones = []
    with events.subscribed(seen.append):
        for seed in range(20, 24):
            state, tree = other_state(seed)
            snapshots.detach()
            snapshots.publish_in_place(tree, state)
            await read(snapshots, tree.root, 0, f"reader {seed}")
            clock.now += 0.1
            read_ones.append(tree.root)
    assert snapshots.state_hashes == (*read_ones[:2], read_ones[3])
    assert [event.fields["state_hash"] for event in seen] == [read_ones[2].hex()]


async def test_a_joiner_that_comes_late_for_a_state_finds_the_next_ones(clock: Time) -> None:
    """Rounds may take less time than a joiner takes to hear of a state and to ask: it never found one."""
    snapshots, _ = live_store(small_bytes=0)
    (first, tree), (second, later) = other_state(8), other_state(9)
    snapshots.detach()
    snapshots.publish_in_place(tree, first)
    answer = await snapshots.send_hashes(Call("late", AskHashes(TREE.root), memoryview(b"")))
    assert isinstance(answer, StateReply) and answer.outcome == "gone"
    snapshots.detach()
    snapshots.publish_in_place(later, second)
    assert snapshots.state_hashes == (tree.root, later.root)
    clock.now += module.ASKED_S
    snapshots.detach()
    assert snapshots.state_hashes == (tree.root,)


def test_a_small_state_is_copied_although_no_joiner_has_asked(clock: Time) -> None:
    snapshots, _ = live_store(small_bytes=5 * TREE.size_bytes)
    snapshots.detach()
    assert snapshots.state_hashes == (TREE.root,)
