"""The pure parts of gossip: pairing, sampling, norm checks and peer scores."""

from __future__ import annotations

from itertools import pairwise
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from peer.errors import ProtocolViolation, RoundDiscarded
from swarm.gossip.coding import Compared
from swarm.gossip.engine import SLOTS, draw
from swarm.gossip.norm_check import NormHistory
from swarm.gossip.pairing import (
    APART_MAX,
    PeerView,
    candidates,
    is_left_behind,
    round_after,
    round_after_alone,
    steps_for,
)
from swarm.gossip.peer_scores import MEMORY_S, PAUSE_MAX_S, PAUSE_S, PeerScores


def at(*rounds: int) -> dict[str, PeerView]:
    return {f"peer {i}": PeerView(number) for i, number in enumerate(rounds)}


def test_partners_are_drawn_evenly_and_the_distant_are_asked_last() -> None:
    random = Random(0)
    firsts = [candidates(at(10, 11, 9, 50), 10, (), random)[0] for _ in range(3000)]
    assert {name: firsts.count(name) > 900 for name in set(firsts)} == {f"peer {i}": True for i in range(3)}
    assert candidates(at(10, 50), 10, {"peer 0"}, random) == ["peer 1"]


@settings(deadline=None)
@given(st.integers(0, 1000), st.integers(-APART_MAX, APART_MAX), st.lists(st.integers(0, 2000), max_size=9))
def test_a_round_number_grows_with_the_median(mine: int, ahead: int, rounds: list[int]) -> None:
    others = at(*rounds)
    after = round_after(mine, mine + ahead, others)
    assert mine < after <= mine + APART_MAX + 1
    if rounds and max(rounds) <= mine:
        assert after == mine + 1  # the partner's claim alone does not count
    alone = round_after_alone(mine, others)
    assert mine <= alone <= mine + 1
    if not others:
        assert alone == mine + 1


def test_a_peer_alone_does_not_run_away_from_the_others() -> None:
    mine = 0
    for _ in range(100):
        mine = round_after_alone(mine, at(3, 3, 3))
    assert mine == 3 + APART_MAX


def test_only_a_majority_can_leave_a_peer_behind() -> None:
    assert is_left_behind(0, at(5, 6)) and not is_left_behind(0, at(4, 4))
    assert not is_left_behind(0, at(1, 1, 1 << 40)) and not is_left_behind(0, {})


def test_slower_peers_do_fewer_steps_and_claims_are_capped() -> None:
    fast, slow = {"a": PeerView(0, 10.0)}, {"a": PeerView(0, 5.0)}
    assert steps_for(5.0, fast, 40) == 20 and steps_for(10.0, slow, 40) == 40
    assert steps_for(0.0, fast, 40) == 40 and steps_for(5.0, {}, 40) == 40
    claim = {"a": PeerView(0, 5.0), "b": PeerView(0, 1e8), "c": PeerView(0, float("nan"))}
    assert steps_for(5.0, claim, 40) == 10


def test_samples_are_drawn_once_and_rarely_shared() -> None:
    draws, count = 2000, 8
    drawn = [[draw("run", peer, n, count)[0] for n in range(draws)] for peer in ("a", "b")]
    for mine in drawn:
        assert all(last - first == count for first, last in mine)
        assert all(a[1] <= b[0] for a, b in pairwise(mine))
    both = len(set(drawn[0]) & set(drawn[1]))
    assert both < 4 * draws / SLOTS
    assert draw("run", "a", 7, count) == draw("run", "a", 7, count) != draw("another run", "a", 7, count)


def test_failures_cost_seconds_and_three_penalties_an_hour() -> None:
    now = 0.0
    scores = PeerScores(lambda: now)
    scores.failed("a")
    assert scores.avoids("a") and not scores.avoids("b")
    now = PAUSE_S
    assert not scores.avoids("a")
    for _ in range(20):
        scores.failed("a")
    now += PAUSE_MAX_S
    assert not scores.avoids("a"), "a peer that only fails is never banned"
    scores.fine("a")
    scores.failed("a")
    now += PAUSE_S
    assert not scores.avoids("a")
    for _ in range(3):
        scores.penalize("b")
    now += MEMORY_S - 1
    assert scores.avoids("b")
    now += 2
    assert not scores.avoids("b")


def told(delta: float = 1.0, phi: float = 10.0, distance: float = 1.0) -> Compared:
    return Compared(my_phi=10.0, my_delta=1.0, phi=phi, delta=delta, distance=distance)


def test_a_partners_norms_are_compared_with_our_own() -> None:
    norms = NormHistory(10)
    for _ in range(4):
        norms.own.append(1.0)
        norms.check(told(), 10, 0)
        norms.distances.append(told().distance)
    for lie in (told(delta=3.1), told(delta=1e-3), told(phi=31.0), told(phi=3.0), told(phi=float("nan"))):
        with pytest.raises(ProtocolViolation):
            norms.check(lie, 10, 0)
    with pytest.raises(RoundDiscarded):  # it may be us
        norms.check(told(distance=3.1), 10, 0)
    norms.check(told(delta=3.1), 5, 0)  # a peer that did half the steps expects longer ones
    norms.check(told(delta=5.9), 10, 1)  # and so does a peer a round behind, in a warm-up


def test_zero_deltas_are_accepted_where_ours_are_zero() -> None:
    norms = NormHistory(10)
    norms.own.append(0.0)
    norms.check(told(delta=0.0), 10, 0)
    with pytest.raises(ProtocolViolation):
        norms.check(told(delta=0.1), 10, 0)
