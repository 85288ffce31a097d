"""One cell of the convergence benchmark: a method's workers in one process, from a warm model, over the same text.

The strategies, codecs, gate, slices and inner optimizers are those of a run's peers; only the transport is missing.
`tests/processes/test_four_processes.py` holds that groups of this kind reach the states of real peers, to the bit.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors.torch import load_file

from benchmarks.training import cloze
from benchmarks.training.byte_task import BATCH, MODEL, SEQ, STEPS, WARM_STEPS, WORKERS, Task, inner_config
from benchmarks.training.demo_group import DemoGroup
from benchmarks.training.gossip_group import GossipGroup
from benchmarks.training.liars import Lie, liar
from benchmarks.training.powersgd_group import PowerSgdGroup
from benchmarks.training.strategy_group import Overlap, StrategyGroup
from optim.algorithms.outer_step import DilocoOuter
from optim.config import (
    CodecConfig,
    DemoConfig,
    DilocoConfig,
    EagerConfig,
    GossipConfig,
    OuterConfig,
    StreamingConfig,
)
from optim.schedule import quadratic_steps
from optim.strategies.registry import build_strategy
from peer.compute.lr_schedule import learning_rate
from peer.compute.optimizer import InnerSpec
from peer.config import InnerConfig
from peer.model.layout import FlatLayout

EVALUATIONS = 6  # points of a run's curve


@dataclass(frozen=True)
class Run:
    """A method of a run, and its settings."""

    method: OuterConfig
    codec: CodecConfig = field(default_factory=CodecConfig)
    inner: dict[str, Any] = field(default_factory=dict)
    """Changes to `byte_task.INNER`."""
    workers: int = WORKERS
    liars: int = 0
    lie: Lie = "garbage"
    powersgd_rank: int = 0
    """If set, the workers average gradients as PowerSGD's paper does; `method` and `codec` say nothing."""
    by_authors: bool = False
    """Whether `method`, DeMo, is computed by its authors' formulas in float64."""

    @property
    def settings(self) -> dict[str, Any]:
        """All that the losses depend on, except for the code: plain values for JSON. Settings that have their default
        are left out, so that a new setting changes no other row."""
        found = {"method": stated(self.method), "codec": stated(self.codec), "inner": stated(inner_config(self.inner))}
        extra = {"liars": self.liars, "lie": self.lie} if self.liars else {}
        extra |= {"powersgd_rank": self.powersgd_rank} if self.powersgd_rank else {}
        extra |= {"by_authors": True} if self.by_authors else {}
        sizes = {"workers": self.workers, "steps": STEPS, "warm_steps": WARM_STEPS, "model": stated(MODEL)}
        plain: dict[str, Any] = msgspec.to_builtins({**found, **sizes, **extra})
        return plain


def stated(struct: msgspec.Struct) -> dict[str, Any]:
    """Return the settings of `struct` that differ from their defaults, and its name."""
    fields = msgspec.structs.fields(struct)
    return {"is": type(struct).__name__} | {
        field.name: getattr(struct, field.name) for field in fields if getattr(struct, field.name) != field.default
    }


def train(run: Run, seed: int, folder: Path) -> dict[str, Any]:
    """Train for `STEPS` inner steps from the warm weights in `folder`. `curve`: (inner steps, payload bytes sent by a
    worker, loss). A run whose loss is not finite ends there."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)  # ternary codes are drawn
    begin = time.process_time()
    task, config = Task(seed), inner_config(run.inner)
    group = group_of(run, config, task.layout, load_file(folder / f"warm-{seed}.safetensors")["theta"], seed)
    clip_norm = math.inf if group.sends_gradients else config.clip_norm
    curve = []
    for step in range(STEPS):
        numbers = range(step * run.workers, (step + 1) * run.workers)
        gradients = [task.gradient(group.local[k], number, clip_norm) for k, number in enumerate(numbers)]
        group.step([task.layout.views(gradient) for gradient in gradients], learning_rate(config, step))
        if (step + 1) % (STEPS // EVALUATIONS) == 0:
            curve.append((step + 1, group.bytes_up, task.loss(group.theta)))
            if not math.isfinite(curve[-1][2]):
                break
    text = bytes(task.corpus.held_out.astype("uint8"))
    return {
        "curve": curve,
        "loss": curve[-1][2] if math.isfinite(curve[-1][2]) else None,
        "cloze": round(cloze.accuracy(task, group.theta, cloze.draw(text, 0)), 4),
        "sent": group.bytes_up,
        "received": group.bytes_down,
        "fp32_gradients": 4 * task.layout.numel * STEPS,
        "tokens": STEPS * BATCH * SEQ,
        "parameters": task.layout.numel,
        "cpu_s": round(time.process_time() - begin, 1),
    }


def group_of(
    run: Run, config: InnerConfig, layout: FlatLayout, theta: torch.Tensor, seed: int
) -> StrategyGroup | GossipGroup | PowerSgdGroup | DemoGroup:
    """Return the run's workers at these weights, with empty optimizers, as a peer that joins has."""
    method, spec = run.method, InnerSpec.of(config)
    if run.powersgd_rank:
        return PowerSgdGroup(layout, theta, run.workers, spec, run.powersgd_rank, config.clip_norm)
    if isinstance(method, DemoConfig) and run.by_authors:
        return DemoGroup(layout, theta, run.workers, method.decay, method.topk, method.chunk)
    if isinstance(method, GossipConfig):
        return GossipGroup(method, run.codec, layout, theta, run.workers, spec, seed)
    overlap, every = Overlap(), method.steps
    if isinstance(method, StreamingConfig):
        overlap, every = Overlap(tau=method.tau, mix=method.mix), method.steps // method.fragments
    elif isinstance(method, EagerConfig):
        overlap = Overlap(eager=DilocoOuter(method.lr, method.momentum, method.nesterov))

    def steps_of(first: int) -> int:
        if isinstance(method, DilocoConfig) and method.schedule == "quadratic":
            most = min(method.steps_max, STEPS - first)
            return min(quadratic_steps(every, method.alpha, learning_rate(config, first)), max(every, most))
        return every

    return StrategyGroup(
        lambda: build_strategy(method, run.codec, layout, config),
        layout.views(theta),
        run.workers,
        every,
        spec,
        overlap=overlap,
        tokens=every * BATCH * SEQ,
        steps_of=steps_of,
        corrupt=liar(run.lie, run.liars, seed) if run.liars else None,
    )
