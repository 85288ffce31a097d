"""How much of the time a group makes progress while its machines fail, in both modes, beside the design's model.

    python benchmarks/agreement/availability.py [--members 3] [--seconds 20000] [--seeds 1] [--minutes 9] [--more]
                                                [--json [FILE]]

The real core (`swarm/protocol/agreement`) in the simulator of `tests/simulation`, in virtual time, with all safety
invariants checked at every step. Members fail after 600 s and are repaired after 120 s, the coordinator is away 10, 1
or 0.1 % of the time (repaired after 120 s too), all exponential; 0 or 20 % of the members' repairs bring another disk.
The operator acts 2 h (or 10 min) after the coordinator has told that the group cannot go on: `peer regroup` every 30 s
until a round is committed, with `--undo` where it was asked for; after ten minutes of that the run is lost and another
one begins. `undo_s` is 100 s and all other times are the defaults
(`poll_s` 1 s, a lost quorum after three rounds). Training takes 9.6 s, so a round without faults takes 9.9 to 10.1 s.

Progress is committed rounds x 10 s / time, as the model counts. A second figure tells what stays: rounds in the history
that leads to the last head. ± is the standard error over windows of 10,000 s.

`--minutes` begins no more schedules after so long; `--more` goes on with what the JSON file holds. Exits with 1 where
an invariant breaks, after naming the schedule.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.agreement import availability_cells as table  # noqa: E402
from benchmarks.common.options import RESULTS, add_json, write_results  # noqa: E402
from tests.simulation.churn.measure import WINDOW_S, Availability, LongSchedule  # noqa: E402
from tests.simulation.churn.world import Churn  # noqa: E402
from tests.simulation.invariants import Broken  # noqa: E402

MEMBERS = (2, 3, 4, 5, 8)
TIMELINE = 40  # lines shown of a schedule that breaks an invariant


def measure(key: table.Key, seed: int, seconds: float) -> Availability:
    """Run one schedule. Raises `Broken` after telling how it came to that."""
    mode, members, down, lost, operator_s = key
    schedule = LongSchedule(Churn(members, mode, down, lost, operator_s), seed)  # type: ignore[arg-type]
    try:
        return schedule.measure(seconds)
    except Broken:
        print("\n".join(schedule.world.timeline[-TIMELINE:]))
        print(f"BROKEN: {key}, seed {schedule.world.seed}, {seconds:.0f} s, at {schedule.world.now:.1f} s")
        raise


def add(cell: table.Cell, found: Availability) -> None:
    """Add what a schedule came to."""
    cell["seeds"] += 1
    cell["seconds"] += found.seconds
    cell["windows"] += len(found.committed)
    cell["committed"] += sum(found.committed)
    cell["squares"] += sum(count * count for count in found.committed)
    for name in ("kept", "starts", "undoing", "calls", "untold", "lost_runs"):
        cell[name] += getattr(found, name)
    cell["longest_s"] = round(max(cell["longest_s"], found.longest_s), 1)


def show(cells: list[table.Cell]) -> None:
    lines = [list(table.HEAD), *table.rows(cells)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(table.HEAD))]
    for line in lines:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)))


def known(path: Path) -> list[table.Cell]:
    """Return the cells that an earlier run has written."""
    return list(json.loads(path.read_text())["figures"]["cells"]) if path.exists() else []


def windows(text: str) -> float:
    """Return seconds that make whole windows."""
    seconds = float(text)
    if seconds <= 0 or seconds % WINDOW_S:
        raise argparse.ArgumentTypeError(f"{text} s make no whole windows: choose a multiple of {WINDOW_S:.0f}")
    return seconds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=windows, default=20_000.0, help="of one schedule (default 20000)")
    parser.add_argument("--members", type=int, action="append", choices=MEMBERS, help="only groups of so many")
    parser.add_argument("--seeds", type=int, default=1, help="schedules a cell")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no schedule after so long")
    parser.add_argument("--more", action="store_true", help="add to what the JSON file holds")
    add_json(parser, "availability")
    options = parser.parse_args()
    gc.set_threshold(50_000)  # a world makes few cycles, and looks for them take a tenth of the time
    file = options.json or RESULTS / "availability.json"
    cells = {table.key_of(cell): cell for cell in (known(file) if options.more else [])}
    began = time.monotonic()
    done: dict[tuple[int, tuple[Any, ...]], Availability] = {}
    todo = [(seed, key) for seed in range(1, options.seeds + 1) for key in table.keys(options.members or MEMBERS)]
    for seed, key in todo:
        cell = cells.setdefault(key, table.empty(key))
        if cell["seeds"] >= seed:
            continue
        if time.monotonic() - began > 60 * options.minutes:
            print("time is over: go on with --more")
            break
        try:
            found = done.get((seed, key[:-1]))
            if key[-1] != table.SOON_S or found is None or found.longest_s > table.SOON_S:
                found = measure(key, seed, options.seconds)  # else nobody could act sooner: it is the same schedule
            gc.collect()  # a world is full of cycles
            done[seed, key[:-1]] = found
            add(cell, found)
        except Broken as error:
            print(f"{error}")
            return 1
        print(f"{key} seed {seed}: {table.progress(cell):.1f} %", flush=True)
        if options.json:
            write_results(options.json, figures(cells))
    show(list(cells.values()))
    return 0


def figures(cells: dict[table.Key, table.Cell]) -> dict[str, Any]:
    return {"round_s": table.ROUND_S, "window_s": WINDOW_S, "cells": [cell for cell in cells.values() if cell["seeds"]]}


if __name__ == "__main__":
    sys.exit(main())
