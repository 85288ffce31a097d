"""SparseLoCo (arXiv 2508.15706), as in Templar's implementation: top-k, few bits, error feedback, no momentum."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median_low
from typing import Final

import torch

from optim.algorithms.dct_tiles import Tiling
from optim.algorithms.packing import Part, Quantized
from optim.algorithms.sparse import Scheme
from optim.deterministic import norm

RANGE_IN_SIGMAS: Final = 6
CLIP_EPS: Final = 1e-8


@dataclass(frozen=True)
class SparseLocoScheme(Scheme):
    """SparseLoCo's formulas. error <- ef_decay * error + (theta - local); the k largest values of each tile are sent,
    quantized, and subtracted from the error; theta <- theta - outer_lr * (mean over senders).

    Each piece (a parameter, or a band of a large one on the network) has its own statistics for the quantizer, and its
    own norm, which `clip_norm` shortens to the median peer's.
    """

    topk: int = 64
    bins: int | None = 4
    outer_lr: float = 0.4
    ef_decay: float = 0.95
    clip_norm: bool = True

    def kept(self, elements: int) -> int:
        """Return an even number, at least 2, as in the source; 1 for a tile of one element."""
        k = max(2, min(self.topk, elements))
        return min(k - k % 2, elements)

    def remember(self, memory: torch.Tensor, product: torch.Tensor, lr: float) -> None:
        memory.mul_(self.ef_decay).add_(product)

    def quantize(self, value: torch.Tensor) -> tuple[torch.Tensor, Quantized | None]:
        if self.bins is None:
            return value, None
        quantized = quantize(value, self.bins)
        return dequantize(quantized, value.dtype), quantized

    def coefficients(self, tiles: torch.Tensor, tiling: Tiling) -> torch.Tensor:
        return tiles

    def values(self, coefficients: torch.Tensor, tiling: Tiling) -> torch.Tensor:
        return tiling.join(coefficients)

    def clipped(self, parts: Sequence[Part]) -> Sequence[Part]:
        return clipped_to_median(parts) if self.clip_norm else parts

    def step_into(self, after: torch.Tensor, before: torch.Tensor, update: torch.Tensor, lr: float) -> None:
        torch.sub(before, update * self.outer_lr, out=after)


def quantize(value: torch.Tensor, bins: int) -> Quantized:
    """Return (q, levels, shift): uint8 codes below `bins`, the mean of each bin's values (fp32, as sent), and the mean
    of all values. Bins have equal width over +-3 standard deviations. A code decodes to levels[q] + shift."""
    shift = value.mean()
    centered = value - shift
    scale = RANGE_IN_SIGMAS * centered.norm() / math.sqrt(max(1, centered.numel() - 1)) / bins
    if not (math.isfinite(float(scale)) and float(scale) > 0):
        scale = torch.ones_like(scale)
    narrow = centered.float()
    q = (narrow / scale + bins // 2).round().clamp(0, bins - 1).to(torch.uint8)
    sums = torch.zeros(bins, dtype=narrow.dtype, device=value.device)
    sums.scatter_add_(0, q.flatten().long(), narrow.flatten())
    counts = torch.zeros_like(sums).scatter_add_(0, q.flatten().long(), torch.ones_like(narrow).flatten())
    return q, torch.where(counts > 0, sums / counts, 0.0), shift


def dequantize(quantized: Quantized, dtype: torch.dtype) -> torch.Tensor:
    """Decode in fp32, as receivers do, and convert to `dtype`."""
    q, levels, shift = quantized
    return (levels[q.long()] + shift.float()).to(dtype)


def clipped_to_median(parts: Sequence[Part]) -> list[Part]:
    """Scale each sender's values of one piece by min(1, median norm / norm), with the lower median of an even number.

    Norms are summed in a fixed order, so that all peers scale alike."""
    norms = [norm(value) for _, value in parts]
    usual = median_low(norms)
    factors = [min(1.0, usual / (length + CLIP_EPS)) for length in norms]
    return [(index, value * factor) for (index, value), factor in zip(parts, factors, strict=True)]
