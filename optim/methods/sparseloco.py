"""SparseLoCo (arXiv 2508.15706), as Templar's implementation has it: top-k, few bits, error feedback, no momentum."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from optim.methods.interface import Method, Quantized, Sparse, mean_over_senders
from optim.methods.packing import SparsePacking
from optim.tiles import Tiling, top_k
from peer.layout import FlatLayout

RANGE_IN_SIGMAS = 6
CLIP_EPS = 1e-8


class SparseLoco(Method[Sparse]):
    """Every H inner steps: error <- ef_decay * error + (theta - local); of each tile of it the k largest values are
    sent, quantized, and leave it; theta <- theta - outer_lr * (mean over senders).

    `bins`: levels a value is quantized to (4: 2 bits), by parameter; None: not quantized. `clip_norm`: each peer's
    values of a parameter are shortened to the median peer's norm.
    """

    def __init__(
        self,
        layout: FlatLayout,
        theta: torch.Tensor,
        H: int,
        topk: int = 64,
        chunk: int = 64,
        bins: int | None = 4,
        outer_lr: float = 0.4,
        ef_decay: float = 0.95,
        clip_norm: bool = True,
    ) -> None:
        super().__init__(layout, theta)
        self.every, self.topk, self.bins = H, topk, bins
        self.outer_lr, self.ef_decay, self.clip_norm = outer_lr, ef_decay, clip_norm
        self.error = torch.zeros_like(theta)
        self._tilings = [Tiling(slot.shape, chunk) for slot in layout.slots.values()]

    def sends(self, step: int) -> bool:
        return step % self.every == 0

    def outgoing(self, local: torch.Tensor, gradient: torch.Tensor) -> Sparse:
        self.error.mul_(self.ef_decay).add_(self.theta - local)
        parts, quantized = [], []
        for view, tiling in zip(self.layout.views(self.error).values(), self._tilings, strict=True):
            tiles = tiling.cut(view)
            index, value = top_k(tiles, _kept(self.topk, tiles.shape[1]))
            if self.bins is not None:
                quantized.append(quantize(value, self.bins))
                value = dequantize(quantized[-1], value.dtype)  # error feedback must see what the others will
            sent = torch.zeros_like(tiles).scatter_(1, index, value)
            view.sub_(tiling.join(sent).view(view.shape))
            parts.append((index, value))
        return Sparse(tuple(parts), tuple(quantized) or None)

    @property
    def packing(self) -> SparsePacking:
        sizes = [tiling.size for tiling in self._tilings]
        return SparsePacking(sizes, [_kept(self.topk, elements) for _, elements in sizes], self.bins)

    def merge(self, messages: Sequence[Sparse], weights: Sequence[float]) -> torch.Tensor:
        if self.clip_norm:
            messages = clipped_to_median(messages)
        means = mean_over_senders(messages, [tiling.size for tiling in self._tilings], weights)
        return torch.cat([t.join(m) for t, m in zip(self._tilings, means, strict=True)])

    def incoming(self, merged: torch.Tensor | None, local: torch.Tensor) -> None:
        assert merged is not None
        self.theta.sub_(merged * self.outer_lr)
        local.copy_(self.theta)

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {"error": self.error}


def quantize(value: torch.Tensor, bins: int) -> Quantized:
    """(q, levels, shift): uint8 codes below `bins`, the mean of what fell into each bin, and the mean of all, with
    levels in fp32 as they are sent; bins of equal width over +-3 standard deviations. Decodes to levels[q] + shift."""
    shift = value.mean()
    centered = value - shift
    scale = RANGE_IN_SIGMAS * centered.norm() / math.sqrt(max(1, centered.numel() - 1)) / bins
    if not (math.isfinite(float(scale)) and float(scale) > 0):
        scale = torch.ones_like(scale)
    narrow = centered.float()
    q = (narrow / scale + bins // 2).round().clamp(0, bins - 1).to(torch.uint8)
    sums = torch.zeros(bins, device=value.device).scatter_add_(0, q.flatten().long(), narrow.flatten())
    counts = torch.zeros_like(sums).scatter_add_(0, q.flatten().long(), torch.ones_like(narrow).flatten())
    return q, torch.where(counts > 0, sums / counts, 0.0), shift


def dequantize(quantized: Quantized, dtype: torch.dtype) -> torch.Tensor:
    """In fp32, as the others do it, then `dtype`."""
    q, levels, shift = quantized
    return (levels[q.long()] + shift.float()).to(dtype)


def _kept(topk: int, elements: int) -> int:
    """Of a tile: an even number, at least 2, as in the source; or its only element."""
    k = max(2, min(topk, elements))
    return min(k - k % 2, elements)


def clipped_to_median(messages: Sequence[Sparse]) -> list[Sparse]:
    """Each message's values of each parameter, scaled by min(1, median norm / norm); the lower median of an even
    number."""
    columns = []
    for p in range(len(messages[0].parts)):
        norms = torch.stack([message.parts[p][1].norm() for message in messages])
        factors = (norms.median() / (norms + CLIP_EPS)).clamp(max=1)
        columns.append([(m.parts[p][0], m.parts[p][1] * factor) for m, factor in zip(messages, factors, strict=True)])
    return [Sparse(tuple(column[i] for column in columns)) for i in range(len(messages))]
