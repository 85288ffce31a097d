"""The rules of pacing on a link that is computed: a queue grows by what exceeds the link's rate."""

from __future__ import annotations

import statistics
from collections import deque
from dataclasses import dataclass, field
from math import inf

import pytest

from peer.net.flow.flow import BEAT_S
from peer.net.flow.pacing import BEATS, RATE_MIN, TRIAL_S, UNPACED_S, FlowPace

MBIT = 1e6 / 8


@dataclass
class Link:
    """A link that bulk fills as far as its pace allows, and the pace of a flow over it."""

    rate: float = 100 * MBIT
    base_s: float = 0.0004
    queue_s: float = 0.012
    """Of a link that is full."""
    foreign: bool = False
    """Somebody else's transfer keeps the queue full, and takes half of the link or what ours leaves."""
    demand: float = inf
    """Of bulk, in bytes/s."""
    late: frozenset[int] = frozenset()
    """The numbers of beats that come late for another cause."""
    pace: FlowPace = field(default_factory=FlowPace)
    now: float = 1000.0
    beats: deque[float] = field(default_factory=lambda: deque(maxlen=32))
    passed: float = 0.0
    allowed: float = inf

    def run(self, seconds: float) -> list[float]:
        """Let the time pass; return the paces."""
        paces = []
        for number in range(round(seconds / BEAT_S)):
            self.now += BEAT_S
            bulk = min(self.demand, self.allowed, self.rate / 2 if self.foreign else self.rate)
            full = self.foreign or bulk > 0.9 * self.rate
            self.passed += bulk * BEAT_S
            self.beats.append(self.base_s + (self.queue_s if full else 0.0) + (0.2 if number in self.late else 0.0))
            self.allowed = self.pace.step(self.now, tuple(self.beats), int(self.passed))
            paces.append(self.allowed)
        return paces

    def idle(self, seconds: float) -> None:
        demand, self.demand = self.demand, 0.0
        self.run(seconds)
        self.demand = demand


def test_bulk_is_paced_below_the_link_and_the_queue_goes() -> None:
    link = Link()
    link.idle(3.0)
    paces = link.run(60.0)
    assert paces[0] == inf
    settled = paces[len(paces) // 2 :]
    assert 0.7 * link.rate < statistics.median(settled) < link.rate
    assert statistics.median(link.beats) < 0.0024


def test_nothing_is_cut_before_bulk_has_run_for_a_second() -> None:
    link = Link()
    link.idle(3.0)
    assert set(link.run(0.9)) == {inf}
    assert min(link.run(1.0)) < inf


def test_the_pace_never_falls_below_half_of_the_highest_rate() -> None:
    link = Link()
    link.idle(3.0)
    link.run(30.0)
    link.queue_s, link.foreign = 0.050, True
    assert min(link.run(10.0)) >= 0.5 * link.rate - 1


def test_the_pace_rises_with_the_link() -> None:
    link = Link(rate=10 * MBIT)
    link.idle(3.0)
    link.run(20.0)
    link.rate = 100 * MBIT
    assert link.run(30.0)[-1] > 70 * MBIT


def test_a_queue_of_somebody_else_is_given_up_and_tried_again_after_half_a_minute() -> None:
    link = Link()
    link.idle(3.0)
    link.foreign = True
    paces = link.run(6.0)
    assert inf in paces[paces.index(min(paces)) :]  # cut in vain, then unpaced
    assert set(link.run(UNPACED_S - 6.0)) == {inf}
    assert min(link.run(10.0)) < inf
    link.foreign = False
    link.run(2 * UNPACED_S)
    assert statistics.median(link.beats) < 0.0024  # then it is ours again


def test_late_beats_cut_nothing() -> None:
    link = Link(demand=50 * MBIT, late=frozenset(range(0, 400, 3)))
    link.idle(3.0)
    assert set(link.run(60.0)) == {inf}


def test_a_flow_that_opens_beside_bulk_finds_its_round_trip() -> None:
    link = Link()
    paces = link.run(30.0)
    assert min(paces) >= 0.5 * link.rate - 1
    assert 0.7 * link.rate < paces[-1] < link.rate
    assert statistics.median(link.beats) < 0.0024


def test_the_base_is_that_of_the_last_minutes() -> None:
    link = Link(demand=50 * MBIT)
    link.idle(3.0)
    link.base_s = 0.060  # another way, which no pace makes shorter
    first = link.run(20.0)
    assert min(first) < inf
    link.run(6 * 60.0)
    assert link.run(60.0)[-1] == inf or min(link.run(60.0)) > 50 * MBIT


@pytest.mark.parametrize("demand", [RATE_MIN / 2, 0.0])
def test_slow_transfers_are_left_alone(demand: float) -> None:
    link = Link(demand=demand)
    link.idle(3.0)
    link.base_s = 0.060
    assert set(link.run(20.0)) == {inf}


def test_a_flow_without_beats_paces_nothing() -> None:
    pace = FlowPace()
    steps = [pace.step(number * BEAT_S, (0.5,) * (BEATS - 1), 10_000_000 * number) for number in range(50)]
    assert set(steps) == {inf}
    assert TRIAL_S < UNPACED_S
