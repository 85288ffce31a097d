"""Peers that compute in fp16 beside peers that compute in fp32: the loss of one run, and what overflows.

    python benchmarks/training/fp16.py [--rounds 100] [--seeds 2] [--device cuda] [--json [FILE]]

Two peers train the small byte model of convergence.py in one process, from random weights: DiLoCo, 10 inner steps a
round, 8 bits both ways, a cosine schedule. Each computes as its worker does (`peer.compute.train_loop`), on the CPU or
`--device`: both in fp32, one of them in fp16 as with `peer join --dtype fp16`, both in fp16, and one in bf16 for
comparison. In a last run the scale of the loss begins at 2^40 at the peer in fp16, so that its first steps overflow.
The loss is that on held-out text in nats a byte; a gap is the difference from the run in fp32 with the same samples, at
each tenth of the rounds. All peers hold one state after each round: each result is checked as in a network.

100 rounds of all runs take about 6 minutes a seed on one core, beside other programs.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from benchmarks.common.options import add_json, write_results
from benchmarks.training.byte_task import BATCH, MODEL, Task, inner_config
from benchmarks.training.rounds import Rounds
from optim.config import CodecConfig, DilocoConfig
from optim.strategies.registry import build_strategy
from peer.compute.device import resolve_device
from peer.compute.train_loop import InnerRun, InnerTrainer, run_inner
from peer.config import MasterType
from peer.model.layout import init_flat

STEPS = 10
RUNS: dict[str, tuple[tuple[str, ...], float | None]] = {
    "fp32, fp32": (("fp32", "fp32"), None),
    "fp32, fp16": (("fp32", "fp16"), None),
    "fp16, fp16": (("fp16", "fp16"), None),
    "fp32, bf16": (("fp32", "bf16"), None),
    "fp32, fp16 from 2^40": (("fp32", "fp16"), 2.0**40),
}
Figures = dict[str, Any]


def train(
    task: Task,
    dtypes: Sequence[str],
    scale: float | None,
    rounds: int,
    device: str = "cpu",
    weights: Sequence[MasterType] = (),
    optimizer: str = "adamw",
) -> Figures:
    """Return the held-out losses after each tenth of the rounds, and the steps that fp16 left out or that were skipped.
    `scale`: of the loss in fp16 at first; None for the usual one. `weights`: how each peer holds them, if not fp32."""
    settings = {"total_steps": rounds * STEPS, "warmup_steps": STEPS, "schedule": "cosine", "optimizer": optimizer}
    inner = [inner_config({**settings, "dtype": dtype}) for dtype in dtypes]
    held = weights or ("fp32",) * len(dtypes)
    trainers = [
        InnerTrainer(MODEL, one, resolve_device(device), weights=kind) for one, kind in zip(inner, held, strict=True)
    ]
    method, seed = DilocoConfig(steps=STEPS), task.seed
    group = Rounds(
        lambda: build_strategy(method, CodecConfig(), task.layout, inner[0]), init_flat(MODEL, seed), len(dtypes)
    )
    for trainer in trainers:
        if trainer.scaler is not None and scale is not None:
            trainer.scaler.scale = scale
    found: Figures = {"losses": [], "overflows": 0, "skipped": 0}
    for number in range(rounds):
        products = []
        for peer, trainer in enumerate(trainers):
            first = (number * len(dtypes) + peer) * STEPS * BATCH
            run = InnerRun(range(first, first + STEPS * BATCH), number * STEPS, 3600.0, None, lambda steps: False)
            trainer.import_from(group.tensors[0])
            result = run_inner(trainer, lambda numbers: task.corpus.batch(numbers, seed), run)
            found["overflows"] += result.overflows
            found["skipped"] += result.skipped
            products.append(torch.empty_like(group.tensors[0]))
            trainer.write_delta(group.tensors[0], slice(None), products[-1])
        group.exchange(products)
        if (number + 1) % max(1, rounds // 10) == 0:
            found["losses"].append(task.loss(group.tensors[0]))
    return found


def row_of(name: str, found: Sequence[Figures], exact: Sequence[Figures]) -> Figures:
    """Return one row of the table, over all seeds."""
    pairs = [zip(one["losses"], other["losses"], strict=True) for one, other in zip(found, exact, strict=True)]
    gaps = [[abs(mine - theirs) for mine, theirs in pair] for pair in pairs]
    every = [gap for of_seed in gaps for gap in of_seed]
    ends = [one["losses"][-1] for one in found]
    return {
        "peers": name,
        "loss": round(sum(ends) / len(ends), 4),
        "losses": [[round(loss, 4) for loss in one["losses"]] for one in found],
        "largest_gap": round(max(every), 5),
        "mean_gap": round(sum(every) / len(every), 5),
        "last_gap": round(max(of_seed[-1] for of_seed in gaps), 5),
        "overflows": [one["overflows"] for one in found],
        "skipped": [one["skipped"] for one in found],
    }


COLUMNS = {
    "peers compute in": "peers", "loss at the end": "loss", "largest gap to fp32": "largest_gap",
    "mean gap": "mean_gap", "gap at the end": "last_gap", "overflows by seed": "overflows",
    "skipped by seed": "skipped",
}  # fmt: skip


def cell(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    add_json(parser, "training/fp16")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows: list[Figures] = []
    exact: list[Figures] = []
    tasks = [Task(seed) for seed in range(options.first_seed, options.first_seed + options.seeds)]
    for name, (dtypes, scale) in RUNS.items():
        found = [train(task, dtypes, scale, options.rounds, options.device) for task in tasks]
        exact = exact or found
        rows.append(row_of(name, found, exact))
        print(rows[-1], flush=True)
    if options.json:
        cells = [[cell(row[column]) for column in COLUMNS.values()] for row in rows]
        write_results(options.json, {"columns": list(COLUMNS), "rows": cells, "runs": rows})
    return 0


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
