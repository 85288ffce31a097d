"""`python -m tests.simulation`: many schedules; or one of them, shrunk and told as a timeline; or the mutation table.

The exit status is 1 if anything was found."""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

from tests.simulation.campaign import FOUND_MAX, run_campaign
from tests.simulation.mutations import table
from tests.simulation.seeds.shrink import keep, shrink
from tests.simulation.setups import DRIVEN, LARGE, SETUPS

SECONDS_A_DAY = 86400
SEEDS_A_DAY = 1_000_000


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--schedules", type=int, default=5000)
    parser.add_argument("--seed", type=int, help="the first seed; without it, that of the day")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument(
        "--setup", action="append", choices=sorted({**SETUPS, **LARGE, **DRIVEN}), help="only these kinds of groups"
    )
    parser.add_argument("--shrink", metavar="SEED", type=int, help="shrink this seed of --setup and print its timeline")
    parser.add_argument("--keep", metavar="NAME", help="with --shrink: keep it among the seeds that the tests run")
    parser.add_argument("--mutations", metavar="FOLDER", type=Path, help="write the mutation table there")
    parser.add_argument(
        "--seconds", type=float, default=table.SEARCHED_S, help="with --mutations: of processor time for each rule"
    )
    return parser.parse_args()


def main() -> int:
    options = parsed()
    if os.environ.get("PYTHONHASHSEED") != "0":  # the driver goes through sets of names: a seed must tell all
        os.execve(sys.executable, sys.orig_argv, {**os.environ, "PYTHONHASHSEED": "0"})
    say = sys.stdout.write
    if options.shrink is not None:
        least = shrink(options.setup[0], options.shrink)
        if least is None:
            say(f"{options.setup[0]} {options.shrink}: nothing breaks\n")
            return 0
        say("\n".join(least.timeline) + f"\n{least.what}\nwithout faults {list(least.without)}\n")
        if options.keep:
            say(f"kept as {keep(least, options.keep)}\n")
        return 1
    if options.mutations is not None:
        return table.write_table(options.mutations, options.schedules, options.workers, options.seconds)
    seed = options.seed if options.seed is not None else int(time.time()) // SECONDS_A_DAY * SEEDS_A_DAY
    say(f"seeds from {seed}\n")
    tally, seconds = run_campaign(options.schedules, seed, options.workers, options.setup or ())
    for found in tally.found[:FOUND_MAX]:
        say(f"FOUND {found.what}\n  python -m tests.simulation --setup {found.setup} --shrink {found.seed}\n")
    say(
        f"{tally.schedules} schedules in {seconds:.0f} s ({tally.schedules / seconds:.1f}/s),"
        f" {tally.driven} of the driver, {tally.heads} heads, {len(tally.found)} found; {tally.coverage}\n"
    )
    say(f"{tally.excused}\n")
    if tally.excused_too_often:
        say(f"FOUND too often nothing is promised: {', '.join(tally.excused_too_often)}\n")
    return 1 if tally.found or tally.excused_too_often else 0


if __name__ == "__main__":
    sys.exit(main())
