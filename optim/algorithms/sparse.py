"""The common part of DeMo and SparseLoCo: a memory; the largest coefficients of each of its tiles are sent."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch

from optim.algorithms.dct_tiles import TileRange, Tiling, top_k
from optim.algorithms.packing import Part, Quantized, SparsePacking


class Scheme(ABC):
    """The formulas of one method: how a memory is filled, what part of it is sent, and how messages are averaged.

    Pieces are flat, (n,), n = tiling.numel."""

    bins: int | None
    """Levels that a value is quantized to; None: not quantized."""

    @abstractmethod
    def kept(self, elements: int) -> int:
        """Return how many coefficients of a tile of this many elements are sent."""

    @abstractmethod
    def remember(self, memory: torch.Tensor, product: torch.Tensor, lr: float) -> None:
        """Add the worker's product to `memory`, in place, elementwise."""

    @abstractmethod
    def quantize(self, value: torch.Tensor) -> tuple[torch.Tensor, Quantized | None]:
        """Return what others will read in place of `value`."""

    @abstractmethod
    def coefficients(self, tiles: torch.Tensor, tiling: Tiling) -> torch.Tensor:
        """Map a memory's (tiles, elements) to the coefficients to choose from, same shape."""

    @abstractmethod
    def values(self, coefficients: torch.Tensor, tiling: Tiling) -> torch.Tensor:
        """Invert `coefficients`; flat. In fp32 every CPU gets the same bits."""

    @abstractmethod
    def clipped(self, parts: Sequence[Part]) -> Sequence[Part]:
        """Clip all senders' parts of one piece before they are averaged."""

    @abstractmethod
    def step_into(self, after: torch.Tensor, before: torch.Tensor, update: torch.Tensor, lr: float) -> None:
        """Write the weights after the step, elementwise; `after` may be `before`. `lr`: the inner learning rate."""

    def take(self, memory: torch.Tensor, tiling: Tiling) -> tuple[Part, Quantized | None]:
        """Return the message of one piece of the memory, and subtract from the memory what others will read."""
        found = self.coefficients(tiling.cut(memory), tiling)
        index, value = top_k(found, self.kept(tiling.size[1]))
        value, quantized = self.quantize(value)
        memory.sub_(self.values(_scattered((index, value), tiling), tiling))
        return (index, value), quantized

    def put_back(self, memory: torch.Tensor, tiling: Tiling, part: Part) -> None:
        """Undo `take`, except for rounding."""
        memory.add_(self.values(_scattered(part, tiling), tiling))

    def mean(self, parts: Sequence[Part], weights: Sequence[float], tiling: Tiling) -> torch.Tensor:
        """Average all senders' parts of one piece; flat."""
        return self.values(mean_over_senders(self.clipped(parts), tiling.size, weights), tiling)

    def packing(self, cut: Sequence[TileRange]) -> SparsePacking:
        """Return the format of a message about these pieces."""
        sizes = [piece.tiling.size for piece in cut]
        return SparsePacking(sizes, [self.kept(elements) for _, elements in sizes], self.bins)


def mean_over_senders(parts: Sequence[Part], size: tuple[int, int], weights: Sequence[float]) -> torch.Tensor:
    """Return the weighted mean of each coefficient over the peers that SENT it, dense, (tiles, elements) = `size`.

    It is up to K times the mean over all peers. A coefficient that no peer sent is 0. Sums are in the order given."""
    total = parts[0][1].new_zeros(size)
    weight = torch.zeros_like(total)
    for (index, value), share in zip(parts, weights, strict=True):
        total.scatter_add_(1, index, value * share)
        weight.scatter_add_(1, index, torch.full_like(value, share))
    return torch.where(weight > 0, total / weight, 0.0)


def _scattered(part: Part, tiling: Tiling) -> torch.Tensor:
    index, value = part
    return value.new_zeros(tiling.size).scatter_(1, index, value)
