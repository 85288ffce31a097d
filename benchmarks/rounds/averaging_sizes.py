"""Whole rounds of several sizes beside hivemind: some runs of each, by turns, and their medians.

    python benchmarks/rounds/averaging_sizes.py [--runs 3] [--json [FILE]]

What a run does and counts, `averaging.py` says. A size with a bar runs as often as `--runs` says, the others, which
show how a round grows with its peers, once. Exits with 1 if a median is below its bar, our CPU time above half of
hivemind's where that is the bar, or the peers of a run have not all the same bits.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.common.children import ChildFailed
from benchmarks.common.options import add_json, write_results
from benchmarks.rounds.averaging import measure
from benchmarks.rounds.averaging_data import float64_mean


@dataclass(frozen=True)
class Size:
    """So many peers average so many values in codes of so many bits. `bar`: how many times as fast as hivemind."""

    peers: int
    params: int
    bits: int
    rounds: int
    bar: float | None = None
    cpu_bar: float | None = None
    """Our CPU time may be this share of hivemind's."""

    @property
    def name(self) -> str:
        return f"{self.peers} x {self.params / 1e6:g}M, {self.bits} bits"


SIZES: Final = (
    Size(4, 25_000_000, 8, 7, bar=2.3, cpu_bar=0.5),
    Size(4, 25_000_000, 16, 7, bar=1.5),
    Size(2, 200_000_000, 8, 6, bar=1.5),
    Size(3, 1_000_000, 8, 30, bar=1.0),
    *(Size(peers, 1_000_000, 8, 8) for peers in (2, 4, 8, 16)),
)
Row = dict[str, Any]


def run(size: Size) -> Row:
    """Return the figures of one run."""
    options = argparse.Namespace(rival="hivemind", fault=None, state="memory", **vars(size))
    sides = measure(options, size.bits, {"all": float64_mean(range(size.peers), size.params)})
    ours, theirs = sides["ours"], sides["hivemind"]
    return {
        "ours_s": ours["median_s"],
        "hivemind_s": theirs["median_s"],
        "times": theirs["median_s"] / ours["median_s"],
        "ours_cpu_s": ours["cpu_s"],
        "hivemind_cpu_s": theirs["cpu_s"],
        "cpu_share": ours["cpu_s"] / theirs["cpu_s"],
        "of_ideal_wire": ours["of_ideal_wire"],
        "faults": ours["faults"],
        "identical": ours["identical"],
        "codec": theirs["codec"],
        "tcp_s": sides["limits"]["tcp_s"],
        "memory_s": sides["limits"]["memory_s"],
    }


def summary(size: Size, runs: list[Row]) -> Row:
    """Return the medians of a size's runs, and whether they keep the bars."""
    kept = {"identical", "codec"}
    found: Row = {name: median(row[name] for row in runs) for name in runs[0] if name not in kept}
    found |= {"name": size.name, "bar": size.bar, "cpu_bar": size.cpu_bar, "runs": runs}
    found["identical"] = all(row["identical"] for row in runs)
    found["passed"] = (
        found["identical"]
        and (size.bar is None or found["times"] >= size.bar)
        and (size.cpu_bar is None or found["cpu_share"] <= size.cpu_bar)
    )
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=3, help="of each size that has a bar")
    add_json(parser, "rounds/sizes")
    options = parser.parse_args()
    if options.runs < 1:
        parser.error("give at least one run")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("the benchmark was ended"))  # with its children
    found: dict[Size, list[Row]] = {size: [] for size in SIZES}
    load = os.getloadavg()[0]
    print(f"{os.cpu_count()} cores (load {load:.1f} before we began)")
    print(f"{'':22}{'ours s':>8}{'hivemind s':>12}{'times':>7}{'CPU s':>8}{'hivemind':>10}{'share':>7}{'faults':>8}")
    rows: list[Row] = []
    try:
        for size in [size for number in range(options.runs) for size in SIZES if size.bar or not number]:
            found[size].append(run(size))
            print_row(size.name, found[size][-1])
            rows = [summary(size, runs) for size, runs in found.items() if runs]
            if options.json:  # what was measured stays if a later run fails
                write_results(options.json, {"rows": rows, "load": load, "passed": all(row["passed"] for row in rows)})
    except ChildFailed as error:
        sys.exit(f"the benchmark failed: {error}")
    print(f"\nmedians of {options.runs}")
    for row in rows:
        print_row(row["name"], row)
    failed = [row["name"] for row in rows if not row["passed"]]
    print(f"FAIL  {', '.join(failed)}" if failed else "PASS")
    return 1 if failed else 0


def print_row(name: str, row: Row) -> None:
    seconds = f"{row['ours_s']:8.3f}{row['hivemind_s']:12.3f}{row['times']:7.2f}"
    cpu = f"{row['ours_cpu_s']:8.3f}{row['hivemind_cpu_s']:10.3f}{row['cpu_share']:7.2f}"
    print(f"{name:22}{seconds}{cpu}{row['faults']:8,.0f}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
