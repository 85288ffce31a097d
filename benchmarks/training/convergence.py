"""Loss against wire bytes: every method, 8 workers, a small byte model, the text of the standard library.

    python benchmarks/training/convergence.py [--seeds 2] [--steps 600] [--jobs 2] [--only NAME ...]
                                     [--json [FILE]] [--plot FILE]

A model of 117 thousand parameters is trained for 480 steps by one worker alone (DiLoCo's paper pretrains so), then for
600 steps by each method. All use AdamW lr 1e-3, betas .9/.95, decay .1, gradients clipped to norm 1, and 8 samples a
worker and step; DiLoCo's outer lr is .7 and its momentum .9; streaming has four fragments, sent two steps ahead. No
method's settings are tuned. DDP at lr 3e-3, near its best, is in the table as the limit.

Methods of the network run as their strategies; NoLoCo and PowerSGD run as the papers' algorithms.

"sent" is the payload a worker sends, as coded; "received" all results that come back to it, its own message included
where messages are gathered; "saves" is the size of the fp32 gradients of every step over what the worker sent. Losses
are nats a byte on held-out files, the mean of the seeds.

Exits with 1 if a verdict, printed at the end, fails.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.common.options import add_json, write_results
from benchmarks.training.convergence_training import BATCH, MODEL, WORKERS, AnyRun, Run, SimulatedRun, train, warm_up
from optim.config import (
    AllReduceConfig,
    CodecConfig,
    DemoConfig,
    DilocoConfig,
    EagerConfig,
    LionConfig,
    SparseLocoConfig,
    StreamingConfig,
)
from peer.model.layout import FlatLayout

PICTURE = Path(__file__).resolve().parent / "convergence.png"
FP32 = CodecConfig(up="fp32", down="fp32")
FOUR_BITS = CodecConfig(up="int4", down="int4")
EIGHT_BITS = {"codec": "int8", "codec_down": "int8"}  # NoLoCo sends the weights too: 4 bits would change those
OUTER: dict[str, Any] = {"lr": 0.7, "momentum": 0.9}
MILDER: dict[str, Any] = {"lr": 0.3, "momentum": 0.5}
STREAM: dict[str, Any] = {"steps": 60, "fragments": 4, "tau": 2, **OUTER}

SINGLE, DDP = "single worker", "DDP"
H20, H60, H60_FP32 = "DiLoCo H=20 4-bit", "DiLoCo H=60 4-bit", "DiLoCo H=60 fp32"
STREAMING, STREAMING_MIXED = "streaming H=60 alpha 0 4-bit", "streaming H=60 alpha .5 4-bit"

Row = dict[str, Any]


def runs() -> dict[str, AnyRun]:
    """Return every method of the table."""
    quarters = quarter_fragments(list(FlatLayout.of(MODEL).slots))
    all_workers = AllReduceConfig(batch=WORKERS * BATCH)
    return {
        DDP: Run(all_workers, FP32),
        "DDP lr 3e-3": Run(all_workers, FP32, {"lr": 3e-3}),
        H20: Run(DilocoConfig(steps=20, **OUTER), FOUR_BITS),
        H60_FP32: Run(DilocoConfig(steps=60, **OUTER), FP32),
        H60: Run(DilocoConfig(steps=60, **OUTER), FOUR_BITS),
        STREAMING: Run(StreamingConfig(mix=0.0, **STREAM), FOUR_BITS, fragments=quarters),
        STREAMING_MIXED: Run(StreamingConfig(mix=0.5, **STREAM), FOUR_BITS, fragments=quarters),
        "eager H=20 lr .3 m .5 4-bit": Run(EagerConfig(steps=20, **MILDER), FOUR_BITS),
        "NoLoCo H=20 8-bit": SimulatedRun("gossip", {"H": 20, **EIGHT_BITS}),
        "SparseLoCo H=10 k=128 2-bit": Run(SparseLocoConfig(steps=10, topk=128, lr=1.0)),
        "DeMo k=32": Run(DemoConfig(topk=32), inner={"weight_decay": 0.0}),
        "Distributed Lion lr 3e-4": Run(LionConfig(), inner={"lr": 3e-4}),
        "PowerSGD r=4": SimulatedRun("powersgd", {"rank": 4}),
        SINGLE: SimulatedRun("diloco", {"H": 10**9}, workers=1),
    }


def quarter_fragments(names: Sequence[str]) -> list[list[str]]:
    """Cut two blocks into four fragments, the attention and the MLP of each. The embedding joins the first fragment,
    the last norm the last."""
    fragments: list[list[str]] = [[], [], [], []]
    for name in names:
        place = 3 if name == "model.norm.weight" else 0
        if ".layers." in name:
            mlp = ".mlp." in name or ".post_attention_layernorm." in name
            place = 2 * int(name.split(".")[2]) + int(mlp)
        fragments[place].append(name)
    return fragments


def row(name: str, results: Sequence[Row]) -> Row:
    """Return one method's runs, one a seed, as one row."""
    sent, received = results[0]["sent"], results[0]["received"]
    curves = zip(*(r["curve"] for r in results), strict=False)  # one that broke off is shorter
    return {
        "method": name,
        "loss": fmean(r["loss"] for r in results),
        "losses": [r["loss"] for r in results],
        "sent": sent,
        "received": received,
        "saves": results[0]["fp32_gradients"] / sent if sent else None,
        "curve": [[*points[0][:2], fmean(p[2] for p in points)] for points in curves],
    }


def verdicts(rows: dict[str, Row]) -> list[tuple[bool, str]]:
    """Judge the claims whose methods were run."""
    found = []

    def judge(claim: str, worse: str, better: str, bound: float, *, at_least: bool = False) -> None:
        if worse in rows and better in rows:
            gaps = [a - b for a, b in zip(rows[worse]["losses"], rows[better]["losses"], strict=True)]
            passed = fmean(gaps) >= bound if at_least else fmean(gaps) <= bound
            each = ", ".join(f"{gap:+.4f}" for gap in gaps)
            found.append((passed, f"{claim}: {fmean(gaps):+.4f} (seeds {each}; bound {bound:+.3f})"))

    judge("DiLoCo H=20 4-bit is no worse than DDP at the same rate", H20, DDP, 0.0)
    if H20 in rows:
        saves = rows[H20]["saves"]
        found.append((saves >= 150, f"DiLoCo H=20 4-bit sends at least 150 times fewer bytes: {saves:.1f} times"))
    judge("4 bits at H=60 cost at most 0.01", H60, H60_FP32, 0.01)
    judge("streaming (alpha 0) is within 0.03 of DiLoCo at H=60", STREAMING, H60, 0.03)
    judge("a single worker is clearly worse than DiLoCo H=60", SINGLE, H60, 0.05, at_least=True)
    return found


def draw(rows: Sequence[Row], file: Path) -> None:
    """Draw each method's loss over its bytes, from a fifth of its steps to the end."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(11, 6.5))
    colours = pyplot.get_cmap("tab20")
    for number, one in enumerate(sorted((r for r in rows if r["sent"]), key=lambda r: r["loss"]), start=1):
        megabytes, losses = [sent / 1e6 for _, sent, _ in one["curve"]], [loss for _, _, loss in one["curve"]]
        saves = f", {one['saves']:.0f}x fewer bytes" if one["saves"] >= 2 else ""
        label = f"{number:2}  {one['method']}: {one['loss']:.3f}{saves}"
        colour = colours(number - 1)
        axes.plot(megabytes, losses, "-", color=colour, linewidth=1.3, alpha=0.8)
        axes.plot(megabytes[-1:], losses[-1:], "o", color=colour, markersize=7, label=label)
        axes.annotate(f"{number}", (megabytes[-1], losses[-1]), xytext=(5, -9), textcoords="offset points", fontsize=9)
    for one in rows:
        if not one["sent"]:
            axes.axhline(one["loss"], linestyle=":", color="grey", label=f"     {one['method']}: {one['loss']:.3f}")
    axes.set(xscale="log", xlabel="MB sent by each worker", ylabel="held-out loss, nats a byte")
    axes.set_title("Loss against wire bytes, 8 workers; the dot is the end of training")
    axes.grid(alpha=0.25)
    axes.legend(fontsize=8.5, loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False)
    figure.tight_layout()
    figure.savefig(file, dpi=120)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=600, help="inner steps of every worker")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes at a time")
    parser.add_argument("--only", nargs="+", choices=list(runs()), help="these methods only")
    add_json(parser, "convergence")
    parser.add_argument("--plot", type=Path, help=f"a PNG (default, if all methods are run: {PICTURE.name} here)")
    options = parser.parse_args()
    methods = {name: run for name, run in runs().items() if not options.only or name in options.only}
    seeds, begin = range(options.seeds), time.monotonic()
    results: dict[str, dict[int, Row]] = {name: {} for name in methods}
    with (
        tempfile.TemporaryDirectory() as name,
        ProcessPoolExecutor(options.jobs, mp_context=get_context("spawn")) as pool,
    ):
        before = fmean(pool.map(warm_up, seeds, [Path(name)] * len(seeds)))
        jobs = {
            pool.submit(train, run, seed, options.steps, Path(name)): method
            for method, run in methods.items()
            for seed in seeds
        }
        for job in as_completed(jobs):
            result = job.result()
            results[jobs[job]][result["seed"]] = result
            print(f"{jobs[job]:<30} seed {result['seed']}{result['loss']:9.4f}{result['cpu_s']:6.0f} s", flush=True)
    rows = [row(name, [found[seed] for seed in seeds]) for name, found in results.items()]
    print(f"\nbefore: {before:.4f}\n{'method':<30}{'loss':>8}{'MB sent':>10}{'received':>10}{'saves':>8}")
    for one in rows:
        saves = f"{one['saves']:.0f}x" if one["saves"] else "-"
        sent, received = one["sent"] / 1e6, one["received"] / 1e6
        print(f"{one['method']:<30}{one['loss']:8.4f}{sent:10.2f}{received:10.2f}{saves:>8}")
    judged = verdicts({one["method"]: one for one in rows})
    print()
    for passed, text in judged:
        print(f"{'PASS' if passed else 'FAIL'}  {text}")
    cpu_s = sum(result["cpu_s"] for found in results.values() for result in found.values())
    print(f"\n{time.monotonic() - begin:.0f} s, {cpu_s:.0f} CPU seconds in training")
    if options.json:
        write_results(options.json, {"before": before, "rows": rows, "verdicts": judged})
    plot = options.plot or (None if options.only else PICTURE)
    if plot:
        draw(rows, plot)
    return 0 if all(passed for passed, _ in judged) else 1


if __name__ == "__main__":
    sys.exit(main())
