"""Training as one rank of several, which share one model. Imported only there.

One rank alone may know that its time is up or its memory too small, but all act on it together: a rank that waits in a
collective for one that took another path would wait without end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor

from peer.compute.device import Device, narrow_type
from peer.compute.held_weights import mix_into
from peer.compute.model_trainer import ModelTrainer
from peer.compute.optimizer import InnerSpec
from peer.compute.out_of_memory import free_cached, is_out_of_memory
from peer.compute.rank_optimizer import RankOptimizer
from peer.config import InnerConfig, ModelConfig
from peer.footprint.step_size import StepSize
from peer.ipc.inner_options import ElementRange
from peer.model.frozen_weights import FrozenWeights
from peer.parallel.rank_model import RankModel
from peer.parallel.ranks import Ranks


class RankTrainer(ModelTrainer):
    """This rank's part of the model. `step_size` is that of each rank."""

    def __init__(
        self,
        model: ModelConfig,
        config: InnerConfig,
        device: Device,
        ranks: Ranks,
        step_size: StepSize,
        base: FrozenWeights | None = None,
    ) -> None:
        """`base`: of a model with an adapter, on the device; one that the layout cuts, in the machine's memory."""
        self._ranks = ranks
        self._model = RankModel(model, ranks, narrow_type(device, config), base)
        super().__init__(config, device, self._model.weights, self._model.gradient)
        self._state = RankOptimizer(
            InnerSpec.of(config), self._model.whole, self._model.pieces, ranks, self._model.weights
        )
        self.optimizer = self._state.optimizer
        self.resize(step_size)

    def take_marks(self) -> None:
        super().take_marks()
        self._model.take_marks()

    def agreed(self, wish: bool) -> bool:
        """Return what the first rank wishes."""
        return self._ranks.sum((wish and self._ranks.rank == 0,)) != [0.0]

    def resize(self, size: StepSize) -> None:
        self.step_size = size
        self._model.recompute = size.recompute

    def import_from(self, outer: Tensor) -> None:
        self._model.import_from(outer)

    def mix(self, outer: Tensor, ranges: Iterable[ElementRange], alpha: float) -> None:
        for strip in self._model.pieces.strips(ranges):
            mix_into(strip.of_local(self.local), strip.of_flat(outer), alpha)

    def write_delta(self, outer: Tensor, at: slice, out: Tensor) -> None:
        for strip in self._model.pieces.strips([(at.start, at.stop)], owned=True):
            mine = strip.of_local(self.local).cpu()
            torch.sub(strip.of_flat(outer), mine, out=strip.of_flat(out, begins_at=at.start))

    def mean_gradient(self, at: slice, out: Tensor) -> None:
        assert self._gradient_sum is not None
        for strip in self._model.pieces.strips([(at.start, at.stop)], owned=True):
            mine = strip.of_local(self._gradient_sum).cpu()
            torch.div(mine, max(1, self._weights), out=strip.of_flat(out, begins_at=at.start))

    def save(self, state: Tensor) -> None:
        """Write what this rank owns of the state."""
        self._state.save(state)

    def load(self, state: Tensor) -> None:
        self._state.load(state)

    @contextmanager
    def holding(self, weights: Tensor) -> Iterator[None]:
        kept = self.local.to("cpu", copy=True)
        self._model.import_from(weights)
        yield
        self.local.copy_(kept)

    def evaluate(self, batches: Iterable[Tensor], on_batch: Callable[[], None]) -> float:
        total, weights = 0.0, 0
        for batch in batches:
            tokens, weight = batch.to(self.device.torch), self.weight_of(batch)
            total += weight * self._as_it_fits(partial(self._model.share_of_loss, tokens))
            weights += weight
            on_batch()
        return total / max(1, weights)

    def _backward(self, tokens: Tensor, samples: Sequence[int]) -> tuple[float, float]:
        self._model.scale = self.scale
        loss = self._as_it_fits(partial(self._model.add_up, tokens.to(self.device.torch), samples=samples))
        return loss, self._model.sum_gradients()

    def _as_it_fits(self, compute: Callable[[int], float]) -> float:
        """Return the sum of what `compute` returns at all ranks for that many rows at once. All repeat it with smaller
        micro-batches where the memory of one runs out."""
        while True:
            share, failed = self._tried(compute)
            total, failures = self._ranks.sum((share, failed))
            if not failures:
                return total
            free_cached(self.device.torch)
            smaller = self.step_size.smaller
            assert smaller is not None
            self.resize(smaller)
            if self._ranks.rank == 0:
                self.on_smaller(smaller)

    def _tried(self, compute: Callable[[int], float]) -> tuple[float, bool]:
        """Return what `compute` does, and whether memory ran out. Where the model is cut the others are waiting in the
        midst of it for this rank: it ends the group, and the next one begins with the size given to `on_smaller`."""
        try:
            return compute(self.step_size.sequences), False
        except (RuntimeError, MemoryError) as error:
            smaller = self.step_size.smaller
            if smaller is None or not is_out_of_memory(error):
                raise
            if self._ranks.layout.parts > 1:
                self.on_smaller(smaller)
                raise
            return 0.0, True
