"""What a donor spends on joiners: how long it keeps a snapshot, and how fast it sends it."""

from __future__ import annotations

import pytest

from peer.checkpoint.hash_tree import hash_state
from peer.net.rpc import Call
from swarm.state.messages import AskChunk, AskHashes
from swarm.state.snapshots import SnapshotStore
from swarm.state.upload_limits import SnapshotLimits, UploadSlots
from tests.swarm.support.donor_child import seeded_state
from tests.swarm.support.state_donors import NUMEL, STATE, TREE


class Time:
    """Replaces `time` in `swarm.state.snapshots`."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Time:
    clock = Time()
    monkeypatch.setattr("swarm.state.snapshots.time", clock)
    return clock


async def read(snapshots: SnapshotStore, root: bytes, index: int, reader: str = "reader") -> memoryview:
    """Return a chunk. It is on its way until the last reference to it is gone."""
    answer = await snapshots.send_chunk(Call(reader, AskChunk(root, index), memoryview(b"")))
    assert isinstance(answer, tuple)
    return memoryview(answer[1])


def commit(snapshots: SnapshotStore, seed: int) -> bytes | None:
    """Publish a new state. Return its hash if it found a buffer."""
    state = seeded_state(NUMEL, seed)
    tree = hash_state(state)
    snapshots.publish(tree, state)
    return tree.root if tree.root in snapshots.state_hashes else None


async def test_a_reader_that_makes_progress_keeps_its_snapshot(clock: Time) -> None:
    snapshots = SnapshotStore(TREE.size_bytes, 1 << 16, SnapshotLimits(snapshots=1, small_bytes=0))
    snapshots.publish(TREE, STATE)
    for index in range(len(TREE.hashes) - 1):  # the last one is shorter
        chunk = await read(snapshots, TREE.root, index)
        clock.now += 0.9 * TREE.chunk_size / snapshots.limits.lease_rate  # a slow link
        assert commit(snapshots, 8) is None
        chunk.release()
        clock.now += 0.9 * snapshots.limits.lease_pause_s  # and a slow disk
        assert commit(snapshots, 8) is None
    clock.now += 0.2 * snapshots.limits.lease_pause_s
    assert commit(snapshots, 8)


async def test_readers_that_repeat_themselves_do_not_hold_both_buffers(clock: Time) -> None:
    """Each asks again and again for the hashes and a chunk that it had, to hold the donor's memory."""
    snapshots = SnapshotStore(TREE.size_bytes, 1 << 16, SnapshotLimits(small_bytes=0))
    snapshots.publish(TREE, STATE)
    other = commit(snapshots, 8)
    assert other is not None
    began = clock.now
    for _ in range(1000):
        for root, reader in ((TREE.root, "one"), (other, "two")):
            await snapshots.send_hashes(Call(reader, AskHashes(root), memoryview(b"")))
            await read(snapshots, root, 0, reader)
        if commit(snapshots, 9):
            break
        clock.now += 0.1
    assert clock.now - began <= snapshots.limits.lease_pause_s + 0.2


async def test_readers_that_never_read_do_not_hold_both_buffers(clock: Time) -> None:
    snapshots = SnapshotStore(TREE.size_bytes, 1 << 16, SnapshotLimits(small_bytes=0))
    snapshots.publish(TREE, STATE)
    other = commit(snapshots, 8)
    assert other is not None
    unread = [await read(snapshots, root, 0, reader) for root, reader in ((TREE.root, "one"), (other, "two"))]
    assert commit(snapshots, 9) is None
    clock.now += snapshots.limits.lease_pause_s + TREE.chunk_size / snapshots.limits.lease_rate
    assert commit(snapshots, 9)
    del unread


async def test_a_reader_that_is_done_holds_nothing(clock: Time) -> None:
    snapshots = SnapshotStore(TREE.size_bytes, 1 << 16, SnapshotLimits(snapshots=1, small_bytes=0))
    snapshots.publish(TREE, STATE)
    for index in range(len(TREE.hashes)):
        assert commit(snapshots, 8) is None or not index
        snapshots.publish(TREE, STATE)
        await read(snapshots, TREE.root, index)
    assert commit(snapshots, 8)


async def test_a_reader_that_follows_the_group_holds_one_buffer(clock: Time) -> None:
    """It has asked for a state that is gone before it has all of it, and turns to the next one, again and again."""
    snapshots = SnapshotStore(TREE.size_bytes, 1 << 16, SnapshotLimits(small_bytes=0))
    newest: bytes | None = None
    for seed in range(8):
        newest = commit(snapshots, seed)
        assert newest is not None, f"no buffer was free for state {seed}"
        await snapshots.send_hashes(Call("reader", AskHashes(newest), memoryview(b"")))
        await read(snapshots, newest, 0)
    assert newest in snapshots.state_hashes


async def test_many_names_of_one_reader_do_not_hold_a_buffer(clock: Time) -> None:
    snapshots = SnapshotStore(TREE.size_bytes, 1 << 16, SnapshotLimits(snapshots=1, small_bytes=0))
    snapshots.publish(TREE, STATE)
    for number in range(3 * snapshots.limits.lease_readers):
        await read(snapshots, TREE.root, 0, f"reader {number}")
        clock.now += 0.9 * snapshots.limits.lease_pause_s
    assert commit(snapshots, 8)


async def test_an_exchange_costs_a_reader_no_lease(clock: Time) -> None:
    snapshots = SnapshotStore(TREE.size_bytes, 1 << 16, SnapshotLimits(snapshots=1, small_bytes=0))
    snapshots.publish(TREE, STATE)
    await read(snapshots, TREE.root, 0)
    with snapshots.stepping_back():
        clock.now += 500
    assert commit(snapshots, 8) is None
    clock.now += snapshots.limits.lease_pause_s
    assert commit(snapshots, 8)
    with snapshots.stepping_back():  # no reader: nothing to extend
        clock.now += 500
    assert commit(snapshots, 9)


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
