"""Every chunk is delivered exactly once, whatever the donors do, in any order."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from peer.checkpoint.hash_tree import StateTree, hash_state
from swarm.state.chunk_scheduler import ASKS_PER_CHUNK, SHARE_GRACE_S, Ask, ChunkScheduler, Donor

TREE = hash_state([torch.zeros(16 * 12_345)])


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def tree_of(chunks: int) -> StateTree:
    return StateTree(1, chunks, tuple(bytes(32) for _ in range(chunks)))


@settings(deadline=None)
@given(st.integers(1, 40), st.integers(1, 4), st.randoms(use_true_random=False))
def test_every_chunk_is_delivered_once(chunks: int, count: int, dice: object) -> None:
    """Donors take, deliver and fail in random order; one of them never fails."""
    clock = Clock()
    scheduler = ChunkScheduler(tree_of(chunks), range(chunks), clock)
    donors = [Donor(str(index)) for index in range(count)]
    under_way: list[Ask] = []
    for _ in range(10_000):
        if scheduler.finished.is_set():
            break
        clock.now += 0.2
        donor = dice.choice(donors)  # type: ignore[attr-defined]
        ask = scheduler.take(donor, donors)
        if ask is not None:
            assert all(other.donor is not donor or other.index != ask.index for other in under_way)
            under_way.append(ask)
            assert sum(other.index == ask.index for other in under_way) <= ASKS_PER_CHUNK
        if under_way:
            ask = under_way.pop(dice.randrange(len(under_way)))  # type: ignore[attr-defined]
            if ask.donor is donors[0] or dice.random() < 0.3:  # type: ignore[attr-defined]
                scheduler.deliver(ask)
            scheduler.settle(ask)
    assert scheduler.finished.is_set()
    assert sum(donor.chunks for donor in donors) == chunks == sum(donor.bytes for donor in donors)


def test_the_last_chunk_of_a_frozen_donor_is_asked_for_elsewhere() -> None:
    """Otherwise the fetch would never end: the other donors have no chunk left to deliver."""
    clock = Clock()
    scheduler = ChunkScheduler(tree_of(4), range(4), clock)
    good, frozen = Donor("good"), Donor("frozen")
    stuck = scheduler.take(frozen, [good, frozen])
    assert stuck is not None
    clock.now = SHARE_GRACE_S
    for _ in range(3):
        ask = scheduler.take(good, [good, frozen])
        assert ask is not None and ask.index != stuck.index
        clock.now += 0.1
        scheduler.deliver(ask)
        scheduler.settle(ask)
    ask = scheduler.take(good, [good, frozen])
    assert ask is not None and ask.index == stuck.index
    scheduler.deliver(ask)
    assert scheduler.finished.is_set() and stuck.scope.cancel_called


def test_a_chunk_just_asked_for_is_not_asked_for_again() -> None:
    clock = Clock()
    scheduler = ChunkScheduler(tree_of(1), range(1), clock)
    one, two = Donor("one"), Donor("two")
    assert scheduler.take(one, [one, two]) is not None
    assert scheduler.take(two, [one, two]) is None


@pytest.mark.parametrize("chunks", [2, 3, 5])
def test_a_small_state_is_shared_by_two_donors(chunks: int) -> None:
    clock = Clock()
    scheduler = ChunkScheduler(tree_of(chunks), range(chunks), clock)
    quick, slow = Donor("quick"), Donor("slow")
    while (ask := scheduler.take(quick, [quick, slow])) is not None:
        scheduler.deliver(ask)
        scheduler.settle(ask)
    assert not scheduler.finished.is_set()  # the rest is left to the other donor, for a moment
    assert scheduler.take(slow, [quick, slow]) is not None
    clock.now = SHARE_GRACE_S
    assert chunks == 2 or scheduler.take(quick, [quick, slow]) is not None


def test_deadlines_grow_with_failures_and_follow_what_a_chunk_takes() -> None:
    donor = Donor("d")
    first = donor.deadline_s
    donor.took(1.0)
    assert 1.0 < donor.deadline_s < first
    usual = donor.deadline_s
    donor.failures = 2
    assert donor.deadline_s == 4 * usual


def test_pauses_and_deadlines_of_a_failing_donor_are_capped() -> None:
    donor = Donor("dead", failures=100_000)
    assert donor.deadline_s == Donor("dead", failures=10).deadline_s == 120.0
    assert min(0.5 * donor.backoff, 8.0) == 8.0  # as `swarm.state.chunk_fetch` pauses
