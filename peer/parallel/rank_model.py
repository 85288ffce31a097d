"""One rank's part of a model: its weights and its gradient as two flat vectors of its own.

Shapes: B sequences, T tokens, n values that this rank holds, P parameters of the model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from peer.config import ModelConfig
from peer.footprint.layout import Layout
from peer.footprint.workload import Recompute
from peer.model.decoder import Decoder
from peer.model.frozen_weights import FrozenWeights
from peer.model.layout import FlatLayout
from peer.model.marks import counted
from peer.model.mixed_precision import autocast
from peer.parallel.loss import SummedLoss
from peer.parallel.pieces import LocalPieces
from peer.parallel.ranks import Ranks


class RankModel:
    """The model as one rank of `ranks` has it. `weights` and `gradient` (n,) fp32 hold its pieces in the order of
    `pieces.layout`, `whole` is that of all; an optimizer that treats every value alike steps on them."""

    def __init__(
        self, config: ModelConfig, ranks: Ranks, narrow: torch.dtype | None, base: FrozenWeights | None = None
    ) -> None:
        """Products are in `narrow`; None: in fp32. `base`: of a model with an adapter, which is whole at each
        rank; where the layout cuts the base, it comes in the machine's memory."""
        self.ranks, self.whole = ranks, FlatLayout.of(config)
        self.pieces: LocalPieces
        self.scale = 1.0
        """The factor of the loss in a backward pass."""
        self._narrow = narrow
        self._loss: SummedLoss
        self._release: Callable[[], None] = lambda: None  # after a forward without a backward
        self._copies = ranks.layout.replicate if base is None else ranks.layout.size
        """The ranks that hold the same value."""
        if ranks.layout.parts == 1 or base is not None:
            self.pieces = LocalPieces.of(self.whole, {}, Layout(replicate=ranks.layout.size), ranks.rank)
            self.weights, self.gradient = self._vectors()
            decoder = Decoder(config, self.weights, base=base)
            decoder.bind_gradients(self.gradient)
            self._loss = SummedLoss(decoder)
            if ranks.layout.parts > 1:
                from peer.parallel.cut_base import cut_base

                self._release = cut_base(self._loss, ranks)
            return
        from peer.parallel.cut_model import CutModel

        model = CutModel(config, ranks, narrow)
        assert isinstance(model.module, SummedLoss)
        self.pieces, self._loss = model.pieces, model.module
        self.weights, self.gradient = self._vectors()
        model.bind(self.weights, self.gradient)
        self._release = model.release

    def import_from(self, flat: Tensor) -> None:
        """Take this rank's pieces from the flat vector (P,)."""
        self.pieces.read(flat, self.weights)

    @property
    def recompute(self) -> Recompute:
        """The part of a block that is computed a second time for the backward pass."""
        return self._loss.decoder.recompute

    @recompute.setter
    def recompute(self, recompute: Recompute) -> None:
        self._loss.decoder.recompute = recompute

    def take_marks(self) -> None:
        """Take tokens that do not count in the loss (`peer.model.marks`)."""
        self._loss.decoder.marked = True

    def add_up(self, tokens: Tensor, rows_at_once: int | None = None, samples: Sequence[int] = ()) -> float:
        """Leave what this rank knows of the gradient of the scaled loss in `gradient`; return its share of the mean
        loss in nats a token of tokens (B, T+1). A rank has at most `rows_at_once` sequences on its device at a time.
        `samples`: the number of each row's sample, for dropout; without them nothing is dropped.
        All ranks must call it with the same arguments. Where the model is not cut, it waits for no other rank."""
        self.gradient.zero_()
        loss = 0.0
        for rows, weight in self._passes(tokens, rows_at_once, samples):
            self._loss.decoder.loss_weight = weight * self.scale or 1 / rows.numel()
            part = self._summed(rows) * weight
            (part if self.scale == 1.0 else part * self.scale).backward()
            loss += float(part.detach())
        return loss / self.ranks.layout.tensor

    def sum_gradients(self) -> float:
        """Complete `gradient` after `add_up`, and take the scale out of it; return the norm of the whole."""
        if self._copies > self.ranks.layout.replicate:  # an adapter, whole at each rank
            self.ranks.sum_over_all(self.gradient)
        else:
            self.ranks.sum_over_replicas(self.gradient)
        if self.scale != 1.0:
            self.gradient.mul_(1 / self.scale)
        (square,) = self.ranks.sum((self._square_of_gradient(),))
        return float(square**0.5)

    @torch.no_grad()
    def share_of_loss(self, tokens: Tensor, rows_at_once: int | None = None) -> float:
        """Return this rank's share of the mean loss, as `add_up` does, without a gradient."""
        loss = 0.0
        for rows, weight in self._passes(tokens, rows_at_once):
            loss += float(self._summed(rows)) * weight
        self._release()
        return loss / self.ranks.layout.tensor

    def _passes(
        self, tokens: Tensor, rows_at_once: int | None, samples: Sequence[int] = ()
    ) -> Iterator[tuple[Tensor, float]]:
        """Yield the rows of this rank, every `batches`-th one, and the weight of their summed loss in the mean loss of
        all. Each rank makes equally many passes, as each is a collective: one without rows makes its own for nothing.
        """
        batches = self.ranks.layout.batches
        mine, decoder = tokens[self.ranks.batch_rank :: batches], self._loss.decoder
        numbers = torch.tensor(samples or [0] * len(tokens))
        own = numbers[self.ranks.batch_rank :: batches]
        most = -(-len(tokens) // batches)
        count = counted(tokens) if decoder.marked else tokens.shape[0] * (tokens.shape[1] - 1)
        weight = 1 / max(1, count)
        for first in range(0, most, rows_at_once or most):
            at = slice(first, first + (rows_at_once or most))
            rows, has_rows = mine[at], first < len(mine)
            if samples:
                decoder.samples = own[at] if has_rows else numbers[:1]
            yield (rows, weight) if has_rows else (tokens[:1], 0.0)
        decoder.samples = None

    def _summed(self, rows: Tensor) -> Tensor:
        with autocast(self.ranks.device, self._narrow):
            summed: Tensor = self._loss(rows)
            return summed

    def _square_of_gradient(self) -> float:
        """Return this rank's share of the squared norm, in which each element counts once. NaN and Inf stay such."""
        layout = self.ranks.layout
        square = float(self.gradient.norm()) ** 2
        if layout.tensor > 1:
            views = self.pieces.layout.views(self.gradient)
            doubled = [views[name].flatten() for name, piece in self.pieces.pieces.items() if piece.is_doubled]
            square -= (1 - 1 / layout.tensor) * float(torch.cat(doubled).norm()) ** 2
        return square / self._copies

    def _vectors(self) -> tuple[Tensor, Tensor]:
        weights = torch.zeros(self.pieces.layout.numel, device=self.ranks.device)
        return weights, torch.zeros_like(weights)
