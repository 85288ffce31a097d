"""What a donor spends on joiners: for how long it keeps a snapshot, and how fast it gives it away."""

from __future__ import annotations

import pytest

from peer.checkpoint.hash_tree import hash_state
from peer.net.rpc import Call
from swarm.state.messages import AskChunk, AskManifest
from swarm.state.snapshots import SnapshotStore
from swarm.state.upload_limits import Lending, ShelfLimits
from tests.swarm.support.donor_child import seeded_state
from tests.swarm.support.state_donors import NUMEL, STATE, TREE


class Time:
    """In place of `time` in `swarm.state.snapshots`."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Time:
    clock = Time()
    monkeypatch.setattr("swarm.state.snapshots.time", clock)
    return clock


async def read(shelf: SnapshotStore, root: bytes, index: int, reader: str = "reader") -> memoryview:
    """A chunk; it is on its way until nobody holds it any more."""
    answer = await shelf.hand_out_chunk(Call(reader, AskChunk(root, index), memoryview(b"")))
    assert isinstance(answer, tuple)
    return memoryview(answer[1])


def commit(shelf: SnapshotStore, seed: int) -> bytes | None:
    """The hash of a new state if it found a buffer."""
    state = seeded_state(NUMEL, seed)
    tree = hash_state(state)
    shelf.publish(tree, state)
    return tree.root if tree.root in shelf.state_hashes else None


async def test_a_reader_that_makes_progress_keeps_its_snapshot(clock: Time) -> None:
    shelf = SnapshotStore(TREE.size_bytes, 1 << 16, ShelfLimits(snapshots=1))
    shelf.publish(TREE, STATE)
    for index in range(len(TREE.hashes) - 1):  # the last one is shorter
        chunk = await read(shelf, TREE.root, index)
        clock.now += 0.9 * TREE.chunk_size / shelf.limits.lease_rate  # a thin link
        assert commit(shelf, 8) is None
        chunk.release()
        clock.now += 0.9 * shelf.limits.lease_pause_s  # and a slow disk
        assert commit(shelf, 8) is None
    clock.now += 0.2 * shelf.limits.lease_pause_s
    assert commit(shelf, 8)


async def test_readers_that_dawdle_do_not_hold_both_buffers(clock: Time) -> None:
    """Each asks again and again, the list and a chunk it had, as it would to hold the donor's memory for ever."""
    shelf = SnapshotStore(TREE.size_bytes, 1 << 16, ShelfLimits())
    shelf.publish(TREE, STATE)
    other = commit(shelf, 8)
    assert other is not None
    began = clock.now
    for _ in range(1000):
        for root, reader in ((TREE.root, "one"), (other, "two")):
            await shelf.hand_out_hashes(Call(reader, AskManifest(root), memoryview(b"")))
            await read(shelf, root, 0, reader)
        if commit(shelf, 9):
            break
        clock.now += 0.1
    assert clock.now - began <= shelf.limits.lease_pause_s + 0.2


async def test_readers_that_never_read_do_not_hold_both_buffers(clock: Time) -> None:
    shelf = SnapshotStore(TREE.size_bytes, 1 << 16, ShelfLimits())
    shelf.publish(TREE, STATE)
    other = commit(shelf, 8)
    assert other is not None
    unread = [await read(shelf, root, 0, reader) for root, reader in ((TREE.root, "one"), (other, "two"))]
    assert commit(shelf, 9) is None
    clock.now += shelf.limits.lease_pause_s + TREE.chunk_size / shelf.limits.lease_rate
    assert commit(shelf, 9)
    del unread


async def test_readers_that_are_done_hold_nothing(clock: Time) -> None:
    shelf = SnapshotStore(TREE.size_bytes, 1 << 16, ShelfLimits(snapshots=1))
    shelf.publish(TREE, STATE)
    for index in range(len(TREE.hashes)):
        await read(shelf, TREE.root, index)
    clock.now += shelf.limits.lease_pause_s
    assert commit(shelf, 8)


async def test_many_names_of_one_reader_hold_no_buffer_for_ever(clock: Time) -> None:
    shelf = SnapshotStore(TREE.size_bytes, 1 << 16, ShelfLimits(snapshots=1))
    shelf.publish(TREE, STATE)
    for number in range(3 * shelf.limits.lease_readers):
        await read(shelf, TREE.root, 0, f"reader {number}")
        clock.now += 0.9 * shelf.limits.lease_pause_s
    assert commit(shelf, 8)


async def test_an_exchange_costs_a_reader_no_lease(clock: Time) -> None:
    shelf = SnapshotStore(TREE.size_bytes, 1 << 16, ShelfLimits(snapshots=1))
    shelf.publish(TREE, STATE)
    await read(shelf, TREE.root, 0)
    with shelf.stepping_back():
        clock.now += 500
    assert commit(shelf, 8) is None
    clock.now += shelf.limits.lease_pause_s
    assert commit(shelf, 8)
    with shelf.stepping_back():  # nobody reads it: nothing to extend
        clock.now += 500
    assert commit(shelf, 9)


async def test_the_share_follows_how_fast_loans_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Time()
    monkeypatch.setattr("swarm.state.upload_limits.time", clock)
    lending = Lending(ShelfLimits(share_in_exchange=0.1, lent_per_joiner=1 << 30))

    async def lend(seconds: float) -> float:
        loan = await lending.turn("joiner", 4 << 20)
        clock.now += seconds
        del loan
        with lending.stepping_back():
            assert lending.rate is not None
            return lending.rate

    assert lending.rate is None  # between exchanges, as fast as they go
    for _ in range(40):
        quick = await lend(0.04)
    assert quick == pytest.approx(0.1 * (4 << 20) / 0.04, rel=1e-3)
    for _ in range(40):
        thin = await lend(0.4)
    assert thin == pytest.approx(0.1 * (4 << 20) / 0.4, rel=1e-3)
    for _ in range(40):
        stuck = await lend(900.0)  # a reader that dawdles says nothing of our link
    assert stuck == pytest.approx(0.1 * (4 << 20), rel=1e-3)
