"""The trimmed mean and the median of each coordinate (Yin et al., arXiv 1803.01498).

Of n values of a coordinate the k largest and the k smallest are left out, and the others are averaged. With at most k
liars each result lies between two honest values, however the liars choose theirs: at least n - k values are honest,
so the k-th smallest value of all is at least the smallest honest one.

Contributors count alike. A weight by tokens would let a peer that did more work than others, or says so, be the median
alone. Only the gate's clip is kept, as factor of the values: of one or two contributors nothing can be cut, and the
rule is then a mean.

Sorting takes a network of minima and maxima of whole rows, without a branch, while the rows are in the cache. It is
cut down to what the wanted ranks need.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Final, NamedTuple

import numpy as np
import torch

from optim.codecs import ROW, Buffer, Codec
from optim.merge import CHUNK, EncodedSlice, encoded_slices, equal_weights
from optim.rules.interface import MergeRule

MEDIAN: Final = 0.5


class Comparator(NamedTuple):
    """Two rows that are put in order: the minimum into `low`, the maximum into `high`, each only if it is wanted."""

    low: int
    high: int
    wants_low: bool
    wants_high: bool


class TrimmedMeanRule(MergeRule):
    """The trimmed mean of each coordinate. `trim`: the share of the contributors left out at each side, in (0, 0.5];
    0.5 is the median (of an even number: the mean of the middle two)."""

    def __init__(self, trim: float) -> None:
        if not 0 < trim <= MEDIAN:
            raise ValueError(f"trim is {trim}: set it above 0 and at most 0.5")
        self.trim = trim

    def cut(self, contributors: int) -> int:
        """Return k, the values left out at each side: 0 with fewer than 1 / trim contributors."""
        return min(int(self.trim * contributors + 1e-9), (contributors - 1) // 2)  # 1e-9: 0.29 * 100 is 28.999...

    def weights(self, tokens: Sequence[int], norms: Sequence[float]) -> tuple[float, ...]:
        return equal_weights(tokens, norms)

    def merge(
        self, codec: Codec, encoded: Sequence[Buffer], weights: Sequence[float], numel: int, out_codec: Codec
    ) -> torch.Tensor:
        views = encoded_slices(codec, encoded, weights, numel)
        n = len(views)
        k = self.cut(n)
        unit = math.lcm(ROW, codec.granule, out_codec.granule)
        step = max(CHUNK // n // unit, 1) * unit  # values of one contributor, so that all rows fit in the cache
        aligned = min(step, -(-numel // ROW) * ROW)  # whole rows: some codecs need them
        room = torch.empty(n + 1, aligned, dtype=torch.float32)
        out = torch.empty(out_codec.encoded_size(numel), dtype=torch.uint8)
        for first in range(0, numel, step):
            last = min(first + step, numel)
            rows = room[:, : last - first]
            for row, view, weight in zip(rows, views, weights, strict=False):
                _decode(view, first, last, weight * n, row)
            total = _mean_of_ranks(list(rows.numpy()), k, n - k)  # numpy's minima take less time than torch's
            out_codec.encode(total, out[out_codec.encoded_size(first) :][: out_codec.encoded_size(last - first)])
        return out

    def norm_bound(self, weights: Sequence[float], sqnorms: Sequence[float]) -> float:
        """A result above 0 is at most the mean of the n - k largest values, and its square at most the mean of their
        squares; below 0 likewise."""
        n = len(weights)
        total = sum((weight * n) ** 2 * sqnorm for weight, sqnorm in zip(weights, sqnorms, strict=True))
        return math.sqrt(total / max(1, n - self.cut(n)))


@lru_cache(maxsize=64)
def network(n: int, first: int, last: int) -> tuple[Comparator, ...]:
    """Return comparators that bring the values of ranks [first, last) of n to these places: Batcher's merge exchange
    (Knuth, The Art of Computer Programming 3, 5.2.2 M), without what the other ranks alone need."""
    wanted, kept = set(range(first, last)), []
    for low, high in reversed(_merge_exchange(n)):
        if low in wanted or high in wanted:
            kept.append(Comparator(low, high, low in wanted, high in wanted))
            wanted |= {low, high}
    return tuple(reversed(kept))


def _merge_exchange(n: int) -> list[tuple[int, int]]:
    pairs: list[tuple[int, int]] = []
    top = 1 << max(0, (n - 1).bit_length() - 1)
    p = top if n > 1 else 0
    while p > 0:
        q, r, d = top, 0, p
        while True:
            pairs += [(i, i + d) for i in range(n - d) if i & p == r]
            if q == p:
                break
            d, q, r = q - p, q // 2, p
        p //= 2
    return pairs


def _mean_of_ranks(rows: list[Any], first: int, last: int) -> torch.Tensor:
    """Return the mean of the values of ranks [first, last) of all rows (c,) but the last, which is scratch. Rows are
    overwritten; values are added from the lowest rank on, so that the order of the rows changes nothing."""
    spare = rows.pop()
    for low, high, wants_low, wants_high in network(len(rows), first, last):
        a, b = rows[low], rows[high]
        if wants_low and wants_high:
            rows[low], spare = np.minimum(a, b, out=spare), a
            np.maximum(a, b, out=b)
        elif wants_low:
            np.minimum(a, b, out=a)
        else:
            np.maximum(a, b, out=b)
    total = rows[first]
    for row in rows[first + 1 : last]:
        total += row
    if last - first > 1:
        total *= np.float32(1 / (last - first))
    total += np.float32(0)  # -0 becomes 0: which of the two a minimum returns depends on the CPU
    return torch.from_numpy(total)


def _decode(view: EncodedSlice, first: int, last: int, factor: float, out: torch.Tensor) -> None:
    view.decode(first, last, out)
    if abs(factor - 1) > 1e-12:  # not clipped: 1 / n * n may be off by one bit
        out.mul_(factor)
