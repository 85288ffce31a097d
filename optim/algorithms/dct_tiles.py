"""Tiles of a parameter, their cosine transform, and the largest coefficients of each tile.

As in DeMo's reference (github.com/bloc97/DeMo) and, without the transform, in SparseLoCo's: each dimension is cut by
its largest divisor that is at most `chunk`. A prime dimension above `chunk` is cut into ones and not compressed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import torch

from optim.wire_sizes import largest_divisor
from peer.model.layout import FlatLayout

BITS: Final = 24  # of the integer transform's numbers: as many as an fp32 value has
AT_ONCE: Final = 1 << 18  # values that the integer transform works on at a time


@dataclass(frozen=True)
class Tiling:
    """A matrix of (down * h, across * w), cut into tiles of (h, w)."""

    h: int
    w: int
    down: int
    across: int

    @classmethod
    def of(cls, shape: tuple[int, ...], chunk: int) -> Tiling:
        """Cut matrices into (h, w) tiles and vectors into (1, w). More dimensions than two count as (first, all
        others)."""
        if len(shape) < 2:
            n = math.prod(shape)
            width = largest_divisor(n, chunk)
            return cls(1, width, n // width, 1)
        rows, columns = shape[0], math.prod(shape[1:])
        h, w = largest_divisor(rows, chunk), largest_divisor(columns, chunk)
        return cls(h, w, rows // h, columns // w)

    @property
    def size(self) -> tuple[int, int]:
        """(tiles, elements in each)."""
        return self.down * self.across, self.h * self.w

    @property
    def numel(self) -> int:
        return self.down * self.across * self.h * self.w

    def bands(self, most: int) -> list[Tiling]:
        """Cut the matrix between rows of tiles into pieces of at most `most` values, or of one row of tiles."""
        rows = max(1, most // (self.h * self.w * self.across))
        return [
            Tiling(self.h, self.w, min(rows, self.down - first), self.across) for first in range(0, self.down, rows)
        ]

    def cut(self, x: torch.Tensor) -> torch.Tensor:
        """Cut a parameter of any shape into (tiles, elements)."""
        return x.reshape(self.down, self.h, self.across, self.w).transpose(1, 2).reshape(self.size)

    def join(self, tiles: torch.Tensor) -> torch.Tensor:
        """Invert `cut`; flat."""
        return tiles.reshape(self.down, self.across, self.h, self.w).transpose(1, 2).reshape(-1)


@dataclass(frozen=True)
class TileRange:
    """A span of the flat vector (a parameter, or rows of one) and its tiling."""

    span: slice
    tiling: Tiling


def pieces(layout: FlatLayout, chunk: int, most: int) -> list[TileRange]:
    """Return all parameters in the layout's order; one with more than `most` values is cut into bands."""
    found = []
    for slot in layout.slots.values():
        whole, first = Tiling.of(slot.shape, chunk), slot.offset
        for tiling in whole.bands(most):
            found.append(TileRange(slice(first, first + tiling.numel), tiling))
            first += tiling.numel
    return found


def to_cosines(tiles: torch.Tensor, tiling: Tiling) -> torch.Tensor:
    """Return the orthonormal type-II cosine transform of each tile, (tiles, elements), in the dtype of `tiles`."""
    high, wide = _basis(tiling.h).to(tiles.dtype), _basis(tiling.w).to(tiles.dtype)
    return (high.T @ tiles.view(-1, tiling.h, tiling.w) @ wide).reshape(tiles.shape)


def from_cosines(coefficients: torch.Tensor, tiling: Tiling) -> torch.Tensor:
    """Invert `to_cosines`. In fp32 all machines get the same bits (`_integer_inverse`), as peers vote on the result."""
    if coefficients.dtype != torch.float32:
        high, wide = _basis(tiling.h).to(coefficients.dtype), _basis(tiling.w).to(coefficients.dtype)
        return (high @ coefficients.view(-1, tiling.h, tiling.w) @ wide.T).reshape(coefficients.shape)
    out = torch.empty_like(coefficients)
    step = max(1, AT_ONCE // (tiling.h * tiling.w))
    for first in range(0, len(out), step):
        part = coefficients[first : first + step]
        out[first : first + step] = _integer_inverse(part, tiling).view(part.shape)
    return out


def _integer_inverse(coefficients: torch.Tensor, tiling: Tiling) -> torch.Tensor:
    """Multiply integers of 24 bits, held in float64. Every product and partial sum is an integer below 2^53 (the
    largest: sqrt(2 * 256) * 2^24 * 2^24). It has no rounding, in whatever order a BLAS adds, fused or not. Rounding
    happens only between the products, per element, relative to the tile's largest magnitude."""
    high, wide = _integers(tiling.h), _integers(tiling.w)
    c, scale = _fixed_point(coefficients.to(torch.float64).view(-1, tiling.h, tiling.w))
    c, again = _fixed_point(torch.matmul(high.expand(len(c), -1, -1), c))
    return torch.matmul(c, wide.T).mul_(scale.mul_(again).mul_(2.0 ** (-2 * BITS)))


def _fixed_point(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Convert x, (T, h, w) float64, overwritten, to integers of at most 24 bits and a power of 2 for each tile to
    multiply them with, (T, 1, 1)."""
    largest = x.abs().amax((1, 2), keepdim=True).clamp_(min=2.0**-200)
    exponent = largest.view(torch.int64) & 0x7FF0_0000_0000_0000  # of the largest power of 2 that is not greater
    scale = exponent.view(torch.float64).mul_(2.0 ** (1 - BITS))
    return x.div_(scale).round_(), scale


def top_k(tiles: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (index, value) of each tile's largest magnitudes, each (tiles, k'), k' = k or all there are."""
    index = torch.topk(tiles.abs(), k=max(1, min(k, tiles.shape[1])), dim=1, sorted=False).indices
    return index, torch.gather(tiles, 1, index)


@lru_cache(maxsize=512)
def _basis(n: int) -> torch.Tensor:
    """Return (n, n) float64: column b is the b-th cosine."""
    place, wave = torch.arange(n, dtype=torch.float64), torch.arange(n, dtype=torch.float64)
    basis = torch.cos(math.pi / n * (place[:, None] + 0.5) * wave[None, :]) * math.sqrt(2 / n)
    basis[:, 0] /= math.sqrt(2)
    return basis


@lru_cache(maxsize=512)
def _integers(n: int) -> torch.Tensor:
    """Return the basis times 2^24, rounded. Two libraries' cosines, some 2^-30 apart here, round alike (tested for each
    n)."""
    return (_basis(n) * 2.0**BITS).round_()
