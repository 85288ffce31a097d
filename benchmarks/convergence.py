"""Loss against wire bytes: every method, 8 workers, a small byte model, the text of the standard library.

    python benchmarks/convergence.py [--seeds 2] [--steps 600] [--jobs 2] [--only NAME ...] [--json FILE] [--plot FILE]

The workers live in one process (`optim.simulate`, which runs the code the network runs) and start from one warm model
with its AdamW moments. "bytes" is the payload a worker sent, as coded; "saves" is what fp32 gradients of every step
would have taken, over that. Losses are nats a byte on held-out files, the mean of the seeds.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402

from optim.methods.diloco import strided_fragments  # noqa: E402
from optim.simulate import Group  # noqa: E402
from peer.config import DataConfig, ModelConfig  # noqa: E402
from peer.data import Corpus, load_corpus  # noqa: E402
from peer.inner import AdamW, InnerSpec, build_inner  # noqa: E402
from peer.layout import FlatLayout, init_flat  # noqa: E402
from peer.model import Decoder, next_token_loss  # noqa: E402
from peer.tokenizer import ByteTokenizer  # noqa: E402

WORKERS, BATCH, SEQ, WARM_STEPS = 8, 8, 64, 480
MODEL = ModelConfig(hidden_size=48, layers=4, heads=4, kv_heads=4, intermediate_size=128, max_seq_len=SEQ)
INNER = {"lr": 1e-3, "betas": (0.9, 0.95), "weight_decay": 0.1}
FOUR_BITS = {"codec": "int4", "codec_down": "int4"}
OUTER = {"outer_lr": 0.7, "outer_momentum": 0.9}


@dataclass(frozen=True)
class Run:
    algo: str
    cfg: dict[str, Any] = field(default_factory=dict)
    workers: int = WORKERS


def runs() -> dict[str, Run]:
    fragments = strided_fragments(list(FlatLayout.of(MODEL).slots), 4)
    stream = {"H": 60, "fragments": fragments, "tau": 2, "alpha": 0.5}
    return {
        "single worker": Run("diloco", {"H": 10**9}, workers=1),
        "DDP AdamW": Run("allreduce", {"accumulate": 1}),
        "DiLoCo H=20 4-bit": Run("diloco", {"H": 20, **OUTER, **FOUR_BITS}),
        "DiLoCo H=60 fp32": Run("diloco", {"H": 60, **OUTER}),
        "DiLoCo H=60 4-bit": Run("diloco", {"H": 60, **OUTER, **FOUR_BITS}),
        "streaming H=60 F=4 4-bit": Run("streaming", {**stream, **OUTER, **FOUR_BITS}),
        "eager H=20 lr .3 m .5": Run("eager", {"H": 20, "outer_lr": 0.3, "outer_momentum": 0.5, **FOUR_BITS}),
        "SparseLoCo H=10 2-bit": Run("sparseloco", {"H": 10, "topk": 64, "chunk": 64, "outer_lr": 1.0}),
        "DeMo k=32": Run("demo", {"lr": 1e-3, "topk": 32}),
        "Distributed Lion": Run("lion", {"lr": 3e-4, "wd": 0.1, "codec": "sign", "codec_down": "sign"}),
        "PowerSGD r=4": Run("powersgd", {"rank": 4}),
        "NoLoCo H=20 4-bit": Run("gossip", {"H": 20, **FOUR_BITS}),
    }


class Task:
    """The model, its data, and a worker's gradient."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.layout = FlatLayout.of(MODEL)
        self.corpus: Corpus = load_corpus(DataConfig(seq_len=SEQ, max_bytes=24 << 20), ByteTokenizer())
        self.flat = init_flat(MODEL, seed)
        self.gradients = torch.zeros_like(self.flat)
        self.model = Decoder(MODEL, self.flat)
        self.model.bind_gradients(self.gradients)

    def gradient(self, weights: torch.Tensor, number: int) -> torch.Tensor:
        """Of the `number`-th batch, its norm clipped to 1."""
        self.flat.copy_(weights)
        self.gradients.zero_()
        tokens = self.corpus.batch(list(range(number * BATCH, (number + 1) * BATCH)), self.seed)
        next_token_loss(self.model(tokens[:, :-1]), tokens).backward()
        return self.gradients * min(1.0, 1.0 / float(self.gradients.norm()))

    def loss(self, weights: torch.Tensor) -> float:
        self.flat.copy_(weights)
        with torch.no_grad():
            losses = [float(next_token_loss(self.model(b[:, :-1]), b)) for b in self.corpus.held_out_batches(64, 8)]
        return sum(losses) / len(losses)


def warm_up(seed: int, folder: Path) -> None:
    """One worker, a rate that rises and then stays: weights and moments into a file."""
    torch.set_num_threads(1)
    task = Task(seed)
    theta = task.flat.clone()
    adamw = build_inner(InnerSpec(**INNER), task.layout, theta)
    assert isinstance(adamw, AdamW)
    for step in range(WARM_STEPS):
        adamw.lr = INNER["lr"] * min(1.0, (step + 1) / 50)
        adamw.step(theta, task.gradient(theta, 10**6 + step))
    save_file({"theta": theta, "mean": adamw.mean, "square": adamw.square}, folder / f"warm-{seed}.safetensors")


def train(name: str, seed: int, steps: int, folder: Path) -> dict[str, Any]:
    torch.set_num_threads(1)
    begin = time.monotonic()
    task, run = Task(seed), runs()[name]
    warm = load_file(folder / f"warm-{seed}.safetensors")
    group = Group(run.algo, task.layout.views(warm["theta"]), run.workers, inner=INNER, **run.cfg)
    optimizers = [*group.inner, *(m.optimizer for m in group.methods if hasattr(m, "optimizer"))]
    for adamw in optimizers:
        adamw.mean.copy_(warm["mean"])
        adamw.square.copy_(warm["square"])
        adamw.steps = WARM_STEPS
    for step in range(steps):
        flat = [task.gradient(group.local[k], step * WORKERS + k) for k in range(run.workers)]
        group.step([task.layout.views(g) for g in flat])
        if not math.isfinite(float(group.local[0].norm())):
            break
    return {
        "method": name,
        "seed": seed,
        "loss": task.loss(group.methods[0].theta if run.workers > 1 else group.local[0]),
        "loss_before": task.loss(warm["theta"]),
        "bytes_up": group.bytes_up,
        "ddp_bytes": 4 * task.layout.numel * steps,
        "seconds": time.monotonic() - begin,
    }


def summary(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    rows = []
    for name in dict.fromkeys(r["method"] for r in results):
        mine = [r for r in results if r["method"] == name]
        sent = mine[0]["bytes_up"]
        rows.append(
            {
                "method": name,
                "loss": sum(r["loss"] for r in mine) / len(mine),
                "losses": [r["loss"] for r in mine],
                "bytes_up": sent,
                "saves": mine[0]["ddp_bytes"] / sent if sent else None,
            }
        )
    return rows


def draw(rows: list[dict[str, Any]], file: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 5.5))
    for row in rows:
        if row["bytes_up"]:
            axes.plot(row["bytes_up"] / 1e6, row["loss"], "o")
            axes.annotate(
                row["method"],
                (row["bytes_up"] / 1e6, row["loss"]),
                fontsize=8,
                xytext=(4, 4),
                textcoords="offset points",
            )
        else:
            axes.axhline(row["loss"], linestyle=":", color="grey", label=row["method"])
    axes.set(xscale="log", xlabel="MB sent by each worker", ylabel="held-out loss, nats a byte")
    axes.legend()
    figure.tight_layout()
    figure.savefig(file, dpi=120)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=600, help="inner steps of every worker")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes at a time")
    parser.add_argument("--only", nargs="+", choices=list(runs()), help="these methods only")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    options = parser.parse_args()
    names, seeds = options.only or list(runs()), range(options.seeds)
    with (
        tempfile.TemporaryDirectory() as name,
        ProcessPoolExecutor(options.jobs, mp_context=get_context("spawn")) as pool,
    ):
        folder = Path(name)
        list(pool.map(warm_up, seeds, [folder] * len(seeds)))
        jobs = [pool.submit(train, method, seed, options.steps, folder) for method in names for seed in seeds]
        results = []
        for job in jobs:
            results.append(job.result())
            print(f"{results[-1]['method']:<28}{results[-1]['loss']:8.4f}  {results[-1]['seconds']:.0f} s", flush=True)
    rows = summary(results)
    print(f"\nbefore: {results[0]['loss_before']:.4f}\n{'method':<28}{'loss':>8}{'MB sent':>10}{'saves':>8}")
    for row in rows:
        saves = f"{row['saves']:.0f}x" if row["saves"] else "-"
        print(f"{row['method']:<28}{row['loss']:8.4f}{row['bytes_up'] / 1e6:10.2f}{saves:>8}")
    if options.json:
        options.json.write_text(json.dumps({"rows": rows, "runs": results}, indent=1) + "\n")
    if options.plot:
        draw(rows, options.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
