"""Rebalancing on preemption traces, in the simulator: none, SWARM's algorithm 2 every 300 s and 60 s, and ours.

    python benchmarks/pipelines/rebalance.py [--trace FILE] [--seeds 3] [--stages 6] [--json [FILE]]

Percent of the throughput of an optimal assignment of the machines alive (perfect views, free moves), overall and in the
first and last hour. Without `--trace`, traces are generated (`benchmarks.simulation.trace.SpotMarket`: 400 preemptible
T4-like instances over 32 hours, tightening; equal speeds, 200 Mbit/s). SWARM (arXiv 2301.11913) reports about 83
without, 96 every 300 s and 98 every 60 s overall, on a trace of its own that was not published; quoted from memory.
The rivals have an advantage: joiners see fresh views, queues rank stages without error.

The second table has the cost of a decision, and what a peer sends and reads, for 10 to 10,000 peers in an hour of heavy
churn.

Exits with 1 if ours stays below 98 percent overall, or behind a rival, on any generated trace.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.common.options import add_json, write_results  # noqa: E402
from benchmarks.simulation.fluid import FluidConfig, simulate_fluid  # noqa: E402
from benchmarks.simulation.policies import Barnraise, NoRebalancing, Policy, SwarmPeriodic  # noqa: E402
from benchmarks.simulation.trace import SpotMarket, Trace, read_trace, spot_trace  # noqa: E402
from peer.errors import ConfigError  # noqa: E402
from swarm.placement.load import StageCost  # noqa: E402

BAR = 98.0
# A stage of SWARM's model, 201 million parameters shared by its blocks: 4 bytes of weights and 2 of 8-bit moments each.
STATE_BYTES = 1.2e9
RECORD_BYTES = 250  # a signed record: key, stage, speed, times, signature
SIZES = (10, 100, 1_000, 10_000)


def policies() -> list[Policy]:
    return [NoRebalancing(), SwarmPeriodic(300.0), SwarmPeriodic(60.0), Barnraise()]


def replay(trace: Trace, policy: Policy, stages: int, seed: int) -> dict[str, Any]:
    config = FluidConfig(tuple(StageCost(1.0, STATE_BYTES) for _ in range(stages)), seed=seed)
    report = simulate_fluid(trace, policy, config)
    return {
        "overall": report.percent_of_optimal(),
        "first_hour": report.percent_of_optimal(0.0, 3600.0),
        "last_hour": report.percent_of_optimal(trace.duration_s - 3600.0),
        "moves": report.moves,
        "joins": report.joins,
    }


def compare(name: str, trace: Trace, stages: int, seed: int) -> dict[str, Any]:
    alive = [trace.alive(3600.0 * hour) for hour in range(int(trace.duration_s // 3600) + 1)]
    print(f"\n{name}: {len(trace.lives)} lives, {stages} stages, alive by the hour {min(alive)} to {max(alive)}")
    print(f"{'rebalancing':14}{'overall':>9}{'1st hour':>10}{'last hour':>11}{'moves':>8}{'joins':>8}")
    found = {}
    for policy in policies():
        row = found[policy.name] = replay(trace, policy, stages, seed)
        print(
            f"{policy.name:14}{row['overall']:9.2f}{row['first_hour']:10.2f}{row['last_hour']:11.2f}"
            f"{row['moves']:8}{row['joins']:8}",
            flush=True,
        )
    return {"trace": name, "lives": len(trace.lives), "alive_by_hour": alive, "policies": found}


def summary(compared: list[dict[str, Any]]) -> dict[str, Any]:
    """Return each policy's range over the traces."""
    found = {}
    for name in compared[0]["policies"]:
        rows = [trace["policies"][name] for trace in compared]
        found[name] = {key: [min(r[key] for r in rows), max(r[key] for r in rows)] for key in ("overall", "moves")}
    return found


def growth(stages: int) -> list[dict[str, Any]]:
    """Simulate an hour in which half of the peers fail and are replaced, at each size."""
    print("\nan hour in which half of the peers fail and are replaced")
    print(
        f"{'peers':>6}{'% of optimal':>14}{'moves':>7}{'CPU ms a decision':>19}"
        f"{'records sent':>14}{'kB read':>10}{'simulated in':>14}   (a peer and minute)"
    )
    rows = []
    for peers in SIZES:
        trace = spot_trace(0, SpotMarket(wanted=peers, hours=1.0, zones=max(1, min(8, peers // 10)), loss_per_hour=0.5))
        costs = tuple(StageCost(1.0, STATE_BYTES) for _ in range(min(stages, peers // 3)))
        begin_s = time.process_time()
        report = simulate_fluid(trace, Barnraise(), FluidConfig(costs, reread_s=5.0))
        seconds = time.process_time() - begin_s
        row = {
            "peers": peers,
            "percent_of_optimal": report.percent_of_optimal(),
            "moves": report.moves,
            "decision_cpu_ms": 1e3 * report.decision_cpu_s / max(1, report.decisions),
            "records_a_peer_minute": 60 * report.records / report.peer_seconds,
            "read_bytes_a_peer_minute": 60 * RECORD_BYTES * report.records_read / report.peer_seconds,
            "simulated_cpu_s": seconds,
        }
        rows.append(row)
        print(
            f"{peers:6}{row['percent_of_optimal']:14.2f}{row['moves']:7}{row['decision_cpu_ms']:19.2f}"
            f"{row['records_a_peer_minute']:14.2f}{row['read_bytes_a_peer_minute'] / 1e3:10.1f}{seconds:12.1f} s",
            flush=True,
        )
    return rows


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--trace", type=Path, help="replay this CSV or JSON trace instead of generated ones")
    arguments.add_argument("--seeds", type=int, default=3, help="how many generated traces")
    arguments.add_argument("--stages", type=int, default=6)
    add_json(arguments, "rebalance")
    chosen = arguments.parse_args()
    if chosen.seeds < 1 or chosen.stages < 1:
        arguments.error("give at least one seed and one stage")
    if chosen.trace is not None:
        try:
            traces = {str(chosen.trace): read_trace(chosen.trace)}
        except ConfigError as error:
            arguments.error(str(error))
    else:
        traces = {f"generated, seed {seed}": spot_trace(seed) for seed in range(chosen.seeds)}
    compared = [compare(name, trace, chosen.stages, seed) for seed, (name, trace) in enumerate(traces.items())]
    overall = {p.name: [c["policies"][p.name]["overall"] for c in compared] for p in policies()}
    met = all(o >= BAR and o >= max(others) for o, *others in zip(overall.pop("ours"), *overall.values(), strict=True))
    grown = growth(chosen.stages)
    if chosen.trace is None:
        print(f"\nat least {BAR:.0f} percent overall and ahead of every rival on every trace: {'yes' if met else 'NO'}")
    if chosen.json:
        figures = {"summary": summary(compared), "growth": grown, "bar": BAR, "met": met}
        write_results(chosen.json, {**figures, "compared": compared})
    return 0 if met or chosen.trace is not None else 1


if __name__ == "__main__":
    sys.exit(main())
