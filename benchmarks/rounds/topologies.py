"""How updates may travel between the peers of a round: bytes by formula, by plan and measured, and seconds on links.

    python benchmarks/rounds/topologies.py [--peers 2,3,4,8,12,16] [--mbytes 4] [--mbit 100] [--runs 3]
                                           [--only loopback | even | uneven | simulated] [--json [FILE]]

`topology_plans` has the topologies. Peers are processes that carry out a plan by calls of the product's own
(`topology_peer`): they add vectors of --mbytes, whose sum modulo 2^32 is exact in any order.

- loopback: the bytes of groups of --peers, framing included, beside the formula.
- even: the seconds of 8 peers at --mbit each way (network namespaces, tbf; root), the median of --runs, beside what the
  links alone would take (`topology_simulation`).
- uneven: the same, with one of the 8 at a fifth of the rate.
- simulated: seconds of links alone for 2 to 64 peers: even, uneven (every eighth at a fifth, one at least), and far:
  1 MB between even links on which everything arrives 50 ms late.

"by link" has the shares that the product's rule gives for the rates of the links, on loopback for those of the uneven
ones. Exits with 1 if the bytes of a peer, planned or measured, are more than 3 % off the formula, or a sum is wrong.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, Final

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.common.children import START_S, Child, ChildFailed, begin
from benchmarks.common.options import add_json, write_results
from benchmarks.common.shaped_lan import Lan, Unavailable, shaped_lan
from benchmarks.rounds.topology_plans import TOPOLOGIES, VALUE_BYTES, formula, hash_of, plan_of, traffic, vector_of
from benchmarks.rounds.topology_rows import PARTS
from benchmarks.rounds.topology_simulation import simulated_s
from swarm.protocol.shares import LinkSpeed, weights_of

SHAPED_PEERS: Final = 8
SLOW_SHARE: Final = 0.2  # of the rate of the others
SIMULATED_PEERS: Final = (2, 4, 8, 16, 32, 64)
SIMULATED_MB: Final = 100.0
FAR_MB, FAR_S = 1.0, 0.05
OFF_MAX: Final = 0.03
RUN_S: Final = 300.0

Row = dict[str, Any]


def links_of(setting: str, peers: int, mbit: float) -> list[LinkSpeed]:
    """Return the links of the peers. Those of an uneven group are slow at its end: one in eight, one at least."""
    slow = max(1, peers // 8) if setting == "uneven" else 0
    rate = mbit * 1e6 / 8
    return [LinkSpeed(rate, rate)] * (peers - slow) + [LinkSpeed(rate * SLOW_SHARE, rate * SLOW_SHARE)] * slow


def weights_for(topology: str, links: Sequence[LinkSpeed], size_bytes: float) -> tuple[int, ...]:
    """Return the shares of "by link", and none for other topologies."""
    return weights_of(links, size_bytes, size_bytes) if topology == "by link" else ()


@contextmanager
def group(peers: int, lan: Lan | None = None) -> Iterator[list[Child]]:
    """Run connected peers for the block, on the hosts of a network or on loopback."""
    children: list[Child] = []
    try:
        for number in range(peers):
            place: dict[str, Any] = {} if lan is None else {"place": partial(lan.at_host, number)}
            ip = "127.0.0.1" if lan is None else lan.ip(number)
            children.append(Child("benchmarks.rounds.topology_peer", number, ip, **place))
        begin(children, [child.read(START_S) for child in children])
        yield children
    finally:
        for child in children:
            child.end()


def run(children: Sequence[Child], topology: str, values: int, weights: Sequence[int], round: int) -> Row:
    """Return what the peers measured of one plan."""
    order = {"topology": topology, "values": values, "weights": weights, "round": round}
    for wait_s, message in ((START_S, order), (RUN_S, {"go": True})):
        for child in children:
            child.tell(message)
        reports = [child.read(wait_s) for child in children]
    expected = np.zeros(values, np.uint32)
    for number in range(len(children)):
        expected += vector_of(round, number, values)
    return {
        "up": [report["up"] for report in reports],
        "down": [report["down"] for report in reports],
        "seconds": max(report["ended_s"] for report in reports) - min(report["began_s"] for report in reports),
        "exact": all(report["hash"] == hash_of(expected) for report in reports),
    }


def off(found: Sequence[Sequence[float]], stated: Sequence[float]) -> float:
    """Return by which part of the formula's bytes a peer is off, of the peer that is furthest."""
    parts = (size / wanted - 1 for way in found for size, wanted in zip(way, stated, strict=True))
    return max(parts, key=abs)


def summary(topology: str, runs: Sequence[Row], size_bytes: int, weights: Sequence[int]) -> Row:
    """Return the bytes of the first run beside the formula, and the median of the seconds."""
    up, down = runs[0]["up"], runs[0]["down"]
    peers = len(up)
    stated = formula(topology, peers, size_bytes, weights)
    planned = traffic(plan_of(topology, peers, size_bytes // VALUE_BYTES, weights), peers)
    return {
        "topology": topology,
        "peers": peers,
        "size_bytes": size_bytes,
        "weights": list(weights),
        "total_bytes": sum(up),
        "total_formula": sum(stated),
        "busiest_up": max(up),
        "busiest_down": max(down),
        "busiest_formula": max(stated),
        "plan_off": off(planned, stated),
        "off": off([found[way] for found in runs for way in ("up", "down")], stated),
        "exact": all(found["exact"] for found in runs),
        "seconds": median(found["seconds"] for found in runs),
        "runs_s": [found["seconds"] for found in runs],
    }


def measure(setting: str, peers: int, options: argparse.Namespace) -> Iterator[Row]:
    """Yield a row for each topology: on loopback, or on shaped links with the seconds that these alone would take."""
    values = round(options.mbytes * 1e6) // VALUE_BYTES
    size_bytes = values * VALUE_BYTES
    shaped = setting != "loopback"
    links = links_of(setting if shaped else "uneven", peers, options.mbit)
    rates = [(link.up * 8e-6, link.down * 8e-6) for link in links]
    with shaped_lan(peers, rates) if shaped else nullcontext() as lan, group(peers, lan) as children:
        rounds = iter(range(1, 1 << 30))
        for topology in TOPOLOGIES:
            weights = weights_for(topology, links, size_bytes)
            count = options.runs if shaped else 1
            runs = [run(children, topology, values, weights, next(rounds)) for _ in range(count)]
            row = summary(topology, runs, size_bytes, weights)
            if shaped:
                row["ideal_s"] = simulated_s(plan_of(topology, peers, values, weights), links)
            yield row


def simulate(options: argparse.Namespace) -> Iterator[Row]:
    """Yield the seconds of each topology on even, uneven and far links, for all numbers of peers."""
    for peers in SIMULATED_PEERS:
        for topology in TOPOLOGIES:
            row: Row = {"topology": topology, "peers": peers, "plan_off": 0.0}
            for setting, mbytes, delay_s in (
                ("even", SIMULATED_MB, 0.0),
                ("uneven", SIMULATED_MB, 0.0),
                ("far", FAR_MB, FAR_S),
            ):
                values = round(mbytes * 1e6) // VALUE_BYTES
                links = links_of(setting, peers, options.mbit)
                weights = weights_for(topology, links, values * VALUE_BYTES)
                plan = plan_of(topology, peers, values, weights)
                row[f"{setting}_s"] = simulated_s(plan, links, delay_s)
                planned_off = off(traffic(plan, peers), formula(topology, peers, values * VALUE_BYTES, weights))
                row["plan_off"] = max(row["plan_off"], planned_off, key=abs)
            yield row


def print_measured(row: Row) -> None:
    mbytes = [
        row[name] / 1e6 for name in ("total_bytes", "total_formula", "busiest_up", "busiest_down", "busiest_formula")
    ]
    seconds = f"{row['seconds']:9.3f}" + (f"{row['ideal_s']:9.3f}" if "ideal_s" in row else "")
    wrong = "" if row["exact"] else "  WRONG SUM"
    cells = "".join(f"{cell:10.2f}" for cell in mbytes)
    print(f"{row['peers']:>6} {row['topology']:10}{cells}{row['off']:+9.2%}{seconds}{wrong}", flush=True)


def print_simulated(row: Row) -> None:
    cells = "".join(f"{row[f'{setting}_s']:10.2f}" for setting in ("even", "uneven", "far"))
    print(f"{row['peers']:>6} {row['topology']:10}{cells}", flush=True)


def parts(options: argparse.Namespace) -> dict[str, list[Row]]:
    """Return the rows of all parts that are asked for, printed as they are measured."""
    found: dict[str, list[Row]] = {}
    for part in PARTS if options.only is None else (options.only,):
        rows = found[part] = []
        if part == "simulated":
            print(f"\nsimulated{'even s':>18}{'uneven s':>10}{'far s':>10}")
            for row in simulate(options):
                rows.append(row)
                print_simulated(row)
            continue
        heads = ("MB total", "formula", "busiest", "down", "formula")
        print(f"\n{part:17}{''.join(f'{head:>10}' for head in heads)}{'off':>9}{'s':>9}{'links':>9}")
        for peers in options.peers if part == "loopback" else (SHAPED_PEERS,):
            for row in measure(part, peers, options):
                rows.append(row)
                print_measured(row)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", default="2,3,4,8,12,16", help="sizes of the groups on loopback")
    parser.add_argument("--mbytes", type=float, default=4.0, help="of an update, as peers send it")
    parser.add_argument("--mbit", type=float, default=100.0, help="of each link, each way")
    parser.add_argument("--runs", type=int, default=3, help="of each topology on shaped links")
    parser.add_argument("--only", choices=PARTS)
    add_json(parser, "rounds/topologies")
    options = parser.parse_args()
    options.peers = [int(peers) for peers in options.peers.split(",")]
    if min(options.peers) < 2 or options.runs < 1 or options.mbytes <= 0 or options.mbit <= 0:
        parser.error("give at least 2 peers, 1 run, and updates and links of some size")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("the benchmark was ended"))  # with its children
    print(f"{os.cpu_count()} cores (load {os.getloadavg()[0]:.1f} before we began)")
    try:
        found = parts(options)
    except (ChildFailed, Unavailable) as error:
        sys.exit(f"the benchmark failed: {error}")
    failed = [
        f"{row['topology']} of {row['peers']} ({part})"
        for part, rows in found.items()
        for row in rows
        if max(abs(row["plan_off"]), abs(row.get("off", 0.0))) > OFF_MAX or not row.get("exact", True)
    ]
    print(f"FAIL  {', '.join(failed)}" if failed else "PASS")
    if options.json:
        settings = {name: getattr(options, name) for name in ("mbytes", "mbit", "runs")}
        write_results(options.json, {**settings, "off_max": OFF_MAX, **found})
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
