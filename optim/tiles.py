"""Cutting a parameter into tiles, their cosine transform, and the largest coefficients of each.

As in DeMo's reference (github.com/bloc97/DeMo) and, without the transform, in SparseLoCo's: each dimension is cut by
its largest divisor that is at most `chunk`. A prime dimension above `chunk` is cut into ones and not compressed.
"""

from __future__ import annotations

import math

import torch


def largest_divisor(n: int, at_most: int) -> int:
    """The largest divisor of n that is at most `at_most`."""
    return max(d for d in range(1, min(n, at_most) + 1) if n % d == 0)


class Tiling:
    """How a parameter of `shape` is cut. Matrices into (h, w) tiles; vectors into (1, w); more dimensions than two are
    taken as (first, all others)."""

    def __init__(self, shape: tuple[int, ...], chunk: int) -> None:
        rows, columns = (shape[0], math.prod(shape[1:])) if len(shape) > 1 else (1, math.prod(shape))
        self.shape = shape
        self.h, self.w = largest_divisor(rows, chunk), largest_divisor(columns, chunk)
        self.down, self.across = rows // self.h, columns // self.w

    @property
    def size(self) -> tuple[int, int]:
        """(tiles, elements in each)."""
        return self.down * self.across, self.h * self.w

    def cut(self, x: torch.Tensor) -> torch.Tensor:
        """A parameter, in any shape -> (tiles, elements)."""
        return x.reshape(self.down, self.h, self.across, self.w).transpose(1, 2).reshape(self.size)

    def join(self, tiles: torch.Tensor) -> torch.Tensor:
        """The inverse of `cut`, flat."""
        return tiles.reshape(self.down, self.across, self.h, self.w).transpose(1, 2).reshape(-1)


class Cosines:
    """The orthonormal type-II cosine transform of a tiling's tiles, in `dtype`."""

    def __init__(self, tiling: Tiling, dtype: torch.dtype) -> None:
        self._tiling = tiling
        self._high, self._wide = _basis(tiling.h, dtype), _basis(tiling.w, dtype)

    def forward(self, tiles: torch.Tensor) -> torch.Tensor:
        """(tiles, elements) -> coefficients, same shape."""
        x = tiles.view(-1, self._tiling.h, self._tiling.w)
        return (self._high.T @ x @ self._wide).reshape(tiles.shape)

    def inverse(self, coefficients: torch.Tensor) -> torch.Tensor:
        c = coefficients.view(-1, self._tiling.h, self._tiling.w)
        return (self._high @ c @ self._wide.T).reshape(coefficients.shape)


def top_k(tiles: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(index, value), each (tiles, k'), k' = k or all there are: the largest magnitudes of each tile."""
    index = torch.topk(tiles.abs(), k=max(1, min(k, tiles.shape[1])), dim=1, sorted=False).indices
    return index, torch.gather(tiles, 1, index)


def _basis(n: int, dtype: torch.dtype) -> torch.Tensor:
    """(n, n): column b is the b-th cosine. Computed in float64, whatever the dtype."""
    place, wave = torch.arange(n, dtype=torch.float64), torch.arange(n, dtype=torch.float64)
    basis = torch.cos(math.pi / n * (place[:, None] + 0.5) * wave[None, :]) * math.sqrt(2 / n)
    basis[:, 0] /= math.sqrt(2)
    return basis.to(dtype)
