"""Virtual time: a heap of scheduled callbacks."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from itertools import count


class VirtualClock:
    """Runs callbacks in order of time; at one instant, in the order of scheduling."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()

    def at(self, when_s: float, action: Callable[[], None]) -> None:
        """Schedule `action`; a time in the past means next."""
        heapq.heappush(self._heap, (max(when_s, self.now_s), next(self._order), action))

    def after(self, delay_s: float, action: Callable[[], None]) -> None:
        self.at(self.now_s + delay_s, action)

    def run_until(self, end_s: float) -> None:
        """Run all callbacks due before `end_s`, and set the time to it."""
        while self._heap and self._heap[0][0] < end_s:
            self.now_s, _, action = heapq.heappop(self._heap)
            action()
        self.now_s = end_s
