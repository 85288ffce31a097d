"""Peers that hold split weights beside peers that hold fp32 ones: the loss of one run.

    python benchmarks/training/split_weights.py [--rounds 100] [--seeds 3] [--json [FILE]]

The task, the samples, the method and the gaps are those of fp16.py. Peers hold their weights in fp32, as with
`peer join --weights split`, or one each way; their products are in fp32, and in two runs in bf16. `adamw8bit` rows
have 8-bit moments as well. A gap is the difference from the run with fp32 weights, fp32 products and AdamW.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from benchmarks.common.options import add_json, write_results
from benchmarks.training.byte_task import Task
from benchmarks.training.fp16 import COLUMNS, Figures, cell, row_of, train
from peer.config import MasterType

RUNS: dict[str, tuple[str, tuple[MasterType, MasterType], str]] = {
    "fp32, fp32": ("fp32", ("fp32", "fp32"), "adamw"),
    "fp32, split": ("fp32", ("fp32", "split"), "adamw"),
    "split, split": ("fp32", ("split", "split"), "adamw"),
    "fp32, fp32; bf16 products": ("bf16", ("fp32", "fp32"), "adamw"),
    "split, split; bf16 products": ("bf16", ("split", "split"), "adamw"),
    "fp32, fp32; adamw8bit": ("fp32", ("fp32", "fp32"), "adamw8bit"),
    "split, split; adamw8bit": ("fp32", ("split", "split"), "adamw8bit"),
}
SHOWN = {("peers hold" if name == "peers compute in" else name): key for name, key in COLUMNS.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first-seed", type=int, default=0)
    add_json(parser, "training/split_weights")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows: list[Figures] = []
    exact: list[Figures] = []
    tasks = [Task(seed) for seed in range(options.first_seed, options.first_seed + options.seeds)]
    for name, (dtype, weights, optimizer) in RUNS.items():
        found = [
            train(task, (dtype,) * 2, None, options.rounds, weights=weights, optimizer=optimizer) for task in tasks
        ]
        exact = exact or found
        rows.append(row_of(name, found, exact))
        print(rows[-1], flush=True)
    if options.json:
        cells = [[cell(row[column]) for column in SHOWN.values()] for row in rows]
        write_results(options.json, {"columns": list(SHOWN), "rows": cells, "runs": rows})
    return 0


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
