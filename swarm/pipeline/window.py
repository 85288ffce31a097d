"""How many micro-batches a source keeps in flight.

Little's law: the rate of answers times the latency of a micro-batch that meets no queue. A margin lets the rate grow to
what the slowest stage allows. The latency is probed now and then with half as many in flight, as BBR does (ACM Queue
14-5, 2016): at other times micro-batches may wait for each other on a slow link, and a window that followed this
latency would grow with every wait.

Pure: no clock.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from statistics import fmean
from typing import Final

MARGIN: Final = 1.5
RATES: Final = 64  # answers whose greatest rate counts
PROBES: Final = 8  # answers of one probe of the latency
PROBE_EVERY: Final = 32  # times the window, in answers: a probe costs about half a latency


@dataclass(frozen=True)
class Mark:
    """When a micro-batch was dispatched, and how many had been dispatched and answered in all by then."""

    at_s: float
    dispatched: int
    answers: int


class Window:
    """A window between `least` and `most`; `least` until a latency is measured."""

    def __init__(self, least: int, most: int) -> None:
        self._least, self._most = least, most
        self._dispatched = self._answers = 0
        self._rates: deque[float] = deque(maxlen=RATES)
        self._latency_s = 0.0
        self._probes: list[float] | None = []  # None: not probing
        self._probe_from = least  # number of a dispatch: the very first micro-batches find everything cold
        self._probe_at = 0  # answers

    @property
    def size(self) -> int:
        wide = math.ceil(MARGIN * max(self._rates, default=0.0) * self._latency_s) + 1
        return max(self._least, min(self._most, wide // 2 if self._probes is not None else wide))

    def begun(self, now_s: float) -> Mark:
        """Note a dispatch."""
        self._dispatched += 1
        return Mark(now_s, self._dispatched, self._answers)

    def answered(self, mark: Mark, now_s: float, unqueued_s: float | None) -> None:
        """Note an answer. `unqueued_s`: its latency without waits for devices; None if calls had to be repeated."""
        self._answers += 1
        if now_s > mark.at_s:
            self._rates.append((self._answers - mark.answers) / (now_s - mark.at_s))
        if self._probes is None:
            if self._answers >= self._probe_at:
                self._probes, self._probe_from = [], self._dispatched
        elif mark.dispatched > self._probe_from and unqueued_s is not None:
            self._probes.append(unqueued_s)
            if len(self._probes) >= PROBES:
                self._latency_s = fmean(self._probes)
                self._probes = None
                self._probe_at = self._answers + PROBE_EVERY * self.size
