"""What a pipeline over the network costs, beside the same model in one process.

    python benchmarks/swarm.py [--stages 2 3 4] [--mbit 200 500] [--delay-ms 10] [--seconds 15] [--only dense | thin]
                               [--json FILE]

Every stage is a process with a host of its own and a compute worker of one thread (`benchmarks.swarm_stage`): the real
station, calls, codec, transport and worker. The table of who has which stage is fixed, one replica a stage; nothing is
merged and no optimizer step is made, neither here nor in the one process. Micro-batches go forward and backward without
a pause; the clock runs between two that come back.

Models of hidden size 1024 (`benchmarks.swarm_setting`): `dense` has four blocks with the arithmetic of such models, and
int8 between stages; `thin` a block a stage with next to none, and fp32 between them, so that its link can be the limit,
as where stages have fast devices. Links (root): every stage in a network namespace, tbf each way, packets `--delay-ms`
late from stage to stage.

- CPU us a token: of all processes. Overhead: against one process of plain torch with one thread, as many at a time as
  there are cores, so that both sides share caches and memory alike. Network: the network processes' share.
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
import json
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.children import ChildFailed
from benchmarks.shaped_lan import Unavailable
from benchmarks.swarm_runs import CORES, Figures, Link, run_chain, run_whole
from benchmarks.swarm_setting import DENSE, SETTINGS, Setting

OVERHEAD_MAX: Final = 0.10
REACHED_MIN: Final = 0.85


def measure(setting: Setting, stages: Sequence[int], links: Sequence[Link | None], seconds: float) -> Figures:
    whole = {}
    for count in stages:
        model = setting.model(count)
        if model not in whole:
            whole[model] = {copies: run_whole(setting, count, copies, seconds / 2) for copies in {1, CORES}}
            for copies, one in sorted(whole[model].items()):
                print(
                    f"{setting.name}, {model.layers} blocks in one process, {copies} at a time:"
                    f"{one['tokens_per_s']:7.0f} tokens/s,{one['cpu_us']:6.0f} CPU us a token",
                    flush=True,
                )
    print(
        f"{'':7}{'stages':>7}{'Mbit/s':>8}{'tokens/s':>10}{'CPU us':>8}{'overhead':>10}{'network':>9}{'busy':>7}"
        f"{'allowed':>9}{'by':>7}{'reached':>9}{'bytes':>8}{'ideal':>7}{'link':>7}{'retries':>9}"
    )
    rows = []
    for link in links:
        for count in stages:
            row = run_chain(setting, count, link, seconds)
            alone, crowded = (whole[setting.model(count)][copies]["cpu_us"] for copies in (1, CORES))
            row |= {"overhead": row["cpu_us"] / crowded - 1, "overhead_alone": row["cpu_us"] / alone - 1}
            rows.append(row)
            print_row(row)
    return {"whole": [one for copies in whole.values() for one in copies.values()], "rows": rows}


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
            words = f"{name}: overhead {row['overhead']:.1%} (bar {OVERHEAD_MAX:.0%})"
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
    parser.add_argument("--seconds", type=float, default=15.0, help="of each run")
    parser.add_argument("--only", choices=list(SETTINGS))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.seconds <= 0 or options.delay_ms < 0 or any(mbit <= 0 for mbit in options.mbit):
        parser.error("seconds and links must be above 0, delays not below")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("The benchmark was ended."))  # and so are its children
    load = os.getloadavg()[0]
    print(f"{CORES} cores (load {load:.1f} before we began); packets {options.delay_ms:g} ms late on links\n")
    links = [None, *(Link(mbit, options.delay_ms) for mbit in options.mbit)]
    report: dict[str, Any] = {"load": load, **vars(options), "json": None}
    try:
        for setting in SETTINGS.values():
            if options.only in (None, setting.name):
                report[setting.name] = measure(setting, options.stages, links, options.seconds)
                print()
    except (ChildFailed, Unavailable) as error:
        sys.exit(f"The benchmark broke off: {error}")
    found = verdicts([row for name in SETTINGS if name in report for row in report[name]["rows"]])
    for passed, words in found:
        print(f"{'ok  ' if passed else 'MISS'} {words}")
    if options.json:
        options.json.write_text(json.dumps(report | {"verdicts": found}, indent=1) + "\n")
    return 0 if all(passed for passed, _ in found) else 1


if __name__ == "__main__":
    sys.exit(main())
