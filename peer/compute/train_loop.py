"""Training of the local weights between two outer steps.

Shapes: B sequences, T = seq_len tokens, P parameters of the model (the length of every flat vector).

An inner run usually starts from the outer weights. The inner optimizer's state is never reset and never averaged
(DiLoCo, 2311.08105). The learning rate follows the run's global inner step, so that a late joiner trains at the rate of
all peers.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from peer.compute.adamw_fused import FusedAdamW
from peer.compute.build_optimizer import build_inner
from peer.compute.device import Device
from peer.compute.held_weights import hold
from peer.compute.lr_schedule import learning_rate
from peer.compute.model_trainer import ModelTrainer, StepOutcome
from peer.compute.optimizer import InnerOptimizer, InnerSpec
from peer.compute.out_of_memory import free_cached, is_out_of_memory
from peer.config import InnerConfig, MasterType, ModelConfig
from peer.footprint.layout import ONE_DEVICE, check_split
from peer.footprint.step_size import StepSize
from peer.ipc.inner_options import ElementRange
from peer.ipc.train_messages import InnerResult
from peer.model.decoder import Decoder
from peer.model.frozen_weights import FrozenWeights
from peer.model.layout import FlatLayout
from peer.model.mixed_precision import autocast

__all__ = ["InnerConfig", "InnerTrainer", "learning_rate", "run_inner"]


class InnerTrainer(ModelTrainer):
    """The whole model on one device: n = P. With split weights `local` is their bf16 half, which the blocks compute
    with, and nothing but the `held` weights may write it."""

    def __init__(
        self,
        model: ModelConfig,
        config: InnerConfig,
        device: Device,
        step_size: StepSize | None = None,
        base: FrozenWeights | None = None,
        weights: MasterType = "fp32",
    ) -> None:
        """`base`: of a model with an adapter, on the device. `weights`: how they are held there; raises ConfigError for
        what cannot be split."""
        layout = FlatLayout.of(model)
        self.held = hold(weights, layout.numel, device.torch)
        super().__init__(config, device, self.held.bound, torch.zeros(layout.numel, device=device.torch))
        if weights == "split":
            check_split(ONE_DEVICE, model, config.optimizer, self.narrow is torch.float16)
        build = FusedAdamW if config.optimizer == "adamw" else build_inner
        self.optimizer: InnerOptimizer = build(InnerSpec.of(config), layout, self.gradient)
        self.model = Decoder(model, self.local, base=base)
        self.model.bind_gradients(self.gradient)
        self.compiled = device.compile
        hidden = self.model.hidden
        self._hidden: Callable[[Tensor], Tensor] = torch.compile(hidden) if self.compiled else hidden
        self.resize(StepSize(config.batch_size) if step_size is None else step_size)

    def import_from(self, outer: Tensor) -> None:
        self.held.import_from(outer)

    def mix(self, outer: Tensor, ranges: Iterable[ElementRange], alpha: float) -> None:
        self.held.mix(outer, ranges, alpha)

    def write_delta(self, outer: Tensor, at: slice, out: Tensor) -> None:
        self.held.write_delta(outer, at, out)

    def mean_gradient(self, at: slice, out: Tensor) -> None:
        assert self._gradient_sum is not None
        torch.div(self._gradient_sum[at].cpu(), max(1, self._weights), out=out)

    def save(self, state: Tensor) -> None:
        self.optimizer.save(state)

    def load(self, state: Tensor) -> None:
        self.optimizer.load(state)

    def resize(self, size: StepSize) -> None:
        self.step_size = size
        self.model.recompute = size.recompute

    def take_marks(self) -> None:
        super().take_marks()
        self.model.marked = True

    def try_step(self, sequences: int, seq_len: int) -> None:
        """Compute a gradient with one micro-batch of that shape, for what it takes; nothing but `gradient` changes.
        Never compiled: compiled it takes less."""
        tokens = torch.zeros(sequences, seq_len + 1, dtype=torch.int64, device=self.device.torch)
        self._add_up(tokens, self.model.hidden)
        self.gradient.zero_()

    @contextmanager
    def holding(self, weights: Tensor) -> Iterator[None]:
        """A device has room for one of the two: there the local ones wait in the machine's memory."""
        if self.local.device == weights.device:
            self.model.point_to(weights)
            yield
            self.model.point_to(self.local)
            return
        kept = self.local.cpu()
        self.local.copy_(weights)
        yield
        self.local.copy_(kept)

    @torch.no_grad()
    def evaluate(self, batches: Iterable[Tensor], on_batch: Callable[[], None]) -> float:
        total, weights = 0.0, 0
        for tokens in batches:
            total += self._as_it_fits(partial(self._losses, tokens.to(self.device.torch)))
            weights += self.weight_of(tokens)
            on_batch()
        return total / max(1, weights)

    def _losses(self, tokens: Tensor) -> float:
        """Return the sum over sequences of their mean losses; with marks the sum of all losses."""
        parts = tokens.split(self.step_size.sequences)
        each = 1 if self._takes_marks else tokens.shape[1] - 1
        return sum(float(self._loss(part, self.model.hidden)) for part in parts) / each

    def _move(self) -> None:
        self.held.step(self.optimizer, self.gradient)

    def _backward(self, tokens: Tensor, samples: Sequence[int]) -> tuple[float, float]:
        loss = self._as_it_fits(partial(self._add_up, tokens.to(self.device.torch), self._hidden, samples))
        if self.scaler is not None:
            self.scaler.unscale_(self.gradient)
        return loss, float(self.gradient.norm())  # one pass finds the norm and any NaN or Inf

    def _as_it_fits(self, compute: Callable[[], float]) -> float:
        """Return what `compute` does, which is repeated with smaller micro-batches where memory runs out."""
        while True:
            try:
                return compute()
            except (RuntimeError, MemoryError) as error:
                smaller = self.step_size.smaller
                if smaller is None or not is_out_of_memory(error):
                    raise
            free_cached(self.device.torch)  # not sooner: the error holds on to the tensors of the step
            self.resize(smaller)
            self.on_smaller(smaller)

    def _add_up(self, tokens: Tensor, hidden: Callable[[Tensor], Tensor], samples: Sequence[int] = ()) -> float:
        """Leave the gradient of the scaled loss of the batch in `gradient`; return its mean loss."""
        self.gradient.zero_()
        count = self.weight_of(tokens) * (1 if self._takes_marks else tokens.shape[1] - 1)
        loss = torch.zeros((), device=self.device.torch)
        self.model.loss_weight = self.scale / count
        numbers = torch.tensor(samples)
        for first in range(0, len(tokens), self.step_size.sequences):
            rows = slice(first, first + self.step_size.sequences)
            self.model.samples = numbers[rows] if len(numbers) else None
            mean = self._loss(tokens[rows], hidden) / count
            (mean if self.scaler is None else mean * self.scale).backward()
            loss += mean.detach()
        self.model.samples = None
        return float(loss)

    def _loss(self, tokens: Tensor, hidden: Callable[[Tensor], Tensor]) -> Tensor:
        """Return the sum of the losses of tokens (B, T+1) in nats."""
        kept = self.step_size.recompute == "none"  # else a block's cast weights go when the block has gone
        with autocast(self.device.torch, self.narrow, keeps_casts=kept):
            total, _ = self.model.losses(hidden(self.model.inputs_of(tokens)), tokens[:, 1:])
        return total


@dataclass
class InnerRun:
    """The samples and the bounds of one inner run."""

    numbers: Iterable[int]
    first_step: int
    deadline_s: float
    steps: int | None
    stopped: Callable[[int], bool]
    """Called with the number of steps made; True ends the run."""
    product: Literal["delta", "gradient"] = "delta"
    """With "gradient" the steps gather the trainer's mean gradient and move nothing."""
    on_step: Callable[[int, StepOutcome, InnerResult], None] = field(default=lambda step, outcome, so_far: None)


def run_inner(trainer: ModelTrainer, batch: Callable[[list[int]], Tensor], run: InnerRun) -> InnerResult:
    """Train `trainer` on the run's samples in order, batch_size a step, until the samples, the steps or the time run
    out.

    `batch` turns sample numbers into tokens (B, T+1). The run ends only between two steps, so the result counts exactly
    the samples trained on. The last batch may be smaller than the others.
    """
    started = time.monotonic()
    numbers = iter(run.numbers)
    result = InnerResult(steps=0, sequences=0, tokens=0, loss=math.nan, seconds=0.0, skipped=0)
    total_loss, useful = 0.0, 0
    if run.product == "gradient":
        trainer.begin_gradient()
    while run.steps is None or result.steps < run.steps:
        is_late = time.monotonic() - started >= run.deadline_s
        if trainer.agreed(is_late or run.stopped(result.steps)):
            break
        chosen = list(itertools.islice(numbers, trainer.config.batch_size))
        if not chosen:
            break
        tokens = batch(chosen)
        step = run.first_step + result.steps
        gathers = run.product == "gradient"
        outcome = trainer.add_gradient(tokens, chosen) if gathers else trainer.step(tokens, step, chosen)
        if outcome.is_useful:
            total_loss += outcome.loss
            useful += 1
        result = InnerResult(
            steps=result.steps + 1,
            sequences=result.sequences + len(chosen),
            tokens=result.tokens + tokens.numel() - len(chosen),
            loss=total_loss / useful if useful else math.nan,
            seconds=time.monotonic() - started,
            skipped=result.skipped + outcome.skipped,
            overflows=result.overflows + outcome.overflowed,
        )
        run.on_step(step, outcome, result)
    return result
