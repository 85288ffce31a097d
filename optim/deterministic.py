"""Sums, powers and roots with the same bits on every CPU, for results that all members of a run must agree on.

IEEE 754 fixes the bits of one addition, but not the order in which a library adds a vector up: torch's and BLAS's
depend on the width of the CPU's registers. C's `pow` is not fixed at all.
"""

from __future__ import annotations

import math
from typing import Final

import numpy as np
import torch

CHUNK: Final = 1 << 16  # values; one chunk in float64 stays in the L2 cache


def ordered_sum(x: torch.Tensor) -> float:
    """Sum x (n,), float64, which is overwritten: add the upper half to the lower one until one value is left."""
    n = x.numel()
    while n > 1:
        lower = (n + 1) // 2
        x[: n - lower].add_(x[lower:n])
        n = lower
    return float(x[0]) if n else 0.0


def square_sum(x: torch.Tensor) -> float:
    """Return the squared L2 norm of x, any shape. Squares of fp32 values need no rounding in float64."""
    total = 0.0
    for piece in x.reshape(-1).split(CHUNK):
        wide = piece.to(torch.float64, copy=True)
        total += ordered_sum(wide.mul_(wide))
    return total


def norm(x: torch.Tensor) -> float:
    """Return the L2 norm."""
    return math.sqrt(square_sum(x))


def power(base: float, exponent: int) -> float:
    """Return base ** exponent for exponent >= 0, by squaring."""
    result = 1.0
    while exponent:
        if exponent & 1:
            result *= base
        base *= base
        exponent >>= 1
    return result


def square_root(x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Take the root elementwise on the CPU by the processor's instruction, which IEEE 754 fixes; torch may call a
    library."""
    np.sqrt(x.numpy(), out=out.numpy())
    return out
