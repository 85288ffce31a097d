"""The inner optimizer of one rank, and its state in the order of the whole model, which another layout can load."""

from __future__ import annotations

import torch

from peer.compute.adamw_fused import FusedAdamW
from peer.compute.build_optimizer import build_inner
from peer.compute.optimizer import InnerOptimizer, InnerSpec
from peer.footprint.optimizer_state import COUNT_BYTES
from peer.parallel.pieces import LocalPieces
from peer.parallel.rank_model import RankModel


class RankOptimizer:
    """An `optimizer` of the vectors of a `RankModel`, whose layout has been checked for it."""

    def __init__(self, spec: InnerSpec, model: RankModel) -> None:
        build = FusedAdamW if spec.optimizer == "adamw" else build_inner
        self._pieces: LocalPieces = model.pieces
        self._ranks = model.ranks
        self.optimizer: InnerOptimizer = build(spec, model.pieces.layout, model.weights)

    def save(self, out: torch.Tensor) -> None:
        """Write what this rank owns of the state to `out`, uint8, as `InnerOptimizer.save` writes the whole."""
        if self._ranks.layout.parts == 1:
            if self._ranks.rank == 0:
                self.optimizer.save(out)
            return
        for local, whole in zip(*self._rows(out), strict=True):
            self._pieces.write(local, whole)
        if self._ranks.rank == 0:
            out[-COUNT_BYTES:].view(torch.int64).fill_(self.optimizer.steps)

    def load(self, saved: torch.Tensor) -> None:
        """Restore the state that the ranks of any layout have saved. All zero is the state before the first step."""
        if self._ranks.layout.parts == 1:
            self.optimizer.load(saved)
            return
        self.optimizer.steps = int(saved[-COUNT_BYTES:].view(torch.int64))
        if self.optimizer.steps:
            for local, whole in zip(*self._rows(saved), strict=True):
                self._pieces.read(whole, local)

    def _rows(self, saved: torch.Tensor) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Return the vectors of the state, like the weights: this rank's, and the whole ones in `saved`."""
        local = list(self.optimizer.state.view(-1, self._pieces.layout.numel).unbind())
        values = saved[: len(local) * self._pieces.numel * 4].view(torch.float32)
        return local, list(values.view(len(local), -1).unbind())
