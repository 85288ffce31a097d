"""The interface of a model that a worker trains, on one device or as one rank of several.

P: parameters of the model, the length of the flat vectors that workers share. n: values of `local` and `gradient`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from peer.compute.device import Device, narrow_type
from peer.compute.lr_schedule import learning_rate
from peer.compute.optimizer import InnerOptimizer
from peer.config import InnerConfig
from peer.footprint.step_size import StepSize
from peer.ipc.inner_options import ElementRange
from peer.model.marks import counted
from peer.model.mixed_precision import scaler_for


@dataclass(frozen=True)
class StepOutcome:
    """The loss of the batch in nats a token. `skipped`: the loss or the gradient was not finite, and nothing
    changed. Nothing changed either where no token of the batch `counts` in the loss, and where the step `overflowed`:
    what was not finite may be so in fp16 at this scale of the loss only."""

    loss: float
    skipped: bool
    counts: bool = True
    overflowed: bool = False

    @property
    def is_useful(self) -> bool:
        return self.counts and not (self.skipped or self.overflowed)


_NOTHING: Final = StepOutcome(math.nan, skipped=False, counts=False)


class ModelTrainer(ABC):
    """Weights and gradient as this process holds them (`local` and `gradient`, flat vectors of n fp32 values), and
    their inner `optimizer`. In fp16 the `scaler` has the scale of the loss.

    A batch goes through the device in micro-batches of `step_size`, whose gradients are added up. If memory runs out,
    the step is repeated with smaller ones, and `on_smaller` is called. All ranks of a group call the same methods with
    the same arguments, in the same order.
    """

    step_size: StepSize
    compiled: bool = False
    optimizer: InnerOptimizer

    def __init__(self, config: InnerConfig, device: Device, local: Tensor, gradient: Tensor) -> None:
        self.config = config
        self.device = device
        self.local = local
        self.gradient = gradient
        self.narrow = narrow_type(device, config)
        self.scaler = scaler_for(self.narrow)
        self.on_smaller: Callable[[StepSize], None] = lambda size: None
        self._gradient_sum: Tensor | None = None  # (n,), allocated on first use
        self._weights = 0  # of the batches in it
        self._takes_marks = False

    def take_marks(self) -> None:
        """Take batches with tokens that do not count in the loss (`peer.model.marks`) from now on."""
        self._takes_marks = True

    def weight_of(self, tokens: Tensor) -> int:
        """Return the weight of tokens (B, T+1) in a mean over several batches: their sequences or, with marks, the
        tokens that count."""
        return counted(tokens) if self._takes_marks else len(tokens)

    def step(self, tokens: Tensor, step: int, samples: Sequence[int] = ()) -> StepOutcome:
        """Make a step of the inner optimizer on tokens (B, T+1) at the run's inner step `step`. `samples`: the number
        of each row's sample, for dropout; without them nothing is dropped."""
        if not self.weight_of(tokens):
            return _NOTHING
        loss, norm = self._backward(tokens, samples)
        outcome = self._outcome(loss, norm)
        if not outcome.is_useful:
            return outcome
        if norm > self.config.clip_norm:
            self.gradient.mul_(self.config.clip_norm / norm)
        self.optimizer.lr = learning_rate(self.config, step)
        with torch.no_grad():
            self._move()
        return outcome

    def _move(self) -> None:
        """Make the step of the optimizer."""
        self.optimizer.step(self.local, self.gradient)

    def begin_gradient(self) -> None:
        """Clear the sum that `add_gradient` gathers."""
        if self._gradient_sum is None:
            self._gradient_sum = torch.zeros_like(self.gradient)
        self._gradient_sum.zero_()
        self._weights = 0

    def add_gradient(self, tokens: Tensor, samples: Sequence[int] = ()) -> StepOutcome:
        """Add the gradient of tokens (B, T+1) to the sum. Weights and optimizer stay as they are. `samples`: as of
        `step`."""
        assert self._gradient_sum is not None
        weight = self.weight_of(tokens)
        if not weight:
            return _NOTHING
        outcome = self._outcome(*self._backward(tokens, samples))
        if outcome.is_useful:
            self._gradient_sum.add_(self.gradient, alpha=weight)
            self._weights += weight
        return outcome

    def _outcome(self, loss: float, norm: float) -> StepOutcome:
        """Return what comes of a batch with this mean loss and norm of the gradient, the same at all ranks. Adapt the
        scale of the loss."""
        finite = math.isfinite(loss) and math.isfinite(norm)
        overflowed = self.scaler is not None and self.scaler.update(finite) and not finite
        return StepOutcome(loss, skipped=not (finite or overflowed), overflowed=overflowed)

    @property
    def scale(self) -> float:
        """The factor of the loss in a backward pass."""
        return 1.0 if self.scaler is None else self.scaler.scale

    def agreed(self, wish: bool) -> bool:
        """Return what all ranks do, of what each would."""
        return wish

    @abstractmethod
    def resize(self, size: StepSize) -> None:
        """Take steps of that size from now on."""

    @abstractmethod
    def import_from(self, outer: Tensor) -> None:
        """Begin from the flat vector (P,)."""

    @abstractmethod
    def mix(self, outer: Tensor, ranges: Iterable[ElementRange], alpha: float) -> None:
        """local <- alpha * local + (1 - alpha) * outer (P,) at these elements of the flat vector."""

    @abstractmethod
    def write_delta(self, outer: Tensor, at: slice, out: Tensor) -> None:
        """Write outer (P,) - local at these elements of the flat vector to `out`."""

    @abstractmethod
    def mean_gradient(self, at: slice, out: Tensor) -> None:
        """Write the mean over the batches since `begin_gradient`, each with its `weight_of`, at these elements of the
        flat vector, to `out`; zero if there were none."""

    @abstractmethod
    def save(self, state: Tensor) -> None:
        """Write the optimizer's state in the order of the whole model, uint8."""

    @abstractmethod
    def load(self, state: Tensor) -> None:
        """Restore what `save` wrote, on however many devices."""

    @abstractmethod
    def holding(self, weights: Tensor) -> AbstractContextManager[None]:
        """Compute with `weights` (P,), which are on the CPU, inside the block, and with the local ones after it."""

    @abstractmethod
    def evaluate(self, batches: Iterable[Tensor], on_batch: Callable[[], None]) -> float:
        """Return the mean loss of the weights in nats a token over batches (B, T+1) of equal length."""

    @abstractmethod
    def _backward(self, tokens: Tensor, samples: Sequence[int]) -> tuple[float, float]:
        """Return the mean loss of the batch and the norm of its gradient, which is left in `gradient`."""
