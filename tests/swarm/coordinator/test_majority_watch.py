"""The timers behind a regroup."""

from __future__ import annotations

from swarm.coordinator.majority_watch import MajorityWatch
from swarm.coordinator.rules import RegroupTimeouts

WAITS = RegroupTimeouts(gone_s=6.0, strangers_s=600.0)


def test_a_missing_majority_is_timed_from_its_first_notice() -> None:
    watch = MajorityWatch(WAITS)
    assert watch.missing_s(100.0) is None
    assert watch.missing_s(103.0) == 3.0 and watch.missing_s(107.5) == 7.5


def test_a_majority_that_returns_starts_the_time_again() -> None:
    watch = MajorityWatch(WAITS)
    watch.missing_s(100.0)
    watch.gathered()
    assert watch.missing_s(110.0) is None and watch.missing_s(111.0) == 1.0


def test_an_unheard_majority_is_left_after_its_time() -> None:
    watch = MajorityWatch(WAITS)
    assert [watch.may_leave(now) for now in (50.0, 55.9, 56.0, 60.0)] == [False, False, True, True]
    watch.heard()
    assert [watch.may_leave(now) for now in (61.0, 66.9, 67.0)] == [False, False, True]


def test_a_majority_may_be_missing_and_heard() -> None:
    """Its members answer, but are at different heads."""
    watch = MajorityWatch(WAITS)
    watch.missing_s(10.0)
    watch.heard()
    assert watch.missing_s(12.0) == 2.0


def test_strangers_count_once_known_peers_are_long_silent() -> None:
    watch = MajorityWatch(WAITS)
    watch.known_answered(1000.0)
    assert not watch.trusts_strangers(1600.0) and watch.trusts_strangers(1600.1)
    watch.known_answered(1601.0)
    assert not watch.trusts_strangers(2200.0)
