"""A micro-batch counts at most once in a group, through retries, losses and merges."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from swarm.pipeline.accounting import SampleAccounting, micro_batches_of
from swarm.protocol.head import Head, genesis
from swarm.protocol.ledger import Ledger, Range, contains, count, overlaps

MICRO = 4


def head(epoch: int = 0, **ledger: Any) -> Head:
    return msgspec.structs.replace(genesis("group", b""), round=epoch, ledger=Ledger(**ledger))


def span(k: int) -> Range:
    return (MICRO * k, MICRO * (k + 1))


def counted(accounting: SampleAccounting, k: int, epoch: int = 0) -> bool:
    """Return whether a micro-batch that came in `epoch` was counted."""
    if accounting.verdict(span(k), epoch) != "count" or not accounting.begin(span(k), epoch):
        return False
    accounting.done(span(k))
    return True


@pytest.mark.parametrize(
    ("ahead", "local", "synchronous"),
    [
        (-2, "stale", "stale"),
        (-1, "count", "through"),
        (0, "count", "count"),
        (1, "count", "early"),
        (2, "early", "early"),
    ],
)
def test_verdict_by_epoch(ahead: int, local: str, synchronous: str) -> None:
    assert SampleAccounting(head(5), MICRO).verdict(span(0), 5 + ahead) == local
    assert SampleAccounting(head(5), MICRO, round_samples=32).verdict(span(0), 5 + ahead) == synchronous


def test_only_free_samples_count() -> None:
    accounting = SampleAccounting(
        head(cursor=40, returned=((8, 12),), promised=(("me", ((16, 20),)), ("you", ((20, 24),)))), MICRO, me="me"
    )
    assert [k for k in range(12) if accounting.may_count(span(k), 0)] == [2, 4, 10, 11]
    batch = SampleAccounting(head(cursor=40), MICRO, round_samples=8)
    assert [k for k in range(14) if batch.may_count(span(k), 0)] == [10, 11]


def test_first_copy_to_return_counts() -> None:
    accounting = SampleAccounting(head(), MICRO)
    assert accounting.begin(span(3), 0) and accounting.is_at(span(3))
    assert not accounting.begin(span(3), 0)
    accounting.undo(span(3))
    assert accounting.begin(span(3), 0)
    accounting.done(span(3))
    assert accounting.has(span(3)) and not accounting.begin(span(3), 0)
    assert accounting.counted == (span(3),)


def test_reset_settles_the_capture_and_keeps_the_rest() -> None:
    accounting = SampleAccounting(head(), MICRO)
    assert counted(accounting, 0) and counted(accounting, 1)
    assert accounting.capture() == ((0, 8),)
    assert counted(accounting, 2) and not counted(accounting, 0)
    assert accounting.capture() == ((0, 12),), "the round failed and is tried again"
    assert counted(accounting, 3)
    assert accounting.reset(head(1, cursor=8, returned=())) == ()
    assert accounting.counted == (span(3),)
    assert counted(accounting, 2, 1), "it was captured, and not merged"
    conflicts = accounting.reset(head(2, cursor=16))
    assert conflicts == ((8, 16),)


def test_lost_worker_has_counted_nothing() -> None:
    accounting = SampleAccounting(head(), MICRO)
    assert counted(accounting, 0) and accounting.begin(span(1), 0)
    assert accounting.forget() == (span(0),)
    accounting.done(span(1))  # the answer of a worker that is gone
    assert accounting.counted == () and counted(accounting, 0)


def test_synchronous_round_begins_empty() -> None:
    accounting = SampleAccounting(head(), MICRO, round_samples=16)
    assert counted(accounting, 0) and not counted(accounting, 4)
    accounting.capture()
    assert counted(accounting, 1)
    assert accounting.reset(head(1, cursor=16)) == ()
    assert accounting.counted == () and not counted(accounting, 1, 1) and counted(accounting, 4, 1)


def test_micro_batches_of() -> None:
    assert micro_batches_of([(0, 8), (16, 20)], MICRO) == [(0, 4), (4, 8), (16, 20)]
    for bad in ((1, 4), (0, 6), (4, 4), (8, 4)):
        with pytest.raises(ValueError, match="whole micro-batches"):
            micro_batches_of([bad], MICRO)


class Round:
    """Replicas of one group, and what it has merged so far."""

    def __init__(self, replicas: int, synchronous: bool) -> None:
        self.head = head()
        self.members = [SampleAccounting(self.head, MICRO, 32 if synchronous else None) for _ in range(replicas)]
        self.contributions: dict[int, tuple[Range, ...]] = {}
        self.merged: list[Range] = []

    def commit(self) -> None:
        """Merge as a leader does: a contribution that overlaps with earlier ones is left out."""
        chosen: dict[str, tuple[Range, ...]] = {}
        for k, ranges in self.contributions.items():
            assert self.head.ledger.is_free(ranges), "such a contribution is refused"
            if not overlaps({**chosen, str(k): ranges}) and ranges:
                chosen[str(k)] = ranges
        consumed = list(chosen.values())
        self.merged += [part for ranges in consumed for part in ranges]
        ledger = self.head.ledger.settle(list(self.contributions.values()), consumed)
        self.head = msgspec.structs.replace(self.head, round=self.head.round + 1, ledger=ledger)
        for member in self.members:
            if member.reset(self.head):
                member.forget()  # what it has counted cannot be told from what others had merged
        self.contributions = {}


STEPS = st.one_of(
    st.tuples(st.just("count"), st.integers(0, 3), st.integers(0, 24)),
    st.tuples(st.just("capture"), st.integers(0, 3), st.just(0)),
    st.tuples(st.just("lose"), st.integers(0, 3), st.just(0)),
    st.tuples(st.just("commit"), st.just(0), st.just(0)),
)


@settings(deadline=None, max_examples=200)
@given(st.lists(STEPS, max_size=60), st.booleans())
@example(
    [("count", 0, 0), ("count", 1, 0), ("capture", 0, 0), ("commit", 0, 0), ("capture", 1, 0), ("commit", 0, 0)], False
)
def test_nothing_is_merged_twice(steps: list[tuple[str, int, int]], synchronous: bool) -> None:
    """Any replica may be given any micro-batch, any number of times."""
    group = Round(4, synchronous)
    for what, k, number in steps:
        member = group.members[k]
        if what == "count":
            was = member.has(span(number))
            if counted(member, number, group.head.round):
                assert not was and not any(contains([part], [span(number)]) for part in group.merged)
        elif what == "capture":
            group.contributions[k] = member.capture()
        elif what == "lose":
            member.forget()
            group.contributions.pop(k, None)
        else:
            group.commit()
        assert count(member.counted) == MICRO * len(micro_batches_of(member.counted, MICRO))
    assert not overlaps({str(i): (part,) for i, part in enumerate(group.merged)})
