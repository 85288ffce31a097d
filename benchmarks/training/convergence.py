"""Loss against wire bytes: every method, codec and inner optimizer of RUN.toml, 8 workers, a small byte model.

    python benchmarks/training/convergence.py [--group NAME ...] [--only ROW ...] [--seeds N] [--jobs 2] [--again]

A model of 117 thousand parameters is trained for 480 steps by one worker alone (DiLoCo's paper pretrains so), then for
480 steps by each row's workers: AdamW at lr 1e-3 unless the row says otherwise, betas .9/.95, decay .1, a cosine to a
tenth of the rate, 8 samples a worker and step. The strategies, codecs and optimizers are those of a run's peers, with
no network. DiLoCo's outer step is lr 0.7 and momentum 0.9, unless the row says "outer". Data parallel is in the table
at the same rate and at its best one.

Each cell (row and seed) is a process of about 50 CPU seconds. Finished cells are kept in
`benchmarks/results/convergence.json`, and only those that are missing, or whose settings have changed, are computed:
run the command again to continue. All cells take about two hours on two cores. `benchmarks/report.py` then writes the
tables and the picture.

"sent" is the payload a worker sends, as coded; "received" all results that come back to it, its own message included
where messages are gathered. Losses are nats a byte on held-out text; "cloze" is the share of 1,000 cloze tasks of four
choices that the model answers rightly, where chance is 0.25.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.common.options import RESULTS, ROOT, commit, write_results
from benchmarks.training.byte_task import warm_up
from benchmarks.training.convergence_cell import Run, train
from benchmarks.training.convergence_rows import SEEDS, rows

FIGURES = RESULTS / "convergence.json"
WARM = ROOT / "build" / "convergence"
KEPT = {"MALLOC_MMAP_THRESHOLD_": str(1 << 30), "MALLOC_TRIM_THRESHOLD_": str(1 << 30)}
"""Has glibc keep freed memory, as workers do: else half of a cell's time went to the kernel, which clears pages."""
Cell = tuple[str, str, int]
"""Group, row and seed."""


def fingerprint(run: Run) -> str:
    """Return a short hash of a row's settings: a cell with another one is computed again."""
    return hashlib.sha256(json.dumps(run.settings, sort_keys=True).encode()).hexdigest()[:12]


def missing(figures: dict[str, Any], groups: Sequence[str], only: Sequence[str], seeds: int, again: bool) -> list[Cell]:
    """Return the cells to compute, the first seed of all rows first."""
    found = []
    for group, table in rows().items():
        for name, run in table.items():
            if group not in groups or (only and name not in only):
                continue
            for seed in range(min(SEEDS[group], seeds)):
                kept = figures["cells"].get(group, {}).get(name, {}).get(str(seed))
                if again or kept is None or kept["settings"] != fingerprint(run):
                    found.append((group, name, seed))
    return sorted(found, key=lambda cell: cell[2])


def ask(*arguments: str) -> Any:
    """Run this script in a process of its own and return the JSON that it prints."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **KEPT}
    command = [sys.executable, __file__, *arguments]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, env=environment) as child:
        assert child.stdout is not None
        said = child.stdout.read()
    if child.returncode:
        raise subprocess.CalledProcessError(child.returncode, command)
    return json.loads(said)


def end_with_parent() -> None:
    """End this process once its parent has gone: the pipe of its standard input then closes."""
    os.read(0, 1)  # not sys.stdin: its lock would be held when the interpreter ends
    os._exit(1)


def compute(group: str, name: str, seed: int) -> dict[str, Any]:
    """Train one cell, from the seed's warm weights."""
    return train(rows()[group][name], seed, WARM)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--group", nargs="+", choices=list(SEEDS), default=list(SEEDS), help="these groups of rows only"
    )
    parser.add_argument("--only", nargs="+", default=[], metavar="ROW", help="only these rows")
    parser.add_argument("--seeds", type=int, default=max(SEEDS.values()), help="at most so many seeds a row")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes at a time")
    parser.add_argument("--again", action="store_true", help="compute the chosen cells again")
    parser.add_argument("--json", type=Path, default=FIGURES, metavar="FILE", help="the file of the cells")
    parser.add_argument("--cell", nargs=3, metavar=("GROUP", "ROW", "SEED"), help="print one cell as JSON")
    parser.add_argument("--warm", type=int, metavar="SEED", help="train and keep a seed's warm weights")
    options = parser.parse_args()
    if options.cell or options.warm is not None:
        threading.Thread(target=end_with_parent, daemon=True).start()
    if options.cell:
        print(json.dumps(compute(options.cell[0], options.cell[1], int(options.cell[2]))))
        return 0
    if options.warm is not None:
        print(json.dumps(warm_up(options.warm, WARM)))
        return 0
    WARM.mkdir(parents=True, exist_ok=True)
    figures: dict[str, Any] = {"before": {}, "cells": {}}
    if options.json.exists():
        figures = json.loads(options.json.read_text())["figures"]
        for group, table in rows().items():  # a row with another name is another one
            kept = figures["cells"].get(group, {})
            figures["cells"][group] = {name: kept[name] for name in table if name in kept}
    sys.argv[1:] = []  # the head of the figures names the whole benchmark
    cells = missing(figures, options.group, options.only, options.seeds, options.again)
    begin = time.monotonic()
    with ThreadPoolExecutor(options.jobs) as pool, ExitStack() as stack:
        stack.callback(pool.shutdown, wait=False, cancel_futures=True)  # Ctrl-C begins no further cell
        cold = [s for s in sorted({seed for *_, seed in cells}) if not (WARM / f"warm-{s}.safetensors").exists()]
        for seed, loss in zip(cold, pool.map(lambda seed: ask("--warm", str(seed)), cold), strict=True):
            figures["before"][str(seed)] = loss
        jobs = {pool.submit(ask, "--cell", group, name, str(seed)): (group, name, seed) for group, name, seed in cells}
        failed = 0
        for job in as_completed(jobs):
            group, name, seed = jobs[job]
            if job.exception() is not None:
                failed += 1
                print(f"{group:<9}{name:<34} seed {seed}  failed: {job.exception()}", flush=True)
                continue
            kept = {"settings": fingerprint(rows()[group][name]), "commit": commit(), **job.result()}
            figures["cells"].setdefault(group, {}).setdefault(name, {})[str(seed)] = kept
            write_results(options.json, figures)
            loss = "diverged" if kept["loss"] is None else f"{kept['loss']:.4f}"
            print(f"{group:<9}{name:<34} seed {seed}  {loss}  {kept['cloze']:.3f}{kept['cpu_s']:7.0f} s", flush=True)
    print(f"{len(cells) - failed} cells in {time.monotonic() - begin:.0f} s; now: python benchmarks/report.py")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
