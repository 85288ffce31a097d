"""What a donor spends on joiners: how long it keeps a snapshot, and how fast it sends it."""

from __future__ import annotations

import weakref
from contextlib import ExitStack
from functools import cache
from typing import Any

import pytest
from torch import Tensor

from peer.checkpoint.hash_tree import StateBytes, StateTree, hash_state
from peer.events import Event, EventLog
from peer.net.rpc import Call
from swarm.state import snapshots as module
from swarm.state.messages import AskChunk, AskHashes, StateReply
from swarm.state.snapshots import SnapshotStore
from swarm.state.upload_limits import SnapshotLimits, UploadSlots
from tests.swarm.support.donor_child import generation, seeded_state
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
    snapshots.publish(generation(state, tree))
    assert tree.root in snapshots.state_hashes
    return tree.root


def store(**limits: Any) -> SnapshotStore:
    """A store with TREE in it that keeps two states beside the newest."""
    snapshots = SnapshotStore(TREE.size_bytes, 1 << 16, SnapshotLimits(small_bytes=0, **limits))
    snapshots.publish(generation(STATE, TREE))
    return snapshots


def keeps(snapshots: SnapshotStore, root: bytes = TREE.root) -> bool:
    """Return whether a state is still there after three more commits."""
    for seed in (91, 92, 93):
        commit(snapshots, seed)
    assert len(snapshots.state_hashes) <= 3
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


async def test_the_newest_state_is_there_whoever_reads(clock: Time) -> None:
    """Once each buffer was read, new states were left out, for as long as half an hour: all joiners heard that the head
    just committed is gone."""
    events = EventLog()
    seen: list[Event] = []
    snapshots = SnapshotStore(TREE.size_bytes, 1 << 16, SnapshotLimits(small_bytes=0), events)
    with events.subscribed(seen.append):
        snapshots.publish(generation(STATE, TREE))
        await read(snapshots, TREE.root, 0, "one")
        clock.now += 1
        other = commit(snapshots, 8)
        await read(snapshots, other, 0, "two")
        clock.now += 1
        third = commit(snapshots, 9)
        await read(snapshots, third, 0, "three")
        newest = commit(snapshots, 10)
        assert snapshots.state_hashes == (TREE.root, other, newest), "those that have read for longer come to an end"
        [event] = seen
        assert event.name == "snapshot_taken_back" and event.fields["readers"] == 1
        assert event.fields["state_hash"] == third.hex()
    answer = await snapshots.send_chunk(Call("three", AskChunk(third, 1), memoryview(b"")))
    assert isinstance(answer, StateReply) and answer.outcome == "gone"


async def test_the_lease_with_the_oldest_progress_gives_way(clock: Time) -> None:
    snapshots = store(lease_rate=1.0)
    slow = await read(snapshots, TREE.root, 0, "slow")  # it may take hours by its link
    clock.now += snapshots.limits.lease_pause_s + 1
    other = commit(snapshots, 8)
    await read(snapshots, other, 0, "quick")
    third = commit(snapshots, 9)
    await read(snapshots, third, 0, "quick, too")
    newest = commit(snapshots, 10)
    assert snapshots.state_hashes == (other, third, newest)
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
        assert not newest or len(snapshots.state_hashes) == min(seed, 3)
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


# -- how long states stay ----------------------------------------------------------------------------------------


async def test_a_state_is_gone_with_its_last_reader(clock: Time) -> None:
    """The room that it lies in is needed for the next one."""
    state = generation(STATE, TREE)
    gone = weakref.ref(state)
    snapshots = SnapshotStore(TREE.size_bytes, 1 << 16, SnapshotLimits(small_bytes=0))
    snapshots.publish(state)
    del state
    chunk = await read(snapshots, TREE.root, 0)
    assert bytes(chunk) == StateBytes(STATE).copy(*TREE.span(0))
    chunk.release()
    newest = commit(snapshots, 8)
    assert snapshots.state_hashes == (TREE.root, newest) and gone() is not None
    clock.now += 2 * snapshots.limits.lease_pause_s
    newest = commit(snapshots, 9)
    assert snapshots.state_hashes == (newest,) and gone() is None


async def test_what_a_joiner_reads_stays_through_later_commits(clock: Time) -> None:
    snapshots = store()
    await snapshots.send_hashes(Call("reader", AskHashes(TREE.root), memoryview(b"")))
    for index in range(len(TREE.hashes)):
        newest = commit(snapshots, 20 + index)
        assert {TREE.root, newest} <= set(snapshots.state_hashes)
        assert bytes(await read(snapshots, TREE.root, index)) == StateBytes(STATE).copy(*TREE.span(index))


async def test_a_request_that_waits_while_its_state_goes_is_told_so(
    clock: Time, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshots = store()
    acquire = snapshots._slots.acquire

    async def late(*arguments: Any) -> Any:
        clock.now += 2 * snapshots.limits.lease_pause_s
        commit(snapshots, 8)
        return await acquire(*arguments)

    monkeypatch.setattr(snapshots._slots, "acquire", late)
    answer = await snapshots.send_chunk(Call("reader", AskChunk(TREE.root, 0), memoryview(b"")))
    assert isinstance(answer, StateReply) and answer.outcome == "gone"


async def test_a_joiner_that_comes_late_for_a_state_finds_the_next_ones(clock: Time) -> None:
    """Rounds may take less time than a joiner takes to hear of a state and to ask: it never found one."""
    snapshots = store()
    first = commit(snapshots, 8)
    answer = await snapshots.send_hashes(Call("late", AskHashes(TREE.root), memoryview(b"")))
    assert isinstance(answer, StateReply) and answer.outcome == "gone"
    second = commit(snapshots, 9)
    assert snapshots.state_hashes == (first, second)
    clock.now += module.ASKED_S
    third = commit(snapshots, 10)
    assert snapshots.state_hashes == (third,)


def test_a_small_state_stays_although_no_joiner_has_asked(clock: Time) -> None:
    snapshots = SnapshotStore(TREE.size_bytes, 1 << 16, SnapshotLimits(small_bytes=5 * TREE.size_bytes))
    snapshots.publish(generation(STATE, TREE))
    newest = commit(snapshots, 8)
    assert snapshots.state_hashes == (TREE.root, newest)


async def test_a_state_that_is_committed_again_counts_as_the_newest(clock: Time) -> None:
    snapshots = store()
    await snapshots.send_hashes(Call("late", AskHashes(b"unknown"), memoryview(b"")))
    other = commit(snapshots, 8)
    snapshots.publish(generation(STATE, TREE))
    assert snapshots.state_hashes == (other, TREE.root)
