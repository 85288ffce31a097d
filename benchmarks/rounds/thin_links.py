"""The share of the time in which peers on thin links compute: by link, H, and method.

    python benchmarks/rounds/thin_links.py [--quick] [--mbit 50,200,1000] [--params 20000000] [--step-ms MS]
                                           [--json [FILE]]

Four peers, each a process in a network namespace of its own, behind a link that tbf shapes in both directions (root).
Rounds, trainers, codecs and sockets are the product's. Four workers would measure this machine's cores, so a stand-in
for the worker lets --step-ms pass for each inner step (`benchmarks.common.paced_worker`): the default is the sum for an
RTX 4090 (`thin_link_rows.step_seconds`).

The exchange of a method that blocks does not depend on H. It is measured over --rounds rounds of 8 steps, from the last
step to the first one of the next round; the shares are H steps / (H steps + exchange). Further rounds of 32 steps are
run whole: their share is measured. Streaming DiLoCo overlaps, so its shares are measured, for two H.

Exits with 1 if a measured share is more than 10 % off the computed one, or peers end with different weights.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, Final

import msgspec

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.common.children import Child, ChildFailed, open_group
from benchmarks.common.options import add_json, write_results
from benchmarks.common.paced_worker import Pace
from benchmarks.common.shaped_lan import Lan, Unavailable, shaped_lan
from benchmarks.rounds.thin_link_rows import (
    HEAD,
    OFF_MAX,
    PUBLISHED,
    STEPS,
    commits,
    exchanges,
    is_off,
    measured_share,
    row,
    share,
    step_seconds,
)
from optim.codecs import get_codec
from optim.strategies.dense import DenseCoding

WARM_UP: Final = 1  # rounds, or cycles of streaming: connections open, windows grow
SHORT_STEPS: Final = 8  # H of the rounds that measure the exchange
WHOLE_STEPS: Final = 32  # H of the rounds that are run whole
ROUND_S: Final = 120.0
WIDTHS: Final = (6, 14, 14, 13, 11, 6, *(16 for _ in STEPS), 32)
QUICK: Final = {"mbit": "50,1000", "params": 5_000_000, "rounds": 2, "whole": 1, "cycles": 2, "streamed": [125]}
QUICK_METHODS: Final = ("int4", "two_bit", "streaming int4")

Cell = dict[str, Any]


@dataclass(frozen=True, eq=False)
class Method:
    """A row of the grid. `codec`: of updates, or "up/down"; `streamed`: the fragments of each H that is measured."""

    name: str
    codec: str
    streamed: Mapping[int, int] = field(default_factory=dict)


METHODS: Final = (
    Method("fp32", "fp32"),
    Method("int8", "int8"),
    Method("int4", "int4"),
    Method("two_bit", "two_bit/int4"),
    Method("streaming int4", "int4", {32: 4, 125: 5}),
)


def coded_bytes(codec: str, params: int, peers: int, fragments: int = 1) -> float:
    """Return the bytes that a peer sends in the largest exchange: slices to their owners, results to all. It receives
    as many."""
    up, _, down = codec.partition("/")
    coding = DenseCoding([slice(0, -(-params // fragments))], get_codec(up), get_codec(down or up))
    size = sum(coding.message_bytes(i) + coding.result_bytes(i, peers) for i in range(coding.count))
    return size * (peers - 1) / peers


def run(lan: Lan, codec: str, pace: Pace, rounds: int, options: argparse.Namespace) -> list[Cell]:
    """Return the reports of the peers of one run."""
    with tempfile.TemporaryDirectory() as folder:
        starts = []
        for number in range(options.peers):
            env = {"BENCHMARK_LISTEN": lan.ip(number), "BENCHMARK_PACE": msgspec.json.encode(pace).decode()}
            arguments = (number, options.params, codec, rounds, "memory", folder)
            place = partial(lan.at_host, number)
            starts.append(partial(Child, "benchmarks.rounds.averaging_peer", *arguments, env=env, place=place))
        with open_group(starts) as (children, _):
            return [child.read(ROUND_S * rounds) for child in children]


def cell(
    method: Method, mbit: float, pace: Pace, reports: Sequence[Cell], took: Sequence[float], options: argparse.Namespace
) -> Cell:
    """Return what the reports of a run say. `took`: the seconds of the exchanges that count."""
    if not took:
        raise ChildFailed(f"no round of {method.name} at {mbit:g} Mbit/s has merged all peers: use an idle machine")
    return {
        "method": method.name,
        "mbit": mbit,
        "steps": pace.steps[-1],
        "fragments": pace.fragments,
        "coded_bytes": coded_bytes(method.codec, options.params, options.peers, pace.fragments),
        "wire_bytes": median(report["wire_bytes"] / max(map(int, report["seconds"])) for report in reports),
        "exchange_s": median(took),
        "exchanges_s": list(took),
        "cpu_s": sum(report["cpu_s"] for report in reports) / (os.cpu_count() or 1),
        "identical": len({report["state_hash"] for report in reports}) == 1,
    }


def blocking(lan: Lan, method: Method, mbit: float, options: argparse.Namespace) -> Cell:
    """Measure the exchange of a method that blocks, then run some rounds whole."""
    short = WARM_UP + options.rounds
    pace = Pace(step_s=options.step_s, steps=(*(SHORT_STEPS,) * short, WHOLE_STEPS))
    rounds = short + options.whole
    reports = run(lan, method.codec, pace, rounds, options)
    took = exchanges(reports, range(WARM_UP + 1, short + 1), options.peers)
    found = cell(method, mbit, pace, reports, took, options)
    found["measured"] = measured_share(reports, range(short + 1, rounds + 1))
    found["computed"] = share(WHOLE_STEPS, options.step_s, found["exchange_s"])
    return found


def streaming(lan: Lan, method: Method, mbit: float, steps: int, fragments: int, options: argparse.Namespace) -> Cell:
    """Measure the share of Streaming DiLoCo, over whole cycles of its fragments."""
    first, rounds = WARM_UP * fragments + 1, (WARM_UP + options.cycles) * fragments
    pace = Pace(step_s=options.step_s, steps=(steps,), fragments=fragments)
    reports = run(lan, method.codec, pace, rounds, options)
    counted = range(first, rounds + 1)
    found = cell(method, mbit, pace, reports, commits(reports, counted), options)
    return found | {"measured": measured_share(reports, counted)}


def measure(options: argparse.Namespace) -> Iterator[Cell]:
    """Yield the cells, link by link."""
    methods = [method for method in METHODS if not options.only or method.name in options.only]
    for mbit in map(float, options.mbit.split(",")):
        with shaped_lan(options.peers, mbit) as lan:
            for method in methods:
                if not method.streamed:
                    yield blocking(lan, method, mbit, options)
                for steps, fragments in method.streamed.items():
                    if steps in options.streamed:
                        yield streaming(lan, method, mbit, steps, fragments, options)


def print_line(cells: Sequence[str]) -> None:
    """Print a row of the table, its cells as those of the page."""
    print(" ".join(f"{cell:>{width}}" for cell, width in zip(cells, WIDTHS, strict=True)), flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mbit", default="50,200,1000", help="of each link, each way")
    parser.add_argument("--peers", type=int, default=4)
    parser.add_argument("--params", type=int, default=20_000_000)
    parser.add_argument("--step-ms", type=float, help="an inner step (default: the sum for an RTX 4090)")
    parser.add_argument("--rounds", type=int, default=3, help="that measure the exchange, of methods that block")
    parser.add_argument("--whole", type=int, default=2, help="rounds that are run whole")
    parser.add_argument("--cycles", type=int, default=3, help="of all fragments, of streaming")
    parser.add_argument("--streamed", type=int, nargs="+", default=[32, 125], help="H of streaming")
    parser.add_argument("--only", nargs="+", choices=[method.name for method in METHODS], help="these methods only")
    parser.add_argument("--quick", action="store_true", help="a small subset, to see that all works")
    add_json(parser, "rounds/thin_links")
    known, _ = parser.parse_known_args()
    if known.quick:
        parser.set_defaults(**QUICK, only=QUICK_METHODS)
    options = parser.parse_args()
    if min(options.peers - 1, options.params, options.rounds, options.whole, options.cycles) < 1:
        parser.error("give at least 2 peers, 1 parameter, and 1 round of each kind")
    options.step_s = step_seconds(options.params) if options.step_ms is None else options.step_ms / 1e3
    words = "the sum for an RTX 4090 at 40 % of 165 TFLOP/s and 16,384 tokens" if options.step_ms is None else "as set"
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("the benchmark was ended"))  # with its children and namespaces
    began, load = time.monotonic(), os.getloadavg()[0]
    print(
        f"{options.peers} peers, {options.params:,} parameters, {1e3 * options.step_s:.1f} ms a step ({words}),"
        f" {os.cpu_count()} cores (load {load:.1f} before we began)\n"
        f"shares of the time computing, then the loss of that H; for comparison, published: {PUBLISHED}\n"
    )
    print_line(HEAD)
    cells: list[Cell] = []
    try:
        for found in measure(options):
            cells.append(found)
            print_line(row(found, options.step_s))
    except (ChildFailed, Unavailable) as error:
        sys.exit(f"the benchmark failed: {error}")
    failed = [f"{c['method']} at {c['mbit']:g} Mbit/s" for c in cells if not c["identical"] or _is_off(c)]
    print(f"\n{time.monotonic() - began:.0f} s")
    print(f"FAIL  {', '.join(failed)} (bar {OFF_MAX:.0%}, same weights)" if failed else "PASS")
    if options.json:
        settings = {name: getattr(options, name) for name in ("peers", "params", "step_s", "rounds", "whole", "cycles")}
        write_results(options.json, {**settings, "step_words": words, "load": load, "cells": cells})
    return 1 if failed else 0


def _is_off(found: Cell) -> bool:
    return found["measured"] is None if found["fragments"] > 1 else is_off(found)


if __name__ == "__main__":
    sys.exit(main())
