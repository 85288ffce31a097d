"""A basis of a matrix's row or column space with the same bits on every CPU.

One power iteration from a seeded start, in integers of few bits held in float64: every product and partial sum is an
integer below 2^53, so it has no rounding, in whatever order a BLAS adds (as in `optim.algorithms.dct_tiles`). Then
Gram-Schmidt with sums in a fixed order.
"""

from __future__ import annotations

import math
from typing import Final

import torch

VALUE_BITS: Final = 20  # of the matrix: 20 + 12 + 20 < 53, with up to 2^20 rows or columns
START_BITS: Final = 12
BASIS_BITS: Final = 22  # of the basis; 20 + 22 + 10 < 53, with a rank of up to 2^10
CHANCE: Final = 2.0**-8


def integers(x: torch.Tensor, bits: int) -> tuple[torch.Tensor, float]:
    """Return x in float64 as integers of at most `bits` bits, rounded, and the power of 2 to multiply them with."""
    wide = x.double()
    largest = max(float(wide.max()), -float(wide.min())) if x.numel() else 0.0
    if largest == 0:
        return wide, 1.0
    scale = math.ldexp(1.0, math.frexp(largest)[1] - bits)
    return wide.mul_(1 / scale).round_(), scale


def shared_basis(matrix: torch.Tensor, rank: int, seed: int, of_rows: bool) -> torch.Tensor:
    """Return an orthonormal basis, (columns, rank) of the row space, or (rows, rank) of the column space, as float64
    integers times 2^-`BASIS_BITS`.

    Directions by chance, a `CHANCE`-th as long as the largest, are added: they are all of the basis while the matrix is
    0, complete one of too low a rank, and let later bases reach what earlier ones have missed."""
    m, _ = integers(matrix if of_rows else matrix.T, VALUE_BITS)
    generator = torch.Generator().manual_seed(seed)
    most = 1 << (START_BITS - 1)
    start = torch.randint(-most, most, (m.shape[1], rank), generator=generator).double()
    image, _ = integers(m @ start, START_BITS)
    back, _ = integers(m.T @ image, VALUE_BITS)
    return _orthonormal(back.add_(start.mul_(CHANCE * 2.0 ** (VALUE_BITS - START_BITS)))).mul_(2.0**BASIS_BITS).round_()


def _orthonormal(x: torch.Tensor) -> torch.Tensor:
    """Make the columns of x (n, rank) float64 orthonormal by the modified Gram-Schmidt process, twice."""
    rows = x.T.contiguous()
    for _ in range(2):
        for j in range(len(rows)):
            rows[j] /= math.sqrt(float(_ordered_sums(rows[j : j + 1] * rows[j])[0]))
            later = rows[j + 1 :]
            if len(later):
                later -= _ordered_sums(later * rows[j])[:, None] * rows[j]
    return rows.T.contiguous()


def _ordered_sums(x: torch.Tensor) -> torch.Tensor:
    """Sum each row of x (k, n) float64, which is overwritten, as `optim.deterministic.ordered_sum` does."""
    n = x.shape[1]
    while n > 1:
        lower = (n + 1) // 2
        x[:, : n - lower] += x[:, lower:n]
        n = lower
    return x[:, 0]
