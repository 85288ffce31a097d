"""The cost of a pipeline over the network, compared with the same model in one process.

    python benchmarks/pipelines/swarm.py [--stages 2 3 4] [--mbit 200 500] [--delay-ms 10] [--seconds 10]
                                         [--only dense | thin] [--json [FILE]]

Every stage is a process with a host of its own and a compute worker of one thread (`benchmarks.pipelines.swarm_stage`):
the real server, calls, codec, transport and worker. The table of replicas is fixed, one a stage; nothing is merged and
no optimizer step is made, neither here nor in the one process. Micro-batches go forward and backward without a pause;
the clock runs between two that come back.

Models of hidden size 1024 (`benchmarks.pipelines.swarm_setting`): `dense` has four blocks with the arithmetic of such
models, and int8 between stages; `thin` a block a stage with next to none, and fp32 between them, so that its link can
be the limit, as where stages have fast devices; it runs on links alone, and on a slower one, too. Links (root): every
stage in a network namespace, tbf each way, packets `--delay-ms` late from stage to stage.

- CPU us a token: of all processes. Overhead: against one process of plain torch with one thread, as many at a time as
  there are cores, so that both sides share caches and memory alike; both are measured in turns, as a machine's speed
  changes within seconds, and on loopback the middle one of nine such pairs counts. Network: the network processes'
  share.
- busy: the busiest worker's CPU time by the clock. All stages share this machine's cores.
- allowed: the least of what the slowest stage allows, by its worker's CPU time a token; what the cores allow that other
  work on this machine and the carriers of delayed frames left, by the CPU time of all our processes; and what the link
  allows, by the bytes of a token that the kernel counted in its busiest direction. `reached`: the share of it.
- bytes: sent by the hosts, a token, hop and direction, framing included, against the values alone.
- link: how long the bytes in the busiest direction take at the link's rate, as a share of the time.

Exits with 1 if a bar is missed: overhead below 10 percent for `dense` on loopback; 85 percent reached, by `dense`
everywhere and by `thin` where its link is the limit.
"""

from __future__ import annotations

import argparse
import math
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.common.children import ChildFailed
from benchmarks.common.options import add_json, write_results
from benchmarks.common.shaped_lan import Unavailable, shaped_lan
from benchmarks.pipelines.swarm_runs import CORES, Figures, Link, open_whole, run_chain
from benchmarks.pipelines.swarm_setting import DENSE, SETTINGS, THIN, Setting

OVERHEAD_MAX: Final = 0.10
REACHED_MIN: Final = 0.85
PAIRS: Final = 9
SLOW_MBIT: Final = 50.0  # the link of `thin` is the limit there even where two cores are all that there is


def measure(setting: Setting, stages: Sequence[int], links: Sequence[Link | None], seconds: float) -> Figures:
    for count in sorted({setting.model(count).layers: count for count in stages}.values()):
        with open_whole(setting, count, 1) as one:
            print_whole(setting, count, one.run(seconds / 2))
    print(
        f"{'':7}{'stages':>7}{'Mbit/s':>8}{'tokens/s':>10}{'CPU us':>8}{'overhead':>10}{'network':>9}{'busy':>7}"
        f"{'allowed':>9}{'by':>7}{'reached':>9}{'bytes':>8}{'ideal':>7}{'link':>7}{'retries':>9}"
    )
    rows = []
    for link in links:
        for count in stages:
            with open_whole(setting, count, CORES) as crowd:
                pairs = 1 if link else PAIRS
                found = run_chain(setting, count, link, seconds if link else seconds / 2, crowd, pairs)
            found.sort(key=lambda row: float(row["overhead"]))
            row = found[len(found) // 2] | {"overheads": [row["overhead"] for row in found]}
            rows.append(row)
            print_row(row)
    return {"rows": rows}


def print_whole(setting: Setting, stages: int, one: Figures) -> None:
    print(
        f"{setting.name}, {setting.model(stages).layers} blocks in one process alone:"
        f"{one['tokens_per_s']:7.0f} tokens/s,{one['cpu_us']:6.0f} CPU us a token",
        flush=True,
    )


def print_row(row: Figures) -> None:
    mbit = "-" if row["mbit"] is None else f"{row['mbit']:g}"
    network = sum(row["network_cpu_us"]) / row["cpu_us"]
    print(
        f"{row['setting']:7}{row['stages']:7}{mbit:>8}{row['tokens_per_s']:10.0f}{row['cpu_us']:8.0f}"
        f"{row['overhead']:+10.1%}{network:9.1%}{max(row['device_busy']):7.0%}{row['allowed'][row['limit']]:9.0f}"
        f"{row['limit']:>7}{row['reached']:9.1%}{row['bytes_a_hop']:8.0f}{row['ideal_bytes']:7.0f}"
        f"{row['link_share']:7.1%}{row['retried']:9}",
        flush=True,
    )


def verdicts(rows: Sequence[Figures]) -> list[tuple[bool, str]]:
    found = []
    for row in rows:
        place = "loopback" if row["mbit"] is None else f"{row['mbit']:g} Mbit/s"
        name = f"{row['setting']}, {row['stages']} stages, {place}"
        if row["setting"] == DENSE.name and row["mbit"] is None:
            all_of_them = ", ".join(f"{each:.1%}" for each in row["overheads"])
            words = f"{name}: overhead {row['overhead']:.1%} of {all_of_them} (bar {OVERHEAD_MAX:.0%})"
            found.append((row["overhead"] < OVERHEAD_MAX, words))
        if row["setting"] == DENSE.name or row["limit"] == "link":
            words = f"{name}: {row['reached']:.1%} of what the {row['limit']} allows (bar {REACHED_MIN:.0%})"
            found.append((row["reached"] >= REACHED_MIN, words))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stages", type=int, nargs="+", default=[2, 3, 4], choices=[2, 3, 4])
    parser.add_argument("--mbit", type=float, nargs="*", default=[200.0, 500.0], help="of links; none: loopback alone")
    parser.add_argument("--delay-ms", type=float, default=10.0, help="from one stage to another; twice that and back")
    parser.add_argument("--seconds", type=float, default=10.0, help="of each run")
    parser.add_argument("--only", choices=list(SETTINGS))
    add_json(parser, "swarm")
    options = parser.parse_args()
    values = (options.seconds, options.delay_ms, *options.mbit)
    if not all(map(math.isfinite, values)) or options.delay_ms < 0 or min((options.seconds, *options.mbit)) <= 0:
        parser.error("seconds and links must be above 0, delays not below")
    if options.mbit:
        try:
            with shaped_lan(2, options.mbit[0], options.delay_ms):
                pass
        except Unavailable as error:
            parser.error(f"{error}; or give --mbit without a value, for loopback alone")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("The benchmark was ended."))  # and so are its children
    load = os.getloadavg()[0]
    print(f"{CORES} cores (load {load:.1f} before we began); packets {options.delay_ms:g} ms late on links\n")
    mbits: dict[str, list[float]] = {DENSE.name: options.mbit, THIN.name: [SLOW_MBIT, *options.mbit]}
    report: dict[str, Any] = {name: value for name, value in vars(options).items() if name != "json"}
    try:
        for setting in SETTINGS.values():
            if options.only in (None, setting.name):
                links = [Link(mbit, options.delay_ms) for mbit in mbits[setting.name] if options.mbit]
                first = [None] if setting is DENSE else []
                report[setting.name] = measure(setting, options.stages, [*first, *links], options.seconds)
                print()
    except (ChildFailed, Unavailable) as error:
        sys.exit(f"The benchmark broke off: {error}")
    found = verdicts([row for name in SETTINGS if name in report for row in report[name]["rows"]])
    if not found:
        parser.error(f"{options.only} runs on links alone: give --mbit")
    for passed, words in found:
        print(f"{'ok  ' if passed else 'MISS'} {words}")
    if options.json:
        write_results(options.json, report | {"verdicts": found})
    return 0 if all(passed for passed, _ in found) else 1


if __name__ == "__main__":
    sys.exit(main())
