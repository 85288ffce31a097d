"""How many micro-batches an issuer keeps under way.

By Little's law: the rate at which answers come, times what one takes that meets no queue; with a margin, so that the
rate can grow to what the narrowest place allows. What one takes is looked at now and then with half as many under way,
as BBR does (ACM Queue 14-5, 2016): at other times micro-batches may wait for each other on a slow link, and a window
that followed what they take then would grow with every wait.

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
LOOK: Final = 8  # answers that tell what one takes
LOOK_EVERY: Final = 32  # times the window, in answers: a look costs about half the time that one takes


@dataclass(frozen=True)
class Mark:
    """When a micro-batch was issued, and how many had been issued and answered by then, in all."""

    at_s: float
    dispatched: int
    answers: int


class Window:
    """Between `least` and `most`; `least` until something is measured."""

    def __init__(self, least: int, most: int) -> None:
        self._least, self._most = least, most
        self._dispatched = self._answers = 0
        self._rates: deque[float] = deque(maxlen=RATES)
        self._taken_s = 0.0
        self._looks: list[float] | None = []  # None: not looking
        self._look_from = least  # of the micro-batches issued: the very first find everything cold
        self._look_at = 0  # answers

    @property
    def size(self) -> int:
        wide = math.ceil(MARGIN * max(self._rates, default=0.0) * self._taken_s) + 1
        return max(self._least, min(self._most, wide // 2 if self._looks is not None else wide))

    def begun(self, now_s: float) -> Mark:
        """One is issued."""
        self._dispatched += 1
        return Mark(now_s, self._dispatched, self._answers)

    def answered(self, mark: Mark, now_s: float, unqueued_s: float | None) -> None:
        """It came back. `unqueued_s`: what it took without the waits for devices; None where that tells nothing, as
        calls had to be made once more."""
        self._answers += 1
        if now_s > mark.at_s:
            self._rates.append((self._answers - mark.answers) / (now_s - mark.at_s))
        if self._looks is None:
            if self._answers >= self._look_at:
                self._looks, self._look_from = [], self._dispatched
        elif mark.dispatched > self._look_from and unqueued_s is not None:
            self._looks.append(unqueued_s)
            if len(self._looks) >= LOOK:
                self._taken_s = fmean(self._looks)
                self._looks = None
                self._look_at = self._answers + LOOK_EVERY * self.size
