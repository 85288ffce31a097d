"""How well Streaming DiLoCo hides its exchanges: beside DiLoCo, with real peers, each behind a link of 100 Mbit/s.

    python benchmarks/rounds/overlap.py [--peers 4] [--fragments 4] [--mbit 100] [--steps 36] [--tau 1] [--cycles 4]
                                 [--only diloco | streaming] [--json [FILE]]

Every peer is a `peer join` in a network namespace of its own; tbf shapes its link in both directions (root). Both
methods train the same model on the same text with the same H, codec and outer step; a *cycle* is H inner steps: one
round of DiLoCo, one round of each fragment of Streaming DiLoCo. The first cycle is not counted.

- idle: the share of time in which a worker had no command, by its own measurement, from the end of a capture to the
  start of its next steps; `not stepping` also counts captures, mixing, evaluation and delays of start.
- peak: the most bytes that a peer sent within any window as long as DiLoCo's exchange, from the counters of its network
  interface: the bandwidth for an exchange in that time.

Exits with 1 if a bar is missed: idle below 3 percent; largest exchange and peak at most 1/F of DiLoCo's (allowing for
fragments of whole blocks that differ in size).
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.common.options import add_json, write_results
from benchmarks.common.shaped_lan import Unavailable, shaped_lan
from benchmarks.rounds.overlap_swarm import INNER, MODEL, Failed, Member, run_swarm, write_text
from optim.config import CodecConfig, DilocoConfig, StreamingConfig
from optim.strategies.interface import RoundInfo
from optim.strategies.registry import build_strategy
from peer.model.layout import FlatLayout

WARM_UP = 1  # cycles: speeds become known, windows grow
IDLE_MAX = 0.03
SLACK = 1.05  # of 1/F, for headers, pings and other messages

Figures = dict[str, Any]


def judge(members: Sequence[Member], first: int, rounds: int, a_cycle: int) -> Figures:
    """Return the figures of the rounds from `first` to the last; `a_cycle` rounds are a cycle."""
    idle, busy, whole, steps, ran_out, shares, exchanges = 0.0, 0.0, 0.0, 0, [], [], []
    for member in members:
        trained = member.rounds("round_trained")
        counted = [r for r in range(first, rounds + 1) if r in trained and r - 1 in trained]
        if not counted:
            raise Failed("a peer missed most rounds: run on a machine without other work")
        wall = sum(trained[r][0] - trained[r - 1][0] for r in counted)
        rested = sum(trained[r][1]["idle_s"] for r in counted)
        shares.append(rested / wall)
        idle, whole = idle + rested, whole + wall
        busy += sum(trained[r][1]["busy_s"] for r in counted)
        steps += sum(trained[r][1]["steps"] for r in counted)
        ran_out += [trained[r][1]["steps_ahead"] == trained[r][1]["steps"] for r in counted]
        phases = {(f["round"], f["phase"]): at for at, f in member.all("phase_entered")}
        exchanges += [phases[r, "vote"] - phases[r, "exchange"] for r in counted if (r, "vote") in phases]
    commits = members[0].rounds("round_committed")
    begin, last = commits[first - 1], commits[rounds]
    cycles = (rounds - first + 1) / a_cycle
    losses = sorted((at, f["loss"]) for member in members for at, f in member.all("val_evaluated"))
    return {
        "idle": idle / whole,
        "idle_worst_peer": max(shares),
        "not_stepping": 1 - busy / whole,
        "ran_out": fmean(ran_out),
        "busy_s": busy / len(members) / cycles,
        "exchange_s": median(exchanges),
        "exchange_bytes": largest_exchange(members, range(first, rounds + 1), a_cycle),
        "cycle_s": (last[0] - begin[0]) / cycles,
        "tokens_per_s": (last[1]["tokens"] - begin[1]["tokens"]) / (last[0] - begin[0]),
        "steps": steps / len(members),
        "loss": losses[-1][1],
        "void_tails": sum(1 for member in members for _ in member.all("steps_ahead_void")),
        "discarded": sum(1 for member in members for _ in member.all("round_discarded")),
    }


def largest_exchange(members: Sequence[Member], rounds: Sequence[int], a_cycle: int) -> float:
    """Return the largest of a cycle's exchanges: for each the median of the bytes that a peer sent, on average, from
    its begin to the next one's."""
    begins = {f["round"]: at for at, f in members[0].all("phase_entered") if f["phase"] == "exchange"}
    sizes: dict[int, list[float]] = {}
    for r in rounds:
        if r in begins and r + 1 in begins:
            sent = sum(member.sent(begins[r + 1]) - member.sent(begins[r]) for member in members)
            sizes.setdefault(r % a_cycle, []).append(sent / len(members))
    return max(median(size) for size in sizes.values())


def peak_bytes(members: Sequence[Member], first: int, window_s: float) -> int:
    """Return the most bytes that any peer sent within a window of that length, after the commit before round
    `first`."""
    peak = 0
    for member in members:
        begin = member.rounds("round_committed")[first - 1][0]
        link = [(at, sent) for at, sent in member.link if at >= begin]
        oldest = 0
        for at, sent in link:
            while at - link[oldest][0] > window_s:
                oldest += 1
            peak = max(peak, sent - link[oldest][1])
    return peak


def least_bytes(config: DilocoConfig | StreamingConfig, peers: int) -> float:
    """Return the coded bytes that a peer must send in a cycle's largest exchange: slices to their owners, results to
    all."""
    strategy = build_strategy(config, CodecConfig(), FlatLayout.of(MODEL), INNER)
    nothing, sizes = torch.empty(0), []
    for fragment in range(config.fragments if isinstance(config, StreamingConfig) else 1):
        coding = strategy.coding(RoundInfo(fragment + 1, 0, 0.0), [nothing, nothing])
        sizes.append(sum(coding.message_bytes(i) + coding.result_bytes(i, peers) for i in range(coding.count)))
    return max(sizes) * (peers - 1) / peers


def measure(options: argparse.Namespace) -> Figures:
    steps, fragments, tau = options.steps, options.fragments, options.tau
    outers: dict[str, tuple[int, DilocoConfig | StreamingConfig, str]] = {
        "diloco": (1, DilocoConfig(steps=steps), ""),
        "streaming": (
            fragments,
            StreamingConfig(steps=steps, fragments=fragments, tau=tau),
            f'method = "streaming"\nfragments = {fragments}\ntau = {tau}\nmix = 0.5\n',
        ),
    }
    report: Figures = {}
    runs: dict[str, tuple[list[Member], int]] = {}
    with tempfile.TemporaryDirectory() as name, shaped_lan(options.peers, options.mbit) as lan:
        folder = Path(name)
        write_text(folder / "text")
        for method, (a_cycle, config, section) in outers.items():
            if options.only not in (None, method):
                continue
            first, rounds = WARM_UP * a_cycle + 1, (WARM_UP + options.cycles) * a_cycle
            members = run_swarm(lan, folder / method, f"{section}steps = {steps}", rounds, options.peers)
            runs[method] = members, first
            figures = report[method] = judge(members, first, rounds, a_cycle)
            figures["least_bytes"] = least_bytes(config, options.peers)
            figures["link_s"] = figures["least_bytes"] * 8e-6 / options.mbit
    report["window_s"] = window_s = next(iter(report.values()))["exchange_s"]
    for method, (members, first) in runs.items():
        report[method]["peak_mbit"] = peak_bytes(members, first, window_s) * 8e-6 / window_s
    return report


def verdicts(report: Figures, fragments: int) -> list[tuple[bool, str]]:
    ours, theirs = report["streaming"], report["diloco"]
    share = ours["least_bytes"] / theirs["least_bytes"]
    bound = share * SLACK
    found = [(ours["idle"] < IDLE_MAX, f"streaming is idle {ours['idle']:.2%} of the time (bar: {IDLE_MAX:.0%})")]
    for figure, words in (("exchange_bytes", "largest exchange"), ("peak_mbit", "peak bandwidth")):
        ratio = ours[figure] / theirs[figure]
        found.append(
            (
                ratio <= bound,
                f"{words}: {ratio:.3f} of DiLoCo's (1/F {1 / fragments:.3f}, the largest fragment"
                f" {share:.3f}, bar {bound:.3f})",
            )
        )
    return found


def print_table(report: Figures) -> None:
    lines = [
        ("worker idle, of the whole time", lambda f: f"{f['idle']:.2%}"),
        ("  of the worst peer", lambda f: f"{f['idle_worst_peer']:.2%}"),
        ("not stepping", lambda f: f"{f['not_stepping']:.2%}"),
        ("rounds made wholly ahead", lambda f: f"{f['ran_out']:.1%}"),
        ("largest exchange, MB sent a peer", lambda f: f"{f['exchange_bytes'] / 1e6:.2f}"),
        ("  limit: as coded", lambda f: f"{f['least_bytes'] / 1e6:.2f}"),
        ("peak bandwidth, Mbit/s", lambda f: f"{f['peak_mbit']:.1f}"),
        ("seconds an exchange", lambda f: f"{f['exchange_s']:.3f}"),
        ("  limit: the bytes on the link", lambda f: f"{f['link_s']:.3f}"),
        ("seconds a cycle of H steps", lambda f: f"{f['cycle_s']:.2f}"),
        ("  limit: its steps", lambda f: f"{f['busy_s']:.2f}"),
        ("tokens/s", lambda f: f"{f['tokens_per_s']:.0f}"),
        ("held-out loss, nats a byte", lambda f: f"{f['loss']:.4f}"),
        ("steps a peer, counted", lambda f: f"{f['steps']:.0f}"),
        ("tails void, rounds discarded", lambda f: f"{f['void_tails']}, {f['discarded']}"),
    ]
    sides = [side for side in ("diloco", "streaming") if side in report]
    print(f"\n{'':36}" + "".join(f"{side:>14}" for side in sides))
    for label, show in lines:
        print(f"{label:36}" + "".join(f"{show(report[side]):>14}" for side in sides))
    print(f"(peak: the busiest {report['window_s']:.3f} s)")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=int, default=4)
    parser.add_argument("--fragments", type=int, default=4)
    parser.add_argument("--mbit", type=float, default=100.0, help="of each link, each way")
    parser.add_argument("--steps", type=int, default=36, help="H")
    parser.add_argument("--tau", type=int, default=1)
    parser.add_argument("--cycles", type=int, default=4, help="counted ones")
    parser.add_argument("--only", choices=["diloco", "streaming"])
    add_json(parser, "overlap")
    options = parser.parse_args()
    if options.peers < 2 or options.cycles < 2 or options.mbit <= 0 or options.fragments < 1:
        parser.error("give at least 2 peers, 2 cycles, 1 fragment and a link that carries something")
    try:
        StreamingConfig(steps=options.steps, fragments=options.fragments, tau=options.tau)
    except ValueError as error:
        parser.error(str(error))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("the benchmark was ended"))  # with its children
    load = os.getloadavg()[0]
    print(
        f"{options.peers} peers at {options.mbit:g} Mbit/s each way, {FlatLayout.of(MODEL).numel:,} parameters,"
        f" H {options.steps}, F {options.fragments}, tau {options.tau}, int8;"
        f" {os.cpu_count()} cores (load {load:.1f} before we began)"
    )
    try:
        report = measure(options)
    except (Failed, Unavailable) as error:
        sys.exit(f"the benchmark failed: {error}")
    print_table(report)
    found = verdicts(report, options.fragments) if options.only is None else []
    for passed, words in found:
        print(f"{'ok  ' if passed else 'MISS'} {words}")
    if options.json:
        settings = {name: value for name, value in vars(options).items() if name != "json"}
        write_results(options.json, {**settings, **report, "verdicts": found})
    return 0 if all(passed for passed, _ in found) else 1


if __name__ == "__main__":
    sys.exit(main())
