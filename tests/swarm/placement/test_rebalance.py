"""Rebalancing: predicted throughput never falls, no peer moves back and forth, all peers agree, moves are bounded."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import combinations, pairwise, product
from random import Random

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from peer.errors import ConfigError
from swarm.placement.costs import PartCost, split_layers
from swarm.placement.load import LoadView, PeerLoad, StageCost
from swarm.placement.rebalance import Move, RebalanceConfig, decide, stage_for_joiner, stages_for_joiners

LATER_S = 10_000.0  # long after every `since_s` below


def load(peer: int | str, stage: int, speed: float = 1.0, **more: float) -> PeerLoad:
    name = peer if isinstance(peer, str) else f"p{peer:03d}"
    return PeerLoad(name, stage, speed, 25e6, since_s=0.0, **more)  # type: ignore[arg-type]


def even(*replicas: int, state_bytes: float = 1e9) -> LoadView:
    """Return equal peers and stages, with so many replicas in each."""
    stages = [StageCost(1.0, state_bytes)] * len(replicas)
    peers = [stage for stage, count in enumerate(replicas) for _ in range(count)]
    return LoadView.of(LATER_S, stages, [load(i, stage) for i, stage in enumerate(peers)])


@st.composite
def views(draw: st.DrawFn, stages_max: int = 5, peers_max: int = 24) -> LoadView:
    costs = st.builds(StageCost, st.floats(0.5, 3.0), st.floats(0, 2e9))
    stages = draw(st.lists(costs, min_size=2, max_size=stages_max))
    peers = draw(
        st.lists(
            st.tuples(st.integers(0, len(stages) - 1), st.floats(0.2, 3.0), st.floats(1e6, 1e8)), max_size=peers_max
        )
    )
    loads = [PeerLoad(f"p{i:03d}", s, v, bandwidth, since_s=0.0) for i, (s, v, bandwidth) in enumerate(peers)]
    return LoadView.of(LATER_S, stages, loads)


def after(view: LoadView, moves: tuple[Move, ...], later_s: float, in_flight_s: float = 0.0) -> LoadView:
    """Return the view once the movers have announced their moves."""
    going = {move.peer: move for move in moves}
    return LoadView.of(
        view.now_s + later_s,
        view.stages,
        [
            replace(p, stage=m.target, source=m.source, since_s=view.now_s, ready_s=view.now_s + in_flight_s)
            if (m := going.get(p.peer))
            else p
            for p in view.peers
        ],
    )


def test_starved_stage_gets_a_peer_from_the_fastest() -> None:
    (move,) = decide(even(4, 1, 2))
    assert (move.source, move.target) == (0, 1)
    assert move.gain == pytest.approx(1.0)


def test_balanced_swarm_stays() -> None:
    assert decide(even(3, 3, 3)) == ()
    assert decide(even(4, 3, 3)) == ()  # the odd one helps no stage
    assert decide(even(1, 1)) == ()  # the last replica of a stage never leaves
    assert decide(even(2, 0, 0)) == ()  # one empty stage fewer, and still nothing runs
    assert decide(LoadView.of(0.0, [StageCost(1.0)], [load(0, 0)])) == ()
    assert decide(LoadView.of(0.0, [StageCost(1.0)] * 2, [])) == ()


def test_empty_stage_does_not_wait_for_other_moves() -> None:
    """A peer that cannot arrive while nothing is trained would block all moves."""
    view = even(3, 2, 2)
    elsewhere = after(view, (Move("p000", 0, 1, 1.0),), 30.0, in_flight_s=300.0)
    assert decide(elsewhere) == (), "no stage is empty"
    lost = LoadView.of(elsewhere.now_s, view.stages, [p for p in elsewhere.peers if p.stage != 2])
    (move,) = decide(lost)
    assert move.target == 2 and move.peer != "p000"
    assert decide(after(lost, (move,), 1.0, in_flight_s=60.0)) == (), "one is enough"


def test_empty_stage_is_filled_at_any_cost() -> None:
    view = even(3, 0, 1, state_bytes=1e12)  # 40,000 s of download
    fresh = LoadView.of(10.0, view.stages, [replace(p, since_s=5.0) for p in view.peers])
    (move,) = decide(fresh)
    assert (move.source, move.target) == (0, 1)


def test_two_slowest_stages_are_both_helped() -> None:
    view = even(6, 2, 2)  # no single move raises the minimum; two do
    first = decide(view)
    assert len(first) == 1 and first[0].source == 0
    second = decide(after(view, first, 60.0))
    assert len(second) == 1 and {first[0].target, second[0].target} == {1, 2}
    assert sorted(after(after(view, first, 60.0), second, 120.0).throughputs()) == [3, 3, 4]


def test_best_fitting_peer_moves() -> None:
    stages = [StageCost(1.0, 1e9)] * 2
    speeds = [load("a", 0, 8.0), load("b", 0, 2.0), load("c", 0, 1.0), load("d", 1, 4.0)]
    (move,) = decide(LoadView.of(LATER_S, stages, speeds))
    assert move.peer == "b"  # 9 | 6: "a" would leave 3 | 12, "c" 10 | 5
    equal = [load("a", 0), replace(load("b", 0), download_bytes_s=1e9), load("c", 0), load("d", 1)]
    (move,) = decide(LoadView.of(LATER_S, stages, [*equal, load("e", 0)]))
    assert move.peer == "b"


def test_move_must_pay_for_its_download() -> None:
    assert decide(even(5, 1, state_bytes=1e9)) != ()  # 40 s
    assert decide(even(5, 1, state_bytes=1e11)) == ()  # 4000 s: longer than anyone can foresee


def test_gain_within_the_noise_is_no_reason() -> None:
    stages = [StageCost(1.0, 1e6)] * 2
    random = Random(3)
    noisy = [load(i, i % 2, random.gauss(1.0, 0.05)) for i in range(100)]
    assert decide(LoadView.of(LATER_S, stages, noisy)) == ()


def test_new_replicas_stay_for_a_while() -> None:
    view = even(3, 1, 1)
    recent = [replace(p, since_s=LATER_S - 10.0) if p.stage == 0 else p for p in view.peers]
    assert decide(LoadView.of(LATER_S, view.stages, recent)) == ()


def test_move_in_flight_blocks_others_for_a_while() -> None:
    view = even(8, 1, 4)
    moves = decide(view)
    assert len(moves) == 1
    assert decide(after(view, moves, 10.0, in_flight_s=40.0)) == ()
    assert len(decide(after(view, moves, 50.0, in_flight_s=40.0))) == 1
    # One that never arrives, or lies about it, must not stop the swarm.
    assert len(decide(after(view, moves, 700.0, in_flight_s=1e9))) == 1


def test_joiners_in_flight_do_not_block() -> None:
    view = even(5, 1, 3)
    coming = [load(f"j{i}", 1, ready_s=LATER_S + 30) for i in range(2)]
    assert decide(LoadView.of(LATER_S, view.stages, [*view.peers, *coming])) == ()
    assert len(decide(LoadView.of(LATER_S, view.stages, [*view.peers, coming[0]]))) == 1


def test_large_swarm_moves_several_at_once() -> None:
    config = RebalanceConfig(peers_a_flight=50)
    moves = decide(even(300, 50, 50), config)
    assert len(moves) == 8 == config.flights(400)
    assert len({move.peer for move in moves}) == 8


def test_memory_limits_moves() -> None:
    stages = [StageCost(1.0), StageCost(1.0, memory_bytes=8e9)]
    small = [load(i, 0, memory_bytes=4e9) for i in range(3)]
    peers = [*small, load("big", 0, 0.9, memory_bytes=16e9), load("x", 1, 0.1)]
    (move,) = decide(LoadView.of(LATER_S, stages, peers))
    assert move.peer == "big"
    assert decide(LoadView.of(LATER_S, stages, [p for p in peers if p.peer != "big"])) == ()
    assert stage_for_joiner(LoadView.of(0.0, stages, peers), load("j", -1, memory_bytes=1e9)) == 0
    nowhere = [StageCost(1.0, memory_bytes=8e9)]
    assert stage_for_joiner(LoadView.of(0.0, nowhere, []), load("j", -1, memory_bytes=1e9)) is None


@settings(deadline=None, max_examples=100, suppress_health_check=[HealthCheck.filter_too_much])  # most views stay
@given(views())
def test_predicted_throughput_never_falls_and_no_stage_is_emptied(view: LoadView) -> None:
    moves = decide(view)
    assume(moves)
    before, then = view.throughputs(), after(view, moves, 60.0).throughputs()
    assert min(then) >= min(before)
    assert sorted(then) > sorted(before)  # the slowest first; this makes moves back and forth impossible
    during = list(before)
    for move in moves:
        mover = next(p for p in view.peers if p.peer == move.peer)
        assert mover.stage == move.source != move.target
        during[move.source] -= view.speed(mover) / view.stages[move.source].work
    assert min(during) >= min(before) - 1e-9  # the pipeline does not slow down while the mover downloads


@settings(deadline=None, max_examples=60)
@given(views(), st.booleans())
def test_moves_end_at_constant_speeds(view: LoadView, hasty: bool) -> None:
    config = RebalanceConfig(stay_s=0.0, noise=0.0, margin=0.0) if hasty else RebalanceConfig()
    levels = [sorted(view.throughputs())]
    arrangements = {tuple(p.stage for p in view.peers)}
    for _ in range(200):
        moves = decide(view, config)
        if not moves:
            break
        view = after(view, moves, 1000.0)
        levels.append(sorted(view.throughputs()))
        arrangement = tuple(p.stage for p in view.peers)
        assert arrangement not in arrangements
        arrangements.add(arrangement)
    else:
        pytest.fail("it never settles")
    assert levels == sorted(levels)


@settings(deadline=None, max_examples=100)
@given(views(), st.randoms(use_true_random=False))
def test_same_records_give_the_same_decision(view: LoadView, random: Random) -> None:
    shuffled = list(view.peers)
    random.shuffle(shuffled)
    assert decide(LoadView.of(view.now_s, view.stages, shuffled)) == decide(view)
    joiners = [load(f"j{i}", -1) for i in range(5)]
    assert stages_for_joiners(view, joiners) == stages_for_joiners(view, joiners[::-1])


@settings(deadline=None, max_examples=100)
@given(views(peers_max=16), st.integers(0, 15))
def test_moves_are_bounded_by_the_number_of_views(view: LoadView, missing: int) -> None:
    """Some peers have not read one record yet; each carries out only its own move."""
    stale = LoadView.of(view.now_s, view.stages, [p for i, p in enumerate(view.peers) if i != missing])
    starting = {m.peer for held in (view, stale) for m in decide(held)}
    assert len(starting) <= 2
    started = tuple(m for held in (stale, view) for m in decide(held))
    unique = tuple({m.peer: m for m in started}.values())
    then = after(view, unique, 1.0, in_flight_s=30.0)
    # And then all wait for them, unless another stage is empty still.
    assert decide(then) == () or not unique or 0.0 in then.throughputs()


def test_moves_under_churn_are_bounded() -> None:
    """Half an hour: every half minute a peer leaves or joins, and all speeds are measured again."""
    random = Random(7)
    view, moves_made, events = even(5, 5, 5), 0, 0
    for step in range(180):
        now_s = LATER_S + 10.0 * step
        peers = list(view.peers)
        if step % 3 == 0:
            events += 1
            if random.random() < 0.5 and len(peers) > 8:
                peers.pop(random.randrange(len(peers)))
            else:
                joiner = replace(load(f"j{step:03d}", -1), since_s=now_s)
                stage = stage_for_joiner(view, joiner)
                assert stage is not None
                peers.append(replace(joiner, stage=stage, ready_s=now_s + 40.0))
        peers = [replace(p, speed=random.gauss(1.0, 0.05)) for p in peers]
        view = LoadView.of(now_s, view.stages, peers)
        moves = decide(view)
        moves_made += len(moves)
        view = after(view, moves, 0.0, in_flight_s=40.0)
    assert 0 < moves_made <= events / 2
    counts = [sum(p.stage == s for p in view.peers) for s in range(3)]
    assert max(counts) - min(counts) <= 2


def test_joiners_take_the_slowest_stage_and_spread() -> None:
    view = even(4, 1, 2)
    assert stage_for_joiner(view, load("j", -1)) == 1
    together = stages_for_joiners(view, [load(f"j{i}", -1) for i in range(5)])
    assert [list(together.values()).count(s) for s in range(3)] == [0, 3, 2]


def test_unaware_joiners_break_ties_differently() -> None:
    taken = [stage_for_joiner(even(2, 2, 2, 2), load(f"j{i}", -1)) for i in range(200)]
    assert all(30 <= taken.count(stage) <= 70 for stage in range(4))


def test_exaggerated_speeds_are_not_believed() -> None:
    stages = [StageCost(1.0)] * 2
    peers = [load(i, i % 2) for i in range(6)]
    view = LoadView.of(LATER_S, stages, [*peers, load("claim", 0, 1e6), load("nan", 1, math.nan), load("new", 1, 0.0)])
    believed = {p.peer: view.speed(p) for p in view.peers}
    assert (believed["claim"], believed["nan"], believed["new"]) == (4.0, 1.0, 1.0)
    assert LoadView.of(0.0, stages, [load("a", 7), load("b", -1)]).peers == ()


def test_impossible_only_speed_is_ignored() -> None:
    stages = [StageCost(1.0)] * 2
    peers = [load("a", 0, 1e308), load("b", 0, 0.0), load("c", 0, 0.0), load("d", 1, 0.0)]
    view = LoadView.of(LATER_S, stages, peers)
    assert view.throughputs() == [3.0, 1.0]
    assert len(decide(view)) <= 1 and stage_for_joiner(view, load("joiner", 0, 0.0)) == 1


# Cutting the model into stages


@settings(deadline=None, max_examples=150)
@given(
    st.lists(st.builds(PartCost, st.integers(1, 9), st.integers(0, 9)), min_size=1, max_size=8),
    st.integers(1, 5),
    st.builds(PartCost, st.integers(0, 9), st.integers(0, 9)),
    st.builds(PartCost, st.integers(0, 9), st.integers(0, 9)),
    st.integers(5, 60),
)
def test_split_is_optimal(
    blocks: list[PartCost], stages: int, embedding: PartCost, head: PartCost, memory_max: int
) -> None:
    assume(stages <= len(blocks))

    def costs(bounds: tuple[int, ...]) -> tuple[float, float]:
        sums = []
        for field, (first, last) in product(("compute", "memory_bytes"), pairwise(bounds)):
            parts = [embedding] * (first == 0) + blocks[first:last] + [head] * (last == len(blocks))
            sums.append(sum(getattr(part, field) for part in parts))
        return max(sums[:stages]), max(sums[stages:])

    every = [costs((0, *cuts, len(blocks))) for cuts in combinations(range(1, len(blocks)), stages - 1)]
    allowed = [c for c in every if c[1] <= memory_max]
    if not allowed:
        with pytest.raises(ConfigError, match="or choose more stages"):
            split_layers(blocks, stages, embedding, head, memory_max)
        return
    found = split_layers(blocks, stages, embedding, head, memory_max)
    assert found[0][0] == 0 and found[-1][1] == len(blocks)
    assert all(a[1] == b[0] for a, b in pairwise(found))
    assert costs((0, *(last for _, last in found))) == min(allowed)


def test_heavy_head_gets_fewer_blocks() -> None:
    blocks = [PartCost(1.0)] * 12
    assert split_layers(blocks, 3) == ((0, 4), (4, 8), (8, 12))
    (_, _, (first, last)) = split_layers(blocks, 3, head=PartCost(3.0))
    assert last - first == 2


@pytest.mark.parametrize("stages", [0, 4])
def test_impossible_numbers_of_stages_are_refused(stages: int) -> None:
    with pytest.raises(ConfigError, match="choose 1 to 3"):
        split_layers([PartCost(1.0)] * 3, stages)
