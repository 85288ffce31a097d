"""One averaging round among real processes: ours, beside hivemind's, beside what the machine allows.

    python benchmarks/rounds/averaging.py --peers 4 --params 25000000 --bits 8,16 --rival hivemind [--fault kill]
                                   [--state disk] [--json [FILE]]

Every peer is a process with one torch thread and a random pseudo-gradient; there is no training. Everything runs on
127.0.0.1, so times are those of the software.

Ours is a whole round of the engine, commit to commit: plan, encode, commitments, exchange, merge, outer step (learning
rate 1, no momentum: theta before minus theta after is the merged update), state hash, vote, commit. hivemind's is
`averager.step()` with all peers ready; its state is not hashed, voted on or compared. All gradients have the same norm,
so that our clipping changes nothing and the right result is the plain mean, here in float64.

With `--fault` the last peer is killed or frozen in the middle of the last round's exchange: ours by BARNRAISE_FAULT
after its first slice has left, hivemind's after half the time of its other rounds.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.common.children import START_S, Child, ChildFailed, open_group
from benchmarks.common.options import add_json, write_results
from benchmarks.rounds.averaging_data import float64_mean, max_error
from benchmarks.rounds.averaging_limits import measure_limits

CODECS = {8: "int8", 16: "fp16"}
RIVALS = {8: ("uniform8", "blockwise8"), 16: ("float16",)}
SIGNALS = {"kill": signal.SIGKILL, "freeze": signal.SIGSTOP}
ROUND_S = 90.0
FAULTS_FROM = 2  # of the counts between commits: a round uses the memory of those before
Figures = dict[str, Any]


def run_ours(options: argparse.Namespace, bits: int, rounds: int, folder: Path) -> Figures:
    codec, peers, fault = CODECS[bits], options.peers, options.fault
    starts = []
    for number in range(peers):
        env = {"BENCHMARK_FAULT": "1"} if fault else {}
        if fault and number == peers - 1:
            action = {"kill": "kill", "freeze": "stop"}[fault]
            env["BARNRAISE_FAULT"] = f"{action}:during_exchange:{rounds}"
        arguments = (number, options.params, codec, rounds, options.state, folder)
        starts.append(partial(Child, "benchmarks.rounds.averaging_peer", *arguments, env=env))
    with open_group(starts) as (children, group):
        survivors = range(peers - 1) if fault else range(peers)
        reports = [children[number].read(ROUND_S + 10.0 * rounds) for number in survivors]
    return {"codec": codec, **ours_of(reports, group, rounds, fault, folder)}


def ours_of(
    reports: Sequence[Figures], group: Sequence[Figures], rounds: int, fault: str | None, folder: Path
) -> Figures:
    """Return the figures of a run that all those peers have finished. A round that a peer missed, since it was late
    with a vote, is over for it once it has fetched the state; it may skip one so."""
    commits = [max(at for r in reports if (at := r["seconds"].get(str(n + 1)))) for n in range(rounds)]
    took = [later - earlier for earlier, later in pairwise(commits)]  # without the first round
    merged: list[list[str]] = [
        next((who for r in reports if (who := r["merged"].get(str(n + 1)))), []) for n in range(rounds)
    ]
    faults = [count for report in reports for count in report["faults"][FAULTS_FROM:]]
    numbers = {hello["peer"]: number for number, hello in enumerate(group)}
    files = {r["peer"]: folder / f"ours-{numbers[r['peer']]}" for r in reports if r["hash"]}
    return {
        "seconds": took[:-1] if fault else took,
        "fault_seconds": took[-1] if fault else None,
        "wire_bytes": sum(report["wire_bytes"] for report in reports) / rounds,
        "cpu_s": sum(report["cpu_s"] for report in reports) / len(reports),
        "faults": median(faults) if faults else None,
        "identical": len({r["state_hash"] for r in reports}) == 1 == len({r["hash"] for r in reports if r["hash"]}),
        "agreed": f"{len(reports)} of {len(group)} committed",
        "incomplete": sum(len(who) < len(group) for who in (merged[:-1] if fault else merged)),
        "merged": sorted(numbers[peer] for peer in merged[-1]),
        "files": list(files.values()),
    }


def run_hivemind(peers: int, numel: int, compression: str, rounds: int, fault: str | None, folder: Path) -> Figures:
    with ExitStack() as stack:
        children: list[Child] = []
        bootstrap: list[str] = []
        for number in range(peers):
            child = Child("benchmarks.rounds.averaging_hivemind", number, numel, compression, peers, folder, *bootstrap)
            stack.callback(child.end)
            children.append(child)
            bootstrap = bootstrap or child.read(START_S)["addresses"][:1]
        for child in children[1:]:
            child.read(START_S)
        took: list[float] = []
        cpu: list[float] = []
        reports: list[dict[str, Any]] = []
        for number in range(rounds):
            for word in ("fill in", "go"):
                for child in children:
                    child.tell({"do": word})
                if word == "fill in":
                    for child in children:
                        child.read(START_S)
            if fault and number == rounds - 1:
                time.sleep(median(took) / 2)
                children.pop().signal(SIGNALS[fault])  # ended with the others
            reports = [child.read(ROUND_S) for child in children]
            took.append(max(r["ended"] for r in reports) - min(r["began"] for r in reports))
            cpu.append(sum(report["cpu_s"] for report in reports) / len(reports))
    failures = sorted({report["failure"].partition(":")[0] for report in reports if report["failure"]})
    return {
        "codec": compression,
        "seconds": took[1:-1] if fault else took[1:],
        "fault_seconds": took[-1] if fault else None,
        "wire_bytes": sum(report["wire_bytes"] for report in reports) / rounds,
        "cpu_s": median(cpu[1:]),
        "identical": len({report["hash"] for report in reports}) == 1,
        "agreed": failures[0] if failures else f"{len(reports)} report success",
        "files": [folder / f"hivemind-{number}" for number in range(len(reports))],
    }


def judge(figures: Figures, means: dict[str, Any], peers: int, numel: int) -> Figures:
    """Replace the saved results by their errors against each mean. Without a fault the one of all is that of those
    which the last round has merged."""
    files, merged = figures.pop("files"), figures.pop("merged", range(peers))
    if "survivors" not in means and len(merged) < peers:
        means = {"all": float64_mean(merged, numel)}
    for name, mean in means.items():
        figures[f"error_{name}"] = max(max_error(file, mean) for file in files)
    figures["median_s"], figures["fastest_s"] = median(figures["seconds"]), min(figures["seconds"])
    return figures


def measure(options: argparse.Namespace, bits: int, means: dict[str, Any]) -> dict[str, Figures]:
    """Both sides at one width, and the machine's limits. Of hivemind's codecs of that width the faster one is kept;
    with a fault only the first is tried, as a round may take it a minute."""
    peers, numel = options.peers, options.params
    rounds = min(options.rounds, 4) if options.fault else options.rounds
    ideal = 2 * (peers - 1) * numel * bits / 8
    sides: dict[str, Figures] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        limits = measure_limits(int(ideal), 20 * numel * peers)
        sides["ours"] = judge(run_ours(options, bits, rounds, folder), means, peers, numel)
        if options.rival == "hivemind":
            tried = []
            for compression in RIVALS[bits][: 1 if options.fault else None]:
                tried.append(
                    judge(run_hivemind(peers, numel, compression, rounds, options.fault, folder), means, peers, numel)
                )
            sides["hivemind"] = min(tried, key=lambda figures: figures["median_s"])
            sides["hivemind"]["tried"] = {f["codec"]: f["median_s"] for f in tried}
    for figures in sides.values():
        figures["of_ideal_wire"] = figures["wire_bytes"] / ideal
        figures["rounds"] = rounds
    return {**sides, "limits": {"ideal_wire_bytes": ideal, **limits}}


def print_table(bits: int, results: dict[str, Figures], fault: str | None) -> None:
    limits = results["limits"]
    print(f"\n{bits} bits, ideal wire {limits['ideal_wire_bytes'] / 1e6:.0f} MB a round")
    lines: list[tuple[str, Callable[[Figures], str]]] = [
        ("codec", lambda f: f["codec"]),
        ("seconds a round, median", lambda f: f"{f['median_s']:.3f}"),
        ("  fastest", lambda f: f"{f['fastest_s']:.3f}"),
        ("CPU s a peer and round", lambda f: f"{f['cpu_s']:.3f}"),
        ("  page faults", lambda f: f"{f['faults']:,.0f}" if f.get("faults") is not None else "-"),
    ]
    if fault:
        lines += [
            (f"seconds, a peer {'killed' if fault == 'kill' else 'frozen'}", lambda f: f"{f['fault_seconds']:.1f}"),
            ("survivors say", lambda f: f["agreed"]),
            ("survivors bit-identical", lambda f: "yes" if f["identical"] else "NO"),
            ("max error, mean of survivors", lambda f: f"{f['error_survivors']:.3g}"),
            ("max error, mean of all", lambda f: f"{f['error_all']:.3g}"),
        ]
    else:
        lines += [
            ("wire MB a round, all peers", lambda f: f"{f['wire_bytes'] / 1e6:.1f}"),
            ("  of ideal", lambda f: f"{f['of_ideal_wire']:.3f}"),
            ("max error against the mean", lambda f: f"{f['error_all']:.3g}"),
            ("all peers bit-identical", lambda f: "yes" if f["identical"] else "NO"),
            ("rounds merged without some", lambda f: f"{f.get('incomplete', '-')}"),
        ]
    sides = [side for side in ("ours", "hivemind") if side in results]
    print(f"{'':32}" + "".join(f"{side:>24}" for side in sides))
    for label, show in lines:
        print(f"{label:32}" + "".join(f"{show(results[side])[:60]:>24}" for side in sides))
    print(
        f"limits: the same bytes over one loopback TCP connection {limits['tcp_s']:.3f} s;"
        f" all peers' gradients and states read and written once {limits['memory_s']:.3f} s"
    )
    if "hivemind" in results and not fault:
        print(f"ours is {results['hivemind']['median_s'] / results['ours']['median_s']:.2f} times as fast")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=int, default=4)
    parser.add_argument("--params", type=int, default=25_000_000)
    parser.add_argument("--bits", default="8,16", help="8, 16 or both")
    parser.add_argument("--rounds", type=int, default=6, help="the first is not counted")
    parser.add_argument("--rival", choices=["hivemind", "none"], default="none")
    parser.add_argument("--state", choices=["memory", "disk"], default="memory", help="where our outer state lies")
    parser.add_argument("--fault", choices=list(SIGNALS))
    add_json(parser, "averaging")
    options = parser.parse_args()
    widths = [int(bits) for bits in options.bits.split(",") if bits.isdigit()]
    if not widths or any(bits not in CODECS for bits in widths):
        parser.error("--bits takes 8, 16 or 8,16")
    if options.peers < (3 if options.fault else 2) or options.rounds < 3 or options.params < 1:
        parser.error("give at least 2 peers (3 with a fault, else no majority survives), 3 rounds and 1 parameter")
    means = {"all": float64_mean(range(options.peers), options.params)}
    if options.fault:
        means["survivors"] = float64_mean(range(options.peers - 1), options.params)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("the benchmark was ended"))  # with its children
    report: dict[str, Any] = {"peers": options.peers, "params": options.params, "fault": options.fault}
    report["state"] = options.state
    report |= {"cores": os.cpu_count(), "load": os.getloadavg()[0], "bits": {}}
    load = f"load {report['load']:.1f}"
    print(f"{options.peers} peers, {options.params:,} parameters, {report['cores']} cores ({load} before we began)")
    try:
        for bits in widths:
            report["bits"][str(bits)] = results = measure(options, bits, means)
            print_table(bits, results, options.fault)
    except ChildFailed as error:
        sys.exit(f"the benchmark failed: {error}")
    if options.json:
        write_results(options.json, report)


if __name__ == "__main__":
    main()
