"""A whole outer step of a large model on this machine: seconds by phase, memory, and the sum for 1 B parameters.

    python benchmarks/rounds/outer_step.py [--peers 4] [--params N] [--codec int4] [--rounds 4]
                                           [--state memory] [--folder FOLDER] [--json [FILE]]

Updates are synthetic; encode, roster, exchange, merge, outer step, hash, vote and commit are the product's, with the
state on disk. Peers are processes on 127.0.0.1. Without --params the model is the largest of which --peers fit in free
memory: their states lie on disk, so each needs about 8 bytes a parameter beside the cache of files.

Phases follow each other: encode, from the plan to the signed commitment; roster; exchange, until the next state is
built and hashed; commit, with the vote. Each ends when the last peer's does. Parts, in brackets, are seconds of
threads, which overlap: merges and steps run while slices are still on their way. The first round is not counted.

For 1 B parameters seconds are scaled, but not those of the roster, which are of small messages. On a link the exchange
lasts at least as long as its coded bytes.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.common.children import Child, ChildFailed, open_group
from benchmarks.common.options import add_json, write_results
from benchmarks.rounds.size_rows import PARTS, PHASES, outer_step_sum
from benchmarks.rounds.thin_links import coded_bytes
from peer.machine import free_memory_bytes

BYTES_A_PARAM: Final = {"disk": 8, "memory": 27}  # of a peer's own memory, by the states' place: see `own_bytes`
DISK_BYTES_A_PARAM: Final = 26  # of a peer: three states of two vectors, and results
FREE_SHARE: Final = 0.7  # the rest caches files
STEP_PARAMS: Final = 10_000_000
ROUND_S: Final = 300.0

Figures = dict[str, Any]


def largest(free_bytes: float, disk_bytes: float, peers: int, state: str) -> int:
    """Return the parameters, a multiple of ten million, with which that many peers fit in so much memory and disk.
    `state`: "disk" or "memory"."""
    found = int(FREE_SHARE * min(free_bytes / BYTES_A_PARAM[state], disk_bytes / DISK_BYTES_A_PARAM) / peers)
    return max(STEP_PARAMS, found // STEP_PARAMS * STEP_PARAMS)


def phases_of(reports: Sequence[Figures], rounds: Sequence[int]) -> dict[str, float]:
    """Return the median of the rounds' seconds of each phase, from one that all have begun to the next one (their sum
    is the whole step), and of each part, of the slowest peer."""
    found: dict[str, float] = {}
    for phase, (begin, end) in PHASES.items():
        found[phase] = median(
            max(_at(report, end, number) for report in reports) - max(_at(report, begin, number) for report in reports)
            for number in rounds
        )
    for part in PARTS:
        each = [
            max(
                report["parts_s"][str(number)].get(part, 0.0) - report["parts_s"][str(number - 1)].get(part, 0.0)
                for report in reports
            )
            for number in rounds
        ]
        found[f"{part}_part"] = median(each)
    return found


def _at(report: Figures, phase: str, number: int) -> float:
    times = report["seconds"] if phase == "commit" else report["phases"][phase]
    return float(times[str(number)])


def measure(options: argparse.Namespace) -> Figures:
    """Run the rounds; return their figures."""
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        starts = []
        for number in range(options.peers):
            arguments = (number, options.params, options.codec, options.rounds, options.state, folder)
            env = {"BENCHMARK_PARTS": "1"}
            starts.append(partial(Child, "benchmarks.rounds.averaging_peer", *arguments, env=env))
        with open_group(starts) as (children, _):
            reports = [child.read(ROUND_S * options.rounds) for child in children]
    counted = range(2, options.rounds + 1)
    whole = [n for n in counted if all(str(n) in r["merged"] and str(n - 1) in r["parts_s"] for r in reports)]
    whole = [n for n in whole if all(len(r["merged"][str(n)]) == options.peers for r in reports)]
    if not whole:
        raise ChildFailed("no round has merged all peers: give fewer --params")
    return {
        "seconds": phases_of(reports, whole),
        "rounds": len(whole),
        "own_bytes": max(report["own_bytes"] for report in reports),
        "peak_bytes": max(report["peak_bytes"] for report in reports),
        "cpu_s": sum(report["cpu_s"] for report in reports) / len(reports),
        "coded_bytes": coded_bytes(options.codec, options.params, options.peers),
        "identical": len({report["state_hash"] for report in reports}) == 1,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=int, default=4)
    parser.add_argument("--params", type=int, help="of the model (default: as many as fit)")
    parser.add_argument("--codec", default="int4", help='of updates, or "up/down"')
    parser.add_argument("--rounds", type=int, default=4, help="the first is not counted")
    parser.add_argument("--state", choices=["disk", "memory"], default="disk", help="where the states lie")
    parser.add_argument("--folder", type=Path, help="on the disk where the states lie (default: of temporary files)")
    add_json(parser, "rounds/outer_step")
    options = parser.parse_args()
    if options.peers < 2 or options.rounds < 2 or (options.params is not None and options.params < 1):
        parser.error("give at least 2 peers, 2 rounds and 1 parameter")
    if options.params is None:
        disk_bytes = shutil.disk_usage(options.folder or tempfile.gettempdir()).free
        options.params = largest(free_memory_bytes(), disk_bytes, options.peers, options.state)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("the benchmark was ended"))  # with its children
    load = os.getloadavg()[0]
    print(
        f"{options.peers} peers, {options.params:,} parameters, {options.codec}, states in {options.state},"
        f" {os.cpu_count()} cores (load {load:.1f} before we began)"
    )
    try:
        found = measure(options)
    except ChildFailed as error:
        sys.exit(f"the benchmark failed: {error}")
    settings = {name: getattr(options, name) for name in ("peers", "params", "codec", "state")}
    figures = {**settings, "load": load, **found}
    print_figures(figures)
    if options.json:
        write_results(options.json, figures)
    return 0 if found["identical"] else 1


def print_figures(figures: Figures) -> None:
    sums = outer_step_sum(figures)
    print(f"{'seconds':20}{'measured':>12}" + "".join(f"{f'1 B, {name}':>18}" for name in sums))
    for name in [*PHASES, *(f"{part}_part" for part in PARTS)]:
        label = f"  ({name.removesuffix('_part')})" if name.endswith("_part") else name
        cells = "".join(f"{column.get(name, 0.0):18.2f}" for column in sums.values())
        print(f"{label:20}{figures['seconds'][name]:12.2f}{cells}")
    total = sum(figures["seconds"][phase] for phase in PHASES)
    print(f"{'all':20}{total:12.2f}" + "".join(f"{column['all']:18.2f}" for column in sums.values()))
    own, peak = figures["own_bytes"], figures["peak_bytes"]
    print(
        f"CPU {figures['cpu_s']:.2f} s a peer; peak memory a process {own / 1e9:.2f} GB, with mapped files"
        f" {peak / 1e9:.2f} GB ({own / figures['params']:.1f} and {peak / figures['params']:.1f} bytes a parameter);"
        f" {figures['coded_bytes'] / 1e6:.1f} MB sent a peer; same bits: {'yes' if figures['identical'] else 'NO'}"
    )


if __name__ == "__main__":
    sys.exit(main())
