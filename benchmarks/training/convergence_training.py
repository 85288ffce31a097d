"""One run of the convergence benchmark: 8 workers in one process, from a warm model, over the same text.

A method of the network runs as its strategy (`StrategyGroup`): its codecs, gate and slices are those
that peers use, and only the transport is missing. Gossip and PowerSGD with two exchanges a step have no strategy and
run as the papers' algorithms (`tests.optim.reference.group.Group`).
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from benchmarks.training.strategy_group import Overlap, StrategyGroup
from optim.algorithms.fragments import fragment_spans
from optim.algorithms.outer_step import DilocoOuter
from optim.codecs import get_codec
from optim.config import AllReduceConfig, CodecConfig, EagerConfig, OuterConfig, StreamingConfig
from optim.strategies.allreduce import AllReduceStrategy
from optim.strategies.dense import DenseFormat
from optim.strategies.diloco import DilocoStrategy
from optim.strategies.interface import OuterStrategy
from optim.strategies.registry import build_strategy
from peer.compute.adamw_fused import FusedAdamW
from peer.compute.build_optimizer import build_inner
from peer.compute.inner_optimizer import AdamW
from peer.compute.optimizer import InnerSpec
from peer.config import DataConfig, InnerConfig, ModelConfig
from peer.data.text_corpus import load_corpus
from peer.data.tokenizer import ByteTokenizer
from peer.model.decoder import Decoder
from peer.model.layout import FlatLayout, init_flat
from tests.optim.reference.group import Group
from tests.optim.reference.powersgd import PowerSgd

WORKERS, BATCH, SEQ, WARM_STEPS, RAMP_STEPS = 8, 8, 32, 480, 50
EVALUATIONS = 5  # points of a run's curve
HELD_OUT = (128, 8)  # windows a batch, batches
MODEL = ModelConfig(hidden_size=64, layers=2, heads=2, kv_heads=2, intermediate_size=176, max_seq_len=SEQ)
INNER: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.95), "weight_decay": 0.1}


@dataclass(frozen=True)
class Run:
    """A method of the network and its settings."""

    method: OuterConfig
    codec: CodecConfig = field(default_factory=CodecConfig)
    inner: dict[str, Any] = field(default_factory=dict)
    """Changes to `INNER`."""
    fragments: Sequence[Sequence[str]] = ()
    """The parameters of each of streaming's fragments."""


@dataclass(frozen=True)
class SimulatedRun:
    """An algorithm without a strategy, and its settings for `tests.optim.reference.group.Group`."""

    algo: str
    cfg: dict[str, Any] = field(default_factory=dict)
    workers: int = WORKERS


AnyRun = Run | SimulatedRun
AnyGroup = Group | StrategyGroup


class Task:
    """The model, its data, and a worker's gradient."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.layout = FlatLayout.of(MODEL)
        self.corpus = load_corpus(DataConfig(seq_len=SEQ, max_bytes=24 << 20), ByteTokenizer())
        self.flat = init_flat(MODEL, seed)
        self.gradients = torch.zeros_like(self.flat)
        self.model = Decoder(MODEL, self.flat)
        self.model.bind_gradients(self.gradients)

    def gradient(self, weights: torch.Tensor, number: int) -> torch.Tensor:
        """Return the gradient of the `number`-th batch, its norm clipped to 1."""
        self.flat.copy_(weights)
        self.gradients.zero_()
        tokens = self.corpus.batch(list(range(number * BATCH, (number + 1) * BATCH)), self.seed)
        self._loss(tokens).backward()
        return self.gradients * min(1.0, 1.0 / float(self.gradients.norm()))

    def loss(self, weights: torch.Tensor) -> float:
        """Return the loss in nats a byte on text that is not trained on."""
        self.flat.copy_(weights)
        with torch.no_grad():
            losses = [float(self._loss(batch)) for batch in self.corpus.held_out_batches(*HELD_OUT)]
        return sum(losses) / len(losses)

    def _loss(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the mean loss of tokens (B, T+1) in nats a token."""
        total, losses = self.model.losses(self.model.hidden(tokens[:, :-1]), tokens[:, 1:])
        return total / losses.numel()


def warm_up(seed: int, folder: Path) -> float:
    """Train one worker alone, with a warm-up; save its weights and AdamW's moments; return its loss."""
    torch.set_num_threads(1)
    task = Task(seed)
    theta = task.flat.clone()
    adamw = build_inner(InnerSpec.of(inner_config({})), task.layout, theta)
    assert isinstance(adamw, AdamW)
    for step in range(WARM_STEPS):
        adamw.lr = INNER["lr"] * min(1.0, (step + 1) / RAMP_STEPS)
        adamw.step(theta, task.gradient(theta, 10**6 + step))  # samples that no worker reaches
    save_file({"theta": theta, "mean": adamw.mean, "square": adamw.square}, folder / f"warm-{seed}.safetensors")
    return task.loss(theta)


def train(run: AnyRun, seed: int, steps: int, folder: Path) -> dict[str, Any]:
    """Train for so many inner steps. `curve`: (inner steps, payload bytes sent by a worker, loss). A run whose loss is
    not finite ends there."""
    torch.set_num_threads(1)
    begin = time.process_time()
    warm = load_file(folder / f"warm-{seed}.safetensors")
    task = Task(seed)
    group = strategy_group(run, warm) if isinstance(run, Run) else algorithm_group(run, warm)
    workers, curve = len(group.local), []
    for step in range(1, steps + 1):
        numbers = range((step - 1) * WORKERS, (step - 1) * WORKERS + workers)
        gradients = [task.gradient(group.local[k], number) for k, number in enumerate(numbers)]
        group.step([task.layout.views(gradient) for gradient in gradients])
        if step % max(1, steps // EVALUATIONS) == 0:
            curve.append((step, group.bytes_up, task.loss(_weights(group))))
            if not math.isfinite(curve[-1][2]):
                break
    return {
        "seed": seed,
        "curve": curve,
        "loss": curve[-1][2] if math.isfinite(curve[-1][2]) else math.inf,
        "sent": group.bytes_up,
        "received": group.bytes_down if isinstance(group, StrategyGroup) else group.bytes_up,
        "fp32_gradients": 4 * task.layout.numel * steps,
        "cpu_s": time.process_time() - begin,
    }


def inner_config(changes: dict[str, Any]) -> InnerConfig:
    """Return the run's inner section: `INNER` with `changes`, at a constant rate."""
    return InnerConfig(**{**INNER, **changes}, batch_size=BATCH, total_steps=10**6, schedule="constant", dtype="fp32")


def strategy_group(run: Run, warm: dict[str, torch.Tensor]) -> StrategyGroup:
    """Return the workers at the warm weights. AdamW, a worker's own or the group's, continues with the warm moments;
    methods without AdamW start theirs at zero."""
    layout, config, method = FlatLayout.of(MODEL), inner_config(run.inner), run.method
    overlap, every = Overlap(), method.steps
    if isinstance(method, StreamingConfig):
        overlap, every = Overlap(tau=method.tau, mix=method.mix), method.steps // method.fragments
    elif isinstance(method, EagerConfig):
        overlap = Overlap(eager=DilocoOuter(method.lr, method.momentum, method.nesterov))

    def build() -> OuterStrategy:
        if not run.fragments:
            return build_strategy(method, run.codec, layout, config)
        assert isinstance(method, StreamingConfig)
        spans = [fragment_spans(layout, names) for names in run.fragments]
        wire = DenseFormat(spans, get_codec(run.codec.up), get_codec(run.codec.down))
        return DilocoStrategy(wire, DilocoOuter(method.lr, method.momentum, method.nesterov))

    spec, tokens = InnerSpec.of(config), every * BATCH * SEQ
    group = StrategyGroup(build, layout.views(warm["theta"]), WORKERS, every, spec, overlap=overlap, tokens=tokens)
    group.inner = warm_workers(spec, warm, WORKERS)
    if isinstance(method, AllReduceConfig):
        assert isinstance(group.rounds.strategies[0], AllReduceStrategy)
        group.rounds.tensors[1:] = [warm["mean"].clone(), warm["square"].clone()]
        group.rounds.round = WARM_STEPS
    return group


def algorithm_group(run: SimulatedRun, warm: dict[str, torch.Tensor]) -> Group:
    """As `strategy_group`, for an algorithm without a strategy."""
    layout = FlatLayout.of(MODEL)
    group = Group(run.algo, layout.views(warm["theta"]), run.workers, inner=INNER, **run.cfg)
    group.inner = warm_workers(InnerSpec.of(inner_config({})), warm, run.workers)
    for method in group.methods:
        if isinstance(method, PowerSgd):
            assert isinstance(method.optimizer, AdamW)
            warm_up_moments(method.optimizer, warm)
    return group


def warm_workers(spec: InnerSpec, warm: dict[str, torch.Tensor], workers: int) -> list[Any]:
    """Return the workers' own AdamW, the one that peers use (`FusedAdamW`), with the warm moments."""
    optimizers = [FusedAdamW(spec, FlatLayout.of(MODEL), warm["theta"]) for _ in range(workers)]
    for optimizer in optimizers:
        warm_up_moments(optimizer, warm)
    return optimizers


def warm_up_moments(optimizer: AdamW, warm: dict[str, torch.Tensor]) -> None:
    """Continue the warm-up's AdamW."""
    optimizer.mean.copy_(warm["mean"])
    optimizer.square.copy_(warm["square"])
    optimizer.steps = WARM_STEPS


def _weights(group: AnyGroup) -> torch.Tensor:
    """Return the shared weights; the first worker's, where there are none."""
    if isinstance(group, StrategyGroup):
        return group.theta
    return group.local[0] if len(group.local) == 1 else group.methods[0].theta
