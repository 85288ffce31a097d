"""One run of the convergence benchmark: 8 workers in one process, from a warm model, over the same text.

The group is `optim.simulate`'s, which runs the methods and codecs that the network runs; only the transport differs.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from optim.algorithms.allreduce import AllReduce, SharedOptimizer
from optim.algorithms.powersgd import PowerSgd
from optim.codecs import get_codec
from optim.codecs.votes import Votes
from optim.simulate import Group
from peer.compute.adamw_fused import FusedAdamW
from peer.compute.build_optimizer import build_inner
from peer.compute.inner_optimizer import AdamW
from peer.compute.optimizer import InnerSpec
from peer.config import DataConfig, ModelConfig
from peer.data.corpus import load_corpus
from peer.data.tokenizer import ByteTokenizer
from peer.model.decoder import Decoder, next_token_loss
from peer.model.layout import FlatLayout, init_flat

WORKERS, BATCH, SEQ, WARM_STEPS, RAMP_STEPS = 8, 8, 32, 480, 50
EVALUATIONS = 5  # points of a run's curve
HELD_OUT = (128, 8)  # windows a batch, batches
MODEL = ModelConfig(hidden_size=64, layers=2, heads=2, kv_heads=2, intermediate_size=176, max_seq_len=SEQ)
INNER: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.95), "weight_decay": 0.1}


@dataclass(frozen=True)
class Run:
    """A method and its settings for `optim.simulate.Group`; `inner` over `INNER`. `gathered`: the merged vector is no
    shorter than the messages, so that every worker receives those of all others."""

    algo: str
    cfg: dict[str, Any] = field(default_factory=dict)
    inner: dict[str, Any] = field(default_factory=dict)
    workers: int = WORKERS
    gathered: bool = False


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
        """Of the `number`-th batch, its norm clipped to 1."""
        self.flat.copy_(weights)
        self.gradients.zero_()
        tokens = self.corpus.batch(list(range(number * BATCH, (number + 1) * BATCH)), self.seed)
        next_token_loss(self.model(tokens[:, :-1]), tokens).backward()
        return self.gradients * min(1.0, 1.0 / float(self.gradients.norm()))

    def loss(self, weights: torch.Tensor) -> float:
        """Nats a byte, on text that is not trained on."""
        self.flat.copy_(weights)
        with torch.no_grad():
            losses = [float(next_token_loss(self.model(b[:, :-1]), b)) for b in self.corpus.held_out_batches(*HELD_OUT)]
        return sum(losses) / len(losses)


def warm_up(seed: int, folder: Path) -> float:
    """One worker alone, its rate rising at first: weights and AdamW's moments into a file. Returns the loss."""
    torch.set_num_threads(1)
    task = Task(seed)
    theta = task.flat.clone()
    adamw = build_inner(InnerSpec(**INNER), task.layout, theta)
    assert isinstance(adamw, AdamW)
    for step in range(WARM_STEPS):
        adamw.lr = INNER["lr"] * min(1.0, (step + 1) / RAMP_STEPS)
        adamw.step(theta, task.gradient(theta, 10**6 + step))  # samples that no worker comes to
    save_file({"theta": theta, "mean": adamw.mean, "square": adamw.square}, folder / f"warm-{seed}.safetensors")
    return task.loss(theta)


def train(run: Run, seed: int, steps: int, folder: Path) -> dict[str, Any]:
    """`curve`: (inner steps, payload bytes sent by a worker, loss). A run that leaves the finite numbers ends there."""
    torch.set_num_threads(1)
    begin = time.process_time()
    task, group = Task(seed), _warm_group(run, load_file(folder / f"warm-{seed}.safetensors"))
    curve = []
    for step in range(1, steps + 1):
        numbers = range((step - 1) * WORKERS, (step - 1) * WORKERS + run.workers)
        gradients = [task.gradient(group.local[k], number) for k, number in enumerate(numbers)]
        group.step([task.layout.views(gradient) for gradient in gradients])
        if step % (steps // EVALUATIONS) == 0:
            curve.append((step, _sent(run, group), _loss(run, group, task)))
            if not math.isfinite(curve[-1][2]):
                break
    return {
        "seed": seed,
        "curve": curve,
        "loss": curve[-1][2] if math.isfinite(curve[-1][2]) else math.inf,
        "sent": curve[-1][1],
        "received": _received(run, curve[-1][1]),
        "fp32_gradients": 4 * task.layout.numel * steps,
        "cpu_s": time.process_time() - begin,
    }


def _warm_group(run: Run, warm: dict[str, torch.Tensor]) -> Group:
    """The workers at the warm weights. AdamW, a worker's own or the group's, goes on with the warm moments; methods
    without it start theirs from nothing."""
    layout, inner = FlatLayout.of(MODEL), INNER | run.inner
    group = Group(run.algo, layout.views(warm["theta"]), run.workers, inner=inner, **run.cfg)
    group.inner = [FusedAdamW(InnerSpec(**inner), layout, warm["theta"]) for _ in group.inner]  # as peer.training does
    for optimizer in [*group.inner, *(m.optimizer for m in group.methods if isinstance(m, AllReduce | PowerSgd))]:
        assert isinstance(optimizer, AdamW | SharedOptimizer)
        optimizer.mean.copy_(warm["mean"])
        optimizer.square.copy_(warm["square"])
        optimizer.steps = WARM_STEPS
    return group


def _loss(run: Run, group: Group, task: Task) -> float:
    """Of the shared weights; of the first worker's, where there are none."""
    return task.loss(group.local[0] if run.workers == 1 else group.methods[0].theta)


def _sent(run: Run, group: Group) -> int:
    """By one worker. The simulation carries Lion's votes as fp32; their packing, which loses nothing, is counted."""
    if run.algo != "lion":
        return group.bytes_up
    numel = group.layout.numel
    return group.steps * Votes().encoded_size(numel)


def _received(run: Run, sent: int) -> int:
    """By one worker: merged vectors in the codec of the way back, or all others' messages."""
    if run.gathered:
        return sent * (run.workers - 1)
    up, down = run.cfg.get("codec"), run.cfg.get("codec_down") or "fp32"
    return round(sent * get_codec(down).bits_per_value / get_codec(up).bits_per_value) if up else sent
