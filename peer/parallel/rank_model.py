"""One rank's part of a model: its weights and its gradient as two flat vectors of its own.

Shapes: B sequences, T tokens, n values that this rank holds, P parameters of the model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor

from peer.config import ModelConfig
from peer.model.decoder import Decoder
from peer.model.layout import FlatLayout
from peer.parallel.loss import SummedLoss
from peer.parallel.pieces import LocalPieces
from peer.parallel.ranks import Ranks


class RankModel:
    """The model as one rank of `ranks` has it. `weights` and `gradient` (n,) fp32 hold its pieces in the order of
    `pieces.layout`; an optimizer that treats every value alike steps on them."""

    def __init__(self, config: ModelConfig, ranks: Ranks, bf16: bool) -> None:
        self.ranks = ranks
        self.pieces: LocalPieces
        self._bf16 = bf16
        self._loss: SummedLoss
        self._context: Callable[[], AbstractContextManager[None]] = nullcontext
        if ranks.layout.parts == 1:
            self.pieces = LocalPieces.of(FlatLayout.of(config), {}, ranks.layout, ranks.rank)
            self.weights, self.gradient = self._vectors()
            decoder = Decoder(config, self.weights)
            decoder.bind_gradients(self.gradient)
            self._loss = SummedLoss(decoder)
            return
        from peer.parallel.cut_model import CutModel, over_cut_logits

        model = CutModel(config, ranks, bf16)
        self.pieces, self._loss = model.pieces, model.loss
        self.weights, self.gradient = self._vectors()
        model.bind(self.weights, self.gradient)
        if ranks.layout.tensor > 1:
            self._context = over_cut_logits

    def import_from(self, flat: Tensor) -> None:
        """Take this rank's pieces from the flat vector (P,)."""
        self.pieces.read(flat, self.weights)

    def export_to(self, flat: Tensor) -> None:
        """Write the pieces that this rank owns to the flat vector (P,). All ranks together write all of it."""
        self.pieces.write(self.weights, flat)

    def backward(self, tokens: Tensor) -> tuple[float, float]:
        """Return the mean loss in nats a token of tokens (B, T+1), the same at all ranks, and the norm of its gradient,
        whose pieces are left in `gradient`. All ranks must call it with the same tokens."""
        self.gradient.zero_()
        with self._computing():
            part = self._part(tokens)
            part.backward()
        self.ranks.sum_over_replicas(self.gradient)
        loss, square = self.ranks.sum((float(part.detach()) / self.ranks.layout.tensor, self._square_of_gradient()))
        return loss, square**0.5

    @torch.no_grad()
    def loss(self, tokens: Tensor) -> float:
        """Return the mean loss in nats a token of tokens (B, T+1). All ranks must call it with the same tokens."""
        with self._computing():
            part = float(self._part(tokens))
        return self.ranks.sum((part / self.ranks.layout.tensor,))[0]

    def _part(self, tokens: Tensor) -> Tensor:
        """Return what the rows of this rank, every `batches`-th one, add to the mean loss of all."""
        mine = tokens[self.ranks.batch_rank :: self.ranks.layout.batches]
        share = 1 / (tokens.shape[0] * (tokens.shape[1] - 1))
        if not len(mine):  # the collectives of a forward and a backward wait for this rank, too
            mine, share = tokens[:1], 0.0
        summed: Tensor = self._loss(mine)
        return summed * share

    def _square_of_gradient(self) -> float:
        """Return this rank's share of the squared norm, in which each element counts once. NaN and Inf stay such."""
        layout = self.ranks.layout
        square = float(self.gradient.norm()) ** 2
        if layout.tensor > 1:
            views = self.pieces.layout.views(self.gradient)
            doubled = [views[name].flatten() for name, piece in self.pieces.pieces.items() if piece.is_doubled]
            square -= (1 - 1 / layout.tensor) * float(torch.cat(doubled).norm()) ** 2
        return square / layout.replicate

    def _vectors(self) -> tuple[Tensor, Tensor]:
        weights = torch.zeros(self.pieces.layout.numel, device=self.ranks.device)
        return weights, torch.zeros_like(weights)

    @contextmanager
    def _computing(self) -> Iterator[None]:
        with self._context(), torch.autocast(self.ranks.device.type, dtype=torch.bfloat16, enabled=self._bf16):
            yield
