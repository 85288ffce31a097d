"""One rank's share of a stage: pieces of its flat vectors, and rows of each micro-batch.

Shapes: B rows of a micro-batch, P parameters of the stage, n values that this rank holds.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from peer.model.layout import FlatLayout
from peer.parallel.pieces import LocalPieces
from peer.parallel.ranks import Ranks


class StageShare:
    """The share of a rank. One device alone has everything.

    Every rank gets equally many rows of a micro-batch, so that all of them count the same bytes: one whose own rows are
    fewer has a copy of the first row of all, of which nothing is counted.
    """

    def __init__(self, whole: FlatLayout, ranks: Ranks) -> None:
        """`whole` is the layout of the stage. Raises ConfigError for a layout of ranks that stages do not have."""
        ranks.layout.check_stage()
        self.ranks = ranks
        self.pieces = LocalPieces.of(whole, {}, ranks.layout, ranks.rank)

    # -- vectors -----------------------------------------------------------------------------------------------------

    def add(self, flat: Tensor, local: Tensor) -> None:
        """Add this rank's pieces of a flat vector (P,) to its own one (n,)."""
        for strip in self.pieces.strips():
            strip.of_local(local).add_(strip.of_flat(flat).to(local.device))

    def write_difference(self, flat: Tensor, local: Tensor, out: Tensor) -> None:
        """Write what this rank owns of flat - local to `out`, like `flat` (P,) on the CPU."""
        for strip in self.pieces.strips(owned=True):
            torch.sub(strip.of_flat(flat), strip.of_local(local).cpu(), out=strip.of_flat(out))

    def norm(self, local: Tensor) -> float:
        """Return the norm of the whole vector, given each rank's part `local` (n,): the same at all ranks."""
        (square,) = self.ranks.sum((float(local.norm()) ** 2,))
        return math.sqrt(square / self.ranks.layout.replicate)

    # -- rows --------------------------------------------------------------------------------------------------------

    def rows(self, of_all: Tensor) -> Tensor:
        """Return a view of this rank's own rows of a tensor (B, ...)."""
        return of_all[self.ranks.batch_rank :: self.ranks.layout.batches]

    def dealt(self, of_all: Tensor, others: Tensor) -> Tensor:
        """Return this rank's rows of a tensor (B, ...) on its device, a copy. A row that is not its own is that of
        `others` (1, ...)."""
        mine = self.rows(of_all)
        if len(mine) < -(-len(of_all) // self.ranks.layout.batches):
            mine = torch.cat((mine, others))
        return mine.to(self.ranks.device, copy=True)

    def samples(self, first: int, batch: int) -> Tensor:
        """Return the numbers of the samples in this rank's rows of a micro-batch, on the CPU, where `first` is that of
        the first row of all."""
        numbers = first + torch.arange(batch)
        return self.dealt(numbers, numbers[:1]).cpu()
