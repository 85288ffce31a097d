"""Exchanges on links of unequal speed: with shares of the merging by link, beside equal ones.

    python benchmarks/rounds/shares.py [--params 50000000] [--rounds 5] [--train-s 25] [--json [FILE]]

Every peer is a process in a network namespace of its own, behind a link that tbf shapes in both directions (root):
seven of 100 Mbit/s and one of 20, and eight of 100. Rounds are those of averaging.py, at 8 bits, with --train-s seconds
of training, which trains nothing. An exchange lasts from its begin at the first peer until the last one has committed
its result. Rounds that have merged the updates of some only are not counted: with equal shares a slow member is left
behind. Nor are the first ones by link, which have equal shares, since nothing is measured yet. The
limit is the least time in which the slowest link carries its bytes (`swarm/protocol/shares.py`), as hivemind's
`load_balance_peers` finds it, too.

Exits with 1 if the exchange by link is not at least 1.5 times as quick on the mixed links, or takes more than 5 percent
longer on equal ones, or a round has merged the updates of some only.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
from dataclasses import dataclass
from functools import partial
from math import inf
from pathlib import Path
from statistics import median
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.common.children import Child, ChildFailed, open_group
from benchmarks.common.options import add_json, write_results
from benchmarks.common.shaped_lan import Lan, Unavailable, shaped_lan
from swarm.protocol.shares import LinkSpeed, divide, seconds

MODULE: Final = "benchmarks.rounds.averaging_peer"
ROUND_S: Final = 120.0
WARM_UP: Final = 2  # rounds: the plan of the second follows what the first has shown, and that is smoothed
BITS: Final = 8
Figures = dict[str, Any]


@dataclass(frozen=True)
class Network:
    """Links in Mbit/s, each way. `bar`: how many times as quick as with equal shares."""

    name: str
    mbit: tuple[float, ...]
    bar: float


NETWORKS: Final = (
    Network("7 at 100 Mbit/s, 1 at 20", (*(100.0,) * 7, 20.0), 1.5),
    Network("8 at 100 Mbit/s", (100.0,) * 8, 0.95),
)


def run(lan: Lan, peers: int, options: argparse.Namespace, by_link: bool, folder: Path) -> Figures:
    """Return the figures of one run."""
    starts = []
    for number in range(peers):
        env = {"BENCHMARK_LISTEN": lan.ip(number), "BENCHMARK_TRAIN_S": str(options.train_s)}
        env |= {"BENCHMARK_BY_LINK": "1"} if by_link else {}
        arguments = (number, options.params, "int8", options.rounds, "memory", folder)
        starts.append(partial(Child, MODULE, *arguments, env=env, place=partial(lan.at_host, number)))
    with open_group(starts) as (children, _):
        reports = [child.read(ROUND_S * options.rounds) for child in children]
    took, merged = [], []
    for name in map(str, range(1, options.rounds + 1)):
        began = min(r["phases"]["exchange"][name] for r in reports if name in r["phases"]["exchange"])
        took.append(max(r["seconds"].get(name, inf) for r in reports) - began)
        merged.append(max(len(r["merged"].get(name, ())) for r in reports))
    whole = [s for s, who in zip(took, merged, strict=True) if who == peers and s < inf]
    return {
        "exchange_s": median(whole[WARM_UP:] or whole or [inf]) if by_link else median(whole or [inf]),
        "each_s": took,
        "merged": merged,
        "owned": [report["owned"] for report in reports],
        "identical": len({report["state_hash"] for report in reports}) == 1,
        "wire_bytes": sum(report["wire_bytes"] for report in reports) / options.rounds,
    }


def limits(network: Network, params: int) -> Figures:
    """Return the seconds of the slowest link, by link and with equal shares, by arithmetic."""
    links = [LinkSpeed(mbit * 1e6 / 8, mbit * 1e6 / 8) for mbit in network.mbit]
    size, n = params * BITS / 8, len(links)
    shares = divide(links, size, size, max(0.5, 1 / n))
    by_link = max(seconds(share, link, n, size, size) for share, link in zip(shares, links, strict=True))
    return {"by_link_s": by_link, "equal_s": max(seconds(1 / n, link, n, size, size) for link in links)}


def measure(options: argparse.Namespace) -> list[Figures]:
    found = []
    for network in NETWORKS:
        rates, sides = [(mbit, mbit) for mbit in network.mbit], Figures()
        for side in ("equal", "by_link"):
            with tempfile.TemporaryDirectory() as name, shaped_lan(len(rates), rates) as lan:
                sides[side] = run(lan, len(rates), options, side == "by_link", Path(name))
        times = sides["equal"]["exchange_s"] / sides["by_link"]["exchange_s"]
        same = sides["by_link"]["identical"] and min(sides["by_link"]["merged"]) == len(rates)
        row = {"name": network.name, "bar": network.bar, **sides, "limits": limits(network, options.params)}
        found.append({**row, "times": times, "passed": same and times >= network.bar})
        print_row(found[-1])
    return found


def print_row(row: Figures) -> None:
    equal, by_link, bounds = row["equal"], row["by_link"], row["limits"]
    print(
        f"{row['name']:26}{equal['exchange_s']:9.2f}{bounds['equal_s']:9.2f}{by_link['exchange_s']:9.2f}"
        f"{bounds['by_link_s']:9.2f}{row['times']:7.2f}   {' '.join(map(str, by_link['owned']))}",
        flush=True,
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--params", type=int, default=50_000_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--train-s", type=float, default=25.0, help="between two exchanges")
    add_json(parser, "rounds/shares")
    options = parser.parse_args()
    if options.rounds <= WARM_UP:
        parser.error(f"give more than {WARM_UP} rounds")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("the benchmark was ended"))  # with its children and namespaces
    load = os.getloadavg()[0]
    print(f"{options.params:,} parameters at {BITS} bits; seconds an exchange, and the limit by arithmetic")
    print(f"{'':26}{'equal':>9}{'limit':>9}{'by link':>9}{'limit':>9}{'times':>7}   slices by peer")
    try:
        rows = measure(options)
    except (Unavailable, ChildFailed) as error:
        sys.exit(f"the benchmark cannot run: {error}")
    if options.json:
        write_results(options.json, {"params": options.params, "load": load, "rows": rows})
    failed = [row["name"] for row in rows if not row["passed"]]
    print(f"FAIL  {', '.join(failed)}" if failed else "PASS")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
