"""An adapter that three peers tune beside a frozen base: its loss beside one process with the whole batch.

    python benchmarks/training/tuning.py [--steps 480] [--seeds 3] [--json [FILE]]

The base is the small byte model of convergence.py after 480 steps on the standard library's text. It is tuned to the
same text in capitals, with LoRA of rank 8 on all linear layers (`[model] base`, `[adapter]`): three workers of 8
sequences a step (`peer.compute.train_loop`) exchange 8 bits both ways with the network's strategies, beside one process
that has all 24 sequences in one batch, makes as many steps at the same rate, and merges nothing. The outer step is that
of `peer coordinate --init --tune` (rate 1, momentum 0.5), and once DiLoCo's. What is left between the peers and the one
process is what merging A and B apart costs, as the mean of products is not the product of means: peers that train all
weights are nearer to one process that does. Further rows hold the base in bf16, int8 and nf4. The loss is that on
held-out text in nats a byte, beside the process with the whole batch (of the same parameters).
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from tempfile import TemporaryDirectory
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import msgspec
import torch
from safetensors.torch import save_file
from torch import Tensor

from benchmarks.common.markdown import table
from benchmarks.common.options import add_json, write_results
from benchmarks.training.byte_task import BATCH, HELD_OUT, MODEL, RAMP_STEPS, WARM_STEPS, Task, inner_config
from benchmarks.training.rounds import Rounds
from optim.config import CodecConfig, DilocoConfig
from optim.strategies.registry import build_strategy
from peer.compute.device import resolve_device
from peer.compute.train_loop import InnerTrainer
from peer.config import AdapterConfig, ModelConfig, Quantization, StorageConfig
from peer.model.frozen_weights import FrozenWeights, load_frozen
from peer.model.layout import FlatLayout, init_flat
from peer.model.parameter_files import ParameterFiles
from swarm.parts.part_files import quantize_part
from swarm.parts.weights import EvenWeights

PEERS: Final = 3
TUNED: Final = msgspec.structs.replace(MODEL, adapter=AdapterConfig(rank=8, alpha=16.0))
CAPITALS: Final = torch.arange(256)
CAPITALS[ord("a") : ord("z") + 1] -= 32
ADAPTER_LR: Final = 4e-3
WHOLE_LR: Final = 1e-3
COLUMNS: Final = ["what", "parameters sent", "held-out loss", "beside one process", "by seed"]


@dataclass(frozen=True)
class Way:
    """One row: how many inner steps a round (0: one process with the whole batch), and beside what."""

    name: str
    steps: int
    form: StorageConfig | None
    """Of the base; None to train all weights."""
    outer: tuple[float, float] = (1.0, 0.5)
    """Rate and momentum."""


PLAIN: Final = StorageConfig(dtype="fp32")
ONE: Final = Way("one process, 24 sequences a step", 0, PLAIN)
ONE_WHOLE: Final = Way("all weights: one process", 0, None)
WAYS: Final = [
    ONE,
    *(Way(f"3 peers, rounds of {steps} steps", steps, PLAIN) for steps in (5, 20, 60)),
    Way("3 peers, rounds of 20 steps, outer step 0.7 / 0.9", 20, PLAIN, (0.7, 0.9)),
    Way("3 peers, rounds of 20 steps, base in bf16", 20, StorageConfig(dtype="bf16")),
    Way("3 peers, rounds of 20 steps, base in int8", 20, StorageConfig(dtype="fp32", quantization="int8")),
    Way("3 peers, rounds of 20 steps, base in nf4", 20, StorageConfig(dtype="fp32", quantization="nf4")),
    ONE_WHOLE,
    Way("all weights: 3 peers, rounds of 20 steps", 20, None),
]


class Base:
    """The model after its pre-training, and its form for a row."""

    def __init__(self, task: Task, folder: Path) -> None:
        trainer = InnerTrainer(MODEL, inner_config({"total_steps": WARM_STEPS}), resolve_device("cpu"))
        trainer.import_from(init_flat(MODEL, task.seed))
        trainer.config = inner_config({"total_steps": WARM_STEPS, "warmup_steps": RAMP_STEPS, "lr": 4e-3})
        for step in range(WARM_STEPS):
            trainer.step(task.corpus.batch(list(range(step * BATCH, (step + 1) * BATCH)), task.seed), step)
        self.flat, self.folder, self.task = trainer.local.clone(), folder, task
        views = FlatLayout.of(MODEL).views(self.flat)
        save_file({name: view.clone() for name, view in views.items()}, folder / "model.safetensors")

    def frozen(self, form: StorageConfig) -> FrozenWeights:
        """Return the weights in that form, as a worker loads them."""
        folder = self.folder
        if form.quantization is not None:
            folder = self._quantized(form.quantization)
        return load_frozen(ParameterFiles([folder]), TUNED, form, torch.device("cpu"))

    def _quantized(self, quantization: Quantization) -> Path:
        folder = self.folder / quantization
        folder.mkdir(exist_ok=True)
        weights = EvenWeights(MODEL, "fp32", quantization)
        for number in range(len(weights.cuts)):
            quantize_part(ParameterFiles([self.folder]), weights, number, folder)
        return folder


def batches(task: Task, first: int, count: int) -> Tensor:
    """Return sequences of the text to tune to, none of which was trained on before."""
    return CAPITALS[task.corpus.batch(list(range(10**6 + first, 10**6 + first + count)), task.seed)]


def held_out(task: Task) -> Iterator[Tensor]:
    return (CAPITALS[batch] for batch in task.corpus.held_out_batches(*HELD_OUT))


def trainer_of(base: Base, way: Way, steps: int) -> tuple[ModelConfig, InnerTrainer, Tensor]:
    """Return the model of a row, a trainer of it and where it begins."""
    model, frozen, rate = TUNED, None, ADAPTER_LR
    if way.form is None:
        model, rate = MODEL, WHOLE_LR
    else:
        frozen = base.frozen(way.form)
    inner = inner_config({"total_steps": steps, "warmup_steps": 10, "schedule": "cosine", "lr": rate})
    start = base.flat if way.form is None else init_flat(model, base.task.seed)
    return model, InnerTrainer(model, inner, resolve_device("cpu"), base=frozen), start


def tune(base: Base, way: Way, steps: int) -> float:
    """Return the held-out loss after that many steps of each worker."""
    task = base.task
    model, trainer, start = trainer_of(base, way, steps)
    if way.steps == 0:
        trainer.import_from(start)
        for step in range(steps):
            trainer.step(batches(task, step * PEERS * BATCH, PEERS * BATCH), step)
        return trainer.evaluate(held_out(task), lambda: None)
    workers = [trainer, *(trainer_of(base, way, steps)[1] for _ in range(PEERS - 1))]
    layout, inner = FlatLayout.of(model), trainer.config
    rate, momentum = way.outer
    method = DilocoConfig(steps=way.steps, lr=rate, momentum=momentum)
    group = Rounds(lambda: build_strategy(method, CodecConfig(), layout, inner), start, PEERS)
    for number in range(steps // way.steps):
        products = []
        for worker, each in enumerate(workers):
            each.import_from(group.tensors[0])
            for at in range(way.steps):
                step = number * way.steps + at
                each.step(batches(task, (step * PEERS + worker) * BATCH, BATCH), step)
            products.append(group.tensors[0] - each.local)
        group.exchange(products)
    trainer.import_from(group.tensors[0])
    return trainer.evaluate(held_out(task), lambda: None)


def untuned(base: Base) -> float:
    _, trainer, _ = trainer_of(base, Way("", 0, None), 10)
    trainer.import_from(base.flat)
    return trainer.evaluate(held_out(base.task), lambda: None)


def row(name: str, sent: int, losses: Sequence[float], whole: Sequence[float]) -> list[str]:
    gap = mean(losses) - mean(whole) if whole else 0.0
    return [name, str(sent), f"{mean(losses):.4f}", f"{gap:+.4f}", ", ".join(f"{loss:.4f}" for loss in losses)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=480, help="of each worker")
    parser.add_argument("--seeds", type=int, default=3)
    add_json(parser, "training/tuning")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows: list[list[str]] = []
    losses: dict[str, list[float]] = {}
    with TemporaryDirectory() as folder:
        bases = []
        for seed in range(options.seeds):
            place = Path(folder, str(seed))
            place.mkdir()
            bases.append(Base(Task(seed), place))
        one: list[float] = []
        before = [untuned(base) for base in bases]
        for way in WAYS:
            found = [tune(base, way, options.steps) for base in bases]
            losses[way.name] = found
            one = one if way.steps else found
            if way is ONE:
                rows.append(row("the base, untuned", 0, before, one))
            sent = FlatLayout.of(MODEL if way.form is None else TUNED).numel if way.steps else 0
            rows.append(row(way.name, sent, found, one))
            print(rows[-1], flush=True)
    print(table(COLUMNS, rows))
    if options.json:
        about: dict[str, Any] = {"columns": COLUMNS, "rows": rows, "losses": losses}
        write_results(options.json, about)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
