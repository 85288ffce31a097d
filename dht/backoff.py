"""When something that failed may be tried again."""

from __future__ import annotations

import random
from collections import OrderedDict
from typing import Final

NAMES_MAX: Final = 1024


class Backoff:
    """A delay per name that doubles with every failure, with jitter so that peers do not come in step. Bounded, pure.

    Times are monotonic seconds.
    """

    def __init__(self, min_s: float, max_s: float) -> None:
        self._min_s = min_s
        self._max_s = max_s
        self._failures: OrderedDict[str, tuple[float, float]] = OrderedDict()  # name -> (next try, delay)

    def __contains__(self, name: str) -> bool:
        """Whether its last try failed."""
        return name in self._failures

    def due(self, name: str, now: float) -> bool:
        """Whether the delay after the last failure, if there was one, is over."""
        return now >= self.next_try(name)

    def next_try(self, name: str) -> float:
        return self._failures.get(name, (-float("inf"), 0.0))[0]

    def failed(self, name: str, now: float, max_s: float | None = None) -> None:
        """One more failure; `max_s` caps this delay below the usual cap."""
        _, delay = self._failures.pop(name, (0.0, 0.0))
        delay = min(max(2 * delay, self._min_s), self._max_s if max_s is None else max_s)
        self._failures[name] = (now + delay * random.uniform(0.75, 1.25), delay)
        if len(self._failures) > NAMES_MAX:
            self._failures.popitem(last=False)

    def reset(self, name: str) -> None:
        """It works again."""
        self._failures.pop(name, None)
