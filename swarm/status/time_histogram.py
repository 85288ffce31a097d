"""Times counted by how long they are, as Prometheus keeps them."""

from __future__ import annotations

from bisect import bisect_left
from itertools import accumulate
from typing import Final

BOUNDS_S: Final = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0, 3000.0)


class TimeHistogram:
    """How many times lie between each two bounds, and their sum."""

    def __init__(self) -> None:
        self.counts = [0] * (len(BOUNDS_S) + 1)
        """Up to each bound and above the one before; the last one: above all."""
        self.total_s = 0.0

    def add(self, seconds: float) -> None:
        """Count one."""
        self.counts[bisect_left(BOUNDS_S, seconds)] += 1
        self.total_s += seconds

    @property
    def buckets(self) -> list[tuple[str, int]]:
        """How many are up to each bound, which stands before the count."""
        ends = [*(str(bound) for bound in BOUNDS_S), "+Inf"]
        return list(zip(ends, accumulate(self.counts), strict=True))
