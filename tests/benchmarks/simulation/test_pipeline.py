"""The simulator: its accounts balance, runs repeat exactly, and the policies keep their promises."""

from __future__ import annotations

import csv
from itertools import pairwise, product
from pathlib import Path
from random import Random

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.pipelines import rebalance
from benchmarks.simulation.clock import VirtualClock
from benchmarks.simulation.fluid import FluidConfig, Optimum, simulate_fluid
from benchmarks.simulation.pipeline import Fault, PipelineReport, SimulationConfig, simulate_pipeline
from benchmarks.simulation.policies import Barnraise, NoRebalancing, SwarmPeriodic
from benchmarks.simulation.rounds import merge_s
from benchmarks.simulation.trace import Life, SpotMarket, Trace, read_trace, spot_trace
from peer.errors import ConfigError
from swarm.placement.load import LoadView, PeerLoad, StageCost
from swarm.placement.rebalance import RebalanceConfig, stage_for_joiner

WORK_S = 0.3  # of a micro-batch at one stage, at speed 1


def crew(*speeds: float, seconds: float = 120.0, link_bytes_s: float = 125e6) -> Trace:
    """Return a trace of peers that are there from the start and stay."""
    return Trace(seconds, tuple(Life(f"p{i:03d}", 0.0, None, v, link_bytes_s) for i, v in enumerate(speeds)))


def three_stages(**more: object) -> SimulationConfig:
    return SimulationConfig(tuple(StageCost(WORK_S, 2.5e8) for _ in range(3)), **more)  # type: ignore[arg-type]


def accounted(report: PipelineReport, in_flight: int = 32) -> bool:
    """Check that every dispatched micro-batch has completed once or is still in flight."""
    return report.dispatched - len(report.completed_s) == in_flight


def stages_of(config: SimulationConfig, trace: Trace) -> dict[str, int]:
    """Return the stages that the peers of a trace take, one after another."""
    loads: list[PeerLoad] = []
    for life in trace.lives:
        joiner = PeerLoad(life.peer, -1, life.speed, life.link_bytes_s)
        stage = stage_for_joiner(LoadView.of(0.0, config.stages, loads), joiner)
        assert stage is not None
        loads.append(PeerLoad(life.peer, stage, life.speed, life.link_bytes_s))
    return {load.peer: load.stage for load in loads}


def test_the_clock_keeps_the_order_of_time_and_of_scheduling() -> None:
    clock, seen = VirtualClock(), []
    clock.at(2.0, lambda: seen.append("b"))
    clock.at(1.0, lambda: seen.append("a"))
    clock.at(2.0, lambda: seen.append("c"))
    clock.at(2.0, lambda: clock.after(-5.0, lambda: seen.append("now")))
    clock.at(9.0, lambda: seen.append("never"))
    clock.run_until(5.0)
    assert (seen, clock.now_s) == (["a", "b", "c", "now"], 5.0)


# Every micro-batch


def test_calm_pipeline_is_near_its_limit() -> None:
    report = simulate_pipeline(crew(*[1.0] * 9), three_stages())
    assert report.throughput(20, 120) >= 0.88 * 3 / WORK_S
    assert report.retried == report.wasted == 0 and accounted(report)


def test_the_router_gives_each_replica_work_by_its_speed() -> None:
    speeds = [0.5, 1.0, 2.0]
    config = SimulationConfig((StageCost(WORK_S),), feeders=4, in_flight=6, latency_s=0.001)
    report = simulate_pipeline(crew(*speeds, seconds=300.0), config)
    total = sum(report.served.values())
    for peer, speed in zip(("p000", "p001", "p002"), speeds, strict=True):
        assert report.served[peer] / total == pytest.approx(speed / sum(speeds), rel=0.12)
    assert report.throughput(20, 300) >= 0.93 * sum(speeds) / WORK_S


def test_the_same_arguments_give_the_same_report() -> None:
    faults = [Fault(10, "p004", "freeze"), Fault(20, "p001", "kill")]
    trace, config = crew(*[1.0, 0.7] * 5, seconds=40.0), three_stages(rebalance=RebalanceConfig())
    assert simulate_pipeline(trace, config, faults) == simulate_pipeline(trace, config, faults)


@pytest.mark.parametrize(("kind", "pause_s"), [("kill", 3.0), ("freeze", 15.0)])
def test_others_carry_on_after_a_failure(kind: str, pause_s: float) -> None:
    trace, config = crew(*[1.0] * 9), three_stages()
    report = simulate_pipeline(trace, config, [Fault(60.0, "p004", kind)])  # type: ignore[arg-type]
    assert report.longest_pause_s(55, 120) < pause_s
    assert report.throughput(80, 120) >= 0.85 * 2 / WORK_S  # one stage has two replicas left
    assert report.retried > 0 and accounted(report)


def test_thawed_replica_is_used_again() -> None:
    trace, config = crew(*[1.0] * 6, seconds=240.0), three_stages()
    frozen = [Fault(60.0, "p002", "freeze")]
    thawed = simulate_pipeline(trace, config, [*frozen, Fault(90.0, "p002", "thaw")])
    assert thawed.throughput(180, 240) >= 1.6 * simulate_pipeline(trace, config, frozen).throughput(180, 240)
    assert accounted(thawed)


def test_peer_moves_in_after_two_deaths() -> None:
    trace = crew(*[1.0] * 12, seconds=400.0)
    config = three_stages(rebalance=RebalanceConfig(stay_s=30.0))
    doomed = [peer for peer, stage in stages_of(config, trace).items() if stage == 1][:3]
    faults = [Fault(60.0, peer, "kill") for peer in doomed]
    moved, stayed = (
        simulate_pipeline(trace, c, faults) for c in (config, three_stages())
    )  # 9 left: 4, 1, 4, while 3, 3, 3 is possible
    assert 2 <= moved.moves <= 3
    assert moved.throughput(250, 400) >= 0.8 * 3 / WORK_S
    assert moved.throughput(250, 400) >= 2 * stayed.throughput(250, 400)
    assert accounted(moved)


def test_run_resumes_with_a_joiner() -> None:
    lives = (*crew(*[1.0] * 3).lives, Life("late", 60.0, None, 1.0, 125e6))
    report = simulate_pipeline(Trace(180.0, lives), three_stages(in_flight=4), [Fault(30.0, "p001", "kill")])
    assert report.throughput(40, 60) == 0.0
    assert report.throughput(100, 180) >= 0.7 / WORK_S
    assert accounted(report, in_flight=8)


def test_churn_loses_no_micro_batch() -> None:
    random = Random(5)
    lives = [Life(f"p{i:03d}", 0.0, random.uniform(60, 3600), 1.0, 125e6) for i in range(12)]
    lives += [Life(f"q{i:03d}", t := random.uniform(1, 900), t + random.uniform(60, 1800)) for i in range(20)]
    trace = Trace(900.0, tuple(sorted(lives, key=lambda life: life.join_s)))
    report = simulate_pipeline(trace, three_stages(rebalance=RebalanceConfig(stay_s=60.0)))
    assert accounted(report)
    assert report.moves <= 20
    assert report.longest_pause_s(20, 900) < 30


def test_rounds_wait_for_every_micro_batch_and_for_the_merge() -> None:
    config = three_stages(batch=64, update_bytes=125e6)
    report = simulate_pipeline(crew(*[1.0] * 9), config)
    assert report.rounds >= 8
    assert report.merge_s / report.rounds == pytest.approx(2 * (2 / 3) * 1.0 + 0.04, rel=0.02)  # 2 S (N-1)/N / B
    assert report.dispatched - 64 * report.rounds in range(65)


@pytest.mark.parametrize(("links", "ideal_s"), [((1e6,), 0.0), ((1e6,) * 2, 1.0), ((1e6,) * 8, 1.75)])
def test_merge_time_is_a_butterflys(links: tuple[float, ...], ideal_s: float) -> None:
    assert merge_s(1e6, links) == pytest.approx(ideal_s, rel=0.01)


# Flows


@settings(deadline=None, max_examples=30)
@given(st.lists(st.sampled_from([0.5, 1.0, 2.0, 3.0]), min_size=1, max_size=3), st.integers(0, 6))
def test_the_optimum_is_the_best_of_all_assignments(works: list[float], peers: int) -> None:
    optimum = Optimum(works)
    if peers:
        optimum.add(2.0, peers)
    best = max(
        min(2.0 * assignment.count(s) / work for s, work in enumerate(works))
        for assignment in product(range(len(works)), repeat=peers)
    )
    assert optimum.throughput() == pytest.approx(best)
    optimum.add(1.0, 1)
    assert optimum.throughput() >= best if peers else True


def test_flow_by_hand() -> None:
    """Two stages and three peers, one of which dies at 100 s."""
    lives = (Life("a", 0.0), Life("b", 0.0), Life("c", 0.0, 100.0), Life("d", 150.0, None, 1.0, 1e7))
    config = FluidConfig((StageCost(1.0, 5e8), StageCost(1.0, 5e8)), speed_error=0.0)
    report = simulate_fluid(Trace(300.0, lives), Barnraise(), config)
    assert report.percent_of_optimal() == 100.0  # a and b are in different stages; c and d are spare
    assert report.moves == 0 and report.joins == 1
    assert report.peer_seconds == pytest.approx(300 + 300 + 100 + 150)
    none = simulate_fluid(Trace(300.0, (Life("a", 0.0), Life("b", 0.0, 100.0), lives[3])), Barnraise(), config)
    # b's stage is empty from 100 s; d starts at 150 s and has its state at 200 s, for the optimum too.
    assert [(t, x) for t, x, _ in none.pieces if t in (0.0, 100.0, 200.0)][-1] == (200.0, 1.0)
    assert none.percent_of_optimal(100.0, 200.0) == 0.0


def test_rebalancing_beats_its_rivals() -> None:
    trace = spot_trace(3, SpotMarket(wanted=120, hours=6.0))
    config = FluidConfig(tuple(StageCost(1.0, 1.2e9) for _ in range(6)))
    none, periodic, ours = (
        simulate_fluid(trace, policy, config) for policy in (NoRebalancing(), SwarmPeriodic(300.0), Barnraise())
    )
    assert ours.percent_of_optimal() > periodic.percent_of_optimal() > none.percent_of_optimal()
    assert ours.moves <= ours.joins + 120


# Traces


@pytest.mark.parametrize("suffix", [".csv", ".json"])
def test_traces_survive_a_file(tmp_path: Path, suffix: str) -> None:
    trace = spot_trace(1, SpotMarket(wanted=10, hours=2.0, speed_spread=0.3))
    path = tmp_path / f"trace{suffix}"
    if suffix == ".json":
        path.write_bytes(msgspec.json.encode({"duration_s": trace.duration_s, "peers": trace.lives}))
    else:
        with path.open("w", newline="") as file:
            rows = csv.writer(file)
            rows.writerow(Life.__struct_fields__)
            rows.writerows(msgspec.structs.astuple(life) for life in trace.lives)
    assert read_trace(path).lives == trace.lives


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("t.csv", "peer,join_s\na,soon\n"),
        ("t.csv", "peer,join_s,leave_s\na,5,3\n"),
        ("t.csv", "peer,join_s,leave_s\na,1,3\na,4,5\n"),
        ("t.csv", "peer,join_s\n"),
        ("t.json", '{"duration_s": 10}'),
        ("t.json", '{"duration_s": 10, "peers": [{"peer": "a", "join_s": 0, "speed": -1}]}'),
        ("none.csv", None),
    ],
)
def test_bad_traces_are_refused(tmp_path: Path, name: str, text: str | None) -> None:
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match="trace"):
        read_trace(tmp_path / name)


def test_the_spot_market_is_rough_clustered_and_repeatable() -> None:
    trace = spot_trace(0)
    assert trace == spot_trace(0) != spot_trace(1)
    assert trace.duration_s == 32 * 3600 and trace.alive(0.0) == 400
    alive = [trace.alive(600.0 * i) for i in range(193)]
    assert min(alive) < 60 and sum(b > a + 10 for a, b in pairwise(alive)) >= 5
    leaving = sorted(life.end_s for life in trace.lives if life.leave_s is not None)
    gaps = [b - a for a, b in pairwise(leaving)]
    usual = sum(gaps) / len(gaps)
    # Independent deaths would have exponential gaps, of which 63 percent are below their mean; clustered ones more.
    assert sum(gap < usual for gap in gaps) / len(gaps) > 0.75


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--seeds", "0"], "at least one seed"),
        (["--stages", "0"], "one stage"),
        (["--trace", "/nowhere.csv"], "/nowhere.csv"),
    ],
)
def test_benchmark_replays_a_trace_or_reports_why_not(
    arguments: list[str], words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["rebalance.py", *arguments])
    with pytest.raises(SystemExit) as ended:
        rebalance.main()
    assert ended.value.code == 2 and words in capsys.readouterr().err
