"""Which stage a peer takes, and whether it moves: pure functions of all records."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm.membership.member_record import MemberRecord
from swarm.membership.membership import REFRESH_S
from swarm.placement.load import PeerLoad, StageCost
from swarm.placement.rebalance import RebalanceConfig
from swarm.placement.stage_choice import (
    CHOOSING,
    Mover,
    at_work,
    exceeds_move_limit,
    has_other_replica,
    is_resting,
    load_of,
    ready_after_s,
    replicas_of,
    should_return,
    stage_to_take,
    view_of,
    why_none_fits,
)

NOW = 1_800_000_000.0
COSTS = (StageCost(100.0, 1e6, 10.0), StageCost(100.0, 1e6, 10.0), StageCost(100.0, 1e6, 10.0))
LONG_AGO = NOW - 10_000.0


def record(stage: int, **changes: object) -> MemberRecord:
    fields: dict[str, object] = {
        "session": "s", "name": "n", "role": "stage", "version": "v", "addresses": [], "term": 1, "round": 1,
        "head": b"h" * 32, "state_hash": b"s" * 32, "members": 1, "phase": "training", "speed": 1.0, "loss": None,
        "val_loss": None, "tokens": 0, "bytes_up": 0, "bytes_down": 0, "joined_at": LONG_AGO, "at": NOW,
        "stage": stage, "service_s": 0.1, "since": LONG_AGO, "ready_at": LONG_AGO,
    }  # fmt: skip
    return MemberRecord(**{**fields, **changes})  # type: ignore[arg-type]


def joiner(peer: str = "me", memory_bytes: float = math.inf) -> PeerLoad:
    return PeerLoad(peer, -1, 0.0, memory_bytes=memory_bytes)


def moves(records: dict[str, MemberRecord], now_s: float = NOW) -> dict[str, int]:
    """Return the moves that would start if all peers read these records."""
    found = {peer: Mover(peer, COSTS).due(records, now_s) for peer in records}
    return {peer: move.target for peer, move in found.items() if move is not None}


def test_joiner_takes_the_slowest_stage() -> None:
    records = {"a": record(0), "b": record(1), "c": record(2), "d": record(0), "e": record(2)}
    assert stage_to_take(joiner(), records, COSTS, NOW, kept=()) == 1


@settings(deadline=None)
@given(st.lists(st.text("abcdef", min_size=4, max_size=8), min_size=3, max_size=9, unique=True))
def test_concurrent_joiners_spread_out(peers: list[str]) -> None:
    records = {peer: record(-1, phase=CHOOSING, service_s=0.0) for peer in peers}
    chosen = []
    for peer in peers:
        others = {other: seen for other, seen in records.items() if other != peer}
        stage = stage_to_take(joiner(peer), others, COSTS, NOW, kept=())
        assert stage is not None
        chosen.append(stage)
    counts = [chosen.count(stage) for stage in range(3)]
    assert max(counts) - min(counts) <= 1


def test_restarted_peer_prefers_its_old_empty_stage() -> None:
    records = {"a": record(0), "b": record(2, service_s=10.0)}
    assert stage_to_take(joiner(), records, COSTS, NOW, kept=(1,)) == 1
    assert stage_to_take(joiner(), records, COSTS, NOW, kept=(0,)) == 1, "its own is held: where it is worth most"
    assert stage_to_take(joiner(), {}, COSTS, NOW, kept=(2, 0)) == 2, "the one it held last"


def test_a_restarted_peer_goes_back_to_its_last_stage_unless_one_is_empty() -> None:
    """Its group counts on its vote: with those of a stage that all went elsewhere, that stage waited for ever."""
    held = {"a": record(0), "b": record(1), "c": record(2, service_s=10.0)}
    assert stage_to_take(joiner(), held, COSTS, NOW, kept=()) == 2
    assert stage_to_take(joiner(), held, COSTS, NOW, kept=(0, 2), last=0) == 0
    held.pop("c")
    assert stage_to_take(joiner(), held, COSTS, NOW, kept=(0,), last=0) == 2
    assert stage_to_take(joiner(), held, COSTS, NOW, kept=(0, 2), last=0) == 2


def test_too_large_stage_is_not_taken() -> None:
    costs = (StageCost(100.0, 0.0, 10.0), StageCost(100.0, 0.0, 99.0))
    assert stage_to_take(joiner(memory_bytes=50.0), {"a": record(0)}, costs, NOW, kept=(1,)) == 0
    assert stage_to_take(joiner(memory_bytes=5.0), {"a": record(0)}, costs, NOW, kept=()) is None


def test_feeders_and_the_coordinator_are_no_replicas() -> None:
    records = {"a": record(0), "f": record(-1, role="feeder"), "c": record(-1, role="coordinator")}
    assert [load.peer for load in view_of(NOW, records, COSTS).peers] == ["a"]


def test_one_peer_takes_an_empty_stage_at_once() -> None:
    records = {"a": record(0), "b": record(0), "c": record(0), "d": record(1), "e": record(1)}
    assert list(moves(records).values()) == [2]


def test_the_last_replica_of_a_stage_stays() -> None:
    assert moves({"a": record(0), "b": record(1)}) == {}
    replacement_on_its_way = {"a": record(0), "x": record(0, ready_at=NOW + 60, source=1), "b": record(1)}
    assert not has_other_replica("a", 0, replacement_on_its_way, NOW)
    assert "a" not in moves(replacement_on_its_way)


def test_peer_in_flight_does_not_serve_and_blocks_others() -> None:
    records = {"a": record(0), "b": record(0), "c": record(1), "d": record(1)}
    assert len(moves(records)) == 1
    (mover, target), *_ = moves(records).items()
    under_way = {**records, mover: record(target, source=records[mover].stage, since=NOW, ready_at=NOW + 30)}
    assert at_work(2, under_way, NOW) == {} and moves(under_way) == {}
    assert set(at_work(2, under_way, NOW + 31)) == {mover}


def test_mover_returns_if_its_old_stage_is_lost() -> None:
    away = {"source": 1, "since": NOW - 3, "ready_at": NOW + 10}
    records = {"a": record(0), "b": record(1), "c": record(0, **away), "d": record(2)}
    assert not should_return("c", records, NOW), "b is still there"
    del records["b"]
    assert should_return("c", records, NOW)
    assert not should_return("c", records, NOW + 11), "it has arrived"
    assert not should_return("a", records, NOW)
    assert [p for p in "ce" if should_return(p, records | {"e": record(2, **away)}, NOW)] == ["c"], "one of several"
    assert not should_return("c", records | {"f": record(1, source=2, ready_at=NOW + 9)}, NOW), "another peer comes"
    assert not should_return("c", {"c": records["c"], "d": record(2)}, NOW), "its new stage has no replica, either"


def test_slow_stage_gets_one_peer_a_period() -> None:
    rich = {f"a{i}": record(0) for i in range(6)}
    records = {**rich, "b": record(1), **{f"c{i}": record(2) for i in range(4)}}
    assert list(moves(records).values()) == [1]
    (peer,) = moves(records)
    mover = Mover(peer, COSTS)
    period_s = RebalanceConfig().period_s(len(records))
    began = math.ceil(NOW / period_s) * period_s
    assert mover.due(records, began) is not None
    assert mover.due(records, began + period_s / 2) is None, "decided already"
    assert any(mover.due(records, began + k * period_s) for k in range(1, 50)), "not without end"
    fresh = {peer: record(seen.stage, since=NOW - 10) for peer, seen in records.items()}
    assert moves(fresh) == {}


def test_pinned_replica_does_not_move() -> None:
    records = {f"a{i}": record(0, pinned=i != 3) for i in range(6)} | {"b": record(1), "c": record(2), "d": record(2)}
    period_s = RebalanceConfig().period_s(len(records))
    at = next(NOW + k * period_s for k in range(50) if not is_resting("a3", math.floor(NOW / period_s) + k))
    assert list(moves(records, at)) == ["a3"]


def test_peer_that_does_not_move_is_passed_over() -> None:
    records = {f"a{i}": record(0) for i in range(6)} | {"b": record(1), "c": record(2)}
    period_s = RebalanceConfig().period_s(len(records))
    chosen = [peer for k in range(20) for peer in moves(records, NOW + k * period_s)]
    assert len(chosen) == 20 and len(set(chosen)) > 1


FOREVER = {"source": 0, "ready_at": 1e18}


@pytest.mark.parametrize("since", [0.0, 1e18, NOW + 1e4, NOW - 1.0])
def test_endless_move_blocks_for_a_few_periods(since: float) -> None:
    records = {f"a{i}": record(0) for i in range(6)} | {"b": record(1), "c": record(2), "d": record(2)}
    period_s = RebalanceConfig().period_s(len(records) + 1)
    times = [NOW + k * period_s for k in range(20)]
    hostile = [{**records, "x": record(2, since=since and since + k * period_s, **FOREVER)} for k in range(20)]
    went = [peer for seen, now in zip(hostile, times, strict=True) for peer in moves(seen, now)]
    assert len(went) >= 2 if since == NOW - 1.0 else len(went) == 20
    me = {"a0": record(1, source=0, since=NOW, ready_at=NOW + 1e9)}
    stayed = [exceeds_move_limit("a0", seen | me, now) for seen, now in zip(hostile, times, strict=True)]
    assert not all(stayed) if since == NOW - 1.0 else not any(stayed)


def under_way(since: float, **changes: object) -> MemberRecord:
    return record(1, **{"source": 0, "since": since, "ready_at": since + 30.0, **changes})


def awake(*peers: str) -> float:
    """Return a time in whose period none of these peers rests."""
    period_s = RebalanceConfig().period_s(len(peers))
    first = math.ceil(NOW / period_s)
    return next(k * period_s for k in range(first, first + 50) if not any(is_resting(peer, k) for peer in peers))


def test_later_of_two_movers_stays() -> None:
    now = awake("a", "b")

    def surplus(a: float, b: float, **changes: object) -> list[str]:
        records = {"a": under_way(now - a), "b": under_way(now - b, **changes)}
        return [peer for peer in records if exceeds_move_limit(peer, records, now)]

    assert surplus(1.0, 0.5) == ["b"] and surplus(0.5, 1.0) == ["a"]
    assert surplus(1.0, 1.0) == ["b"], "by peer id"
    assert surplus(1.0, 2.0, ready_at=now) == [], "it has arrived"
    assert surplus(1.0, 2.0, source=-1) == [], "it has just joined"
    assert not exceeds_move_limit("a", {"b": under_way(now - 9)}, now), "our own word is not out yet"


def test_large_swarm_allows_a_few_movers() -> None:
    peers = [f"p{number}" for number in range(4)]
    now = awake(*peers)
    records = {peer: under_way(now - 9 + number) for number, peer in enumerate(peers)}
    config = RebalanceConfig(peers_a_flight=2)
    assert [peer for peer in peers if exceeds_move_limit(peer, records, now, config)] == peers[2:]


def test_speed_belongs_to_the_stage_of_its_measurement() -> None:
    costs = (StageCost(100.0), StageCost(300.0))
    assert load_of("a", record(1, service_s=0.5), costs).speed == 600.0
    moving = record(1, service_s=0.5, source=0, ready_at=NOW + 5)
    assert load_of("a", moving, costs).speed == 200.0
    assert load_of("a", record(1, service_s=0.0), costs).speed == 0.0
    assert load_of("a", record(-1, service_s=0.5), costs).speed == 0.0


@pytest.mark.parametrize("rate, least, most", [(math.inf, 5.0, 60.0), (1e5, 15.0, 60.0)])
def test_time_out_is_download_and_start(rate: float, least: float, most: float) -> None:
    me = PeerLoad("me", 0, 1.0, download_bytes_s=rate)
    assert least <= ready_after_s(me, COSTS[0]) <= most
    assert least > REFRESH_S


WITH_TEXT = (StageCost(100.0, 1e6, 10.0, needs_text=True), COSTS[1], COSTS[2])


def test_peer_without_text_takes_a_later_stage() -> None:
    reader, other = joiner(), replace(joiner(), has_text=False)
    records = {"b": record(1), "c": record(2)}
    assert stage_to_take(reader, records, WITH_TEXT, NOW, kept=()) == 0
    assert stage_to_take(other, records, WITH_TEXT, NOW, kept=()) in (1, 2)
    assert stage_to_take(other, {}, WITH_TEXT, NOW, kept=(0, 2)) == 2, "nor for having held it"
    assert stage_to_take(other, {}, WITH_TEXT[:1], NOW, kept=()) is None


def test_joiner_without_a_fitting_stage_is_told_why() -> None:
    costs = (StageCost(100.0, 0.0, 1e9, needs_text=True), StageCost(100.0, 0.0, 4e9))
    small, other = joiner(memory_bytes=5e8), replace(joiner(memory_bytes=2e9), has_text=False)
    for me in (small, other):
        assert stage_to_take(me, {}, costs, NOW, kept=()) is None
    assert "no stage fits into 0.50 GB (the smallest needs 1.00 GB)" in why_none_fits(small, costs)
    assert "--data" in why_none_fits(other, costs) and "no stage fits" not in why_none_fits(other, costs)


def test_concurrent_joiners_consider_text() -> None:
    records = {peer: record(-1, phase=CHOOSING, service_s=0.0, has_text=peer == "c") for peer in "abc"}
    chosen = {}
    for peer, seen in records.items():
        others = {other: mate for other, mate in records.items() if other != peer}
        chosen[peer] = stage_to_take(replace(joiner(peer), has_text=seen.has_text), others, WITH_TEXT, NOW, kept=())
    assert chosen["c"] == 0 and sorted(str(chosen[peer]) for peer in "ab") == ["1", "2"]


def test_peer_without_text_does_not_move_to_stage_0() -> None:
    records = {"a": record(1, has_text=False), "b": record(1), "c": record(2), "d": record(2, has_text=False)}

    def movers() -> list[tuple[str, int]]:
        found = {peer: Mover(peer, WITH_TEXT).due(records, NOW) for peer in records}
        return [(peer, move.target) for peer, move in found.items() if move is not None]

    assert movers() == [("b", 0)]
    records |= {"b": record(1, service_s=1.0), "e": record(1, has_text=False)}  # slower than those that cannot move
    assert movers() == [("b", 0)]
    records |= {"b": record(1, has_text=False), "c": record(2, has_text=False)}
    assert movers() == []


def test_a_replica_that_cannot_be_dialled_gets_micro_batches_where_it_is_connected() -> None:
    records = {"a": record(1), "b": record(1, client=True), "c": record(1, client=True), "d": record(2)}
    assert set(replicas_of(1, records, NOW, {"c", "d"})) == {"a", "c"}
