"""When a peer or an address that failed may be tried again."""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Callable
from typing import Final

import trio

PEERS_MAX: Final = 1024


class Backoff:
    """A pause per name after each failure: `min_s` at first, `factor` times the last one after that, at most `max_s`.

    Factor 1 makes it a cool-down of `min_s`. `jitter` varies every pause by up to that fraction, so that peers do not
    retry in step. Holds at most `peers_max` names and forgets the one that failed longest ago first.
    """

    def __init__(
        self,
        min_s: float,
        max_s: float,
        factor: float = 2.0,
        *,
        jitter: float = 0.0,
        peers_max: int = PEERS_MAX,
        clock: Callable[[], float] = trio.current_time,
    ) -> None:
        self._min_s = min_s
        self._max_s = max_s
        self._factor = factor
        self._jitter = jitter
        self._peers_max = peers_max
        self._clock = clock
        self._failures: OrderedDict[str, tuple[float, float]] = OrderedDict()  # name -> (next try, pause)

    def __contains__(self, name: str) -> bool:
        """Whether the last try failed, as far as is remembered."""
        return name in self._failures

    def __len__(self) -> int:
        return len(self._failures)

    def paused(self, name: str) -> bool:
        """Whether the pause after the last failure still lasts."""
        return self._clock() < self.next_try(name)

    def all_paused(self) -> set[str]:
        """Return the names whose pauses last."""
        return {name for name, (until, _) in self._failures.items() if self._clock() < until}

    def next_try(self, name: str) -> float:
        """The time at which the pause ends; -inf without a failure."""
        return self._failures.get(name, (-float("inf"), 0.0))[0]

    def failed(self, name: str, max_s: float | None = None) -> None:
        """Begin the next pause. `max_s` replaces the usual cap for this one."""
        now = self._clock()
        _, pause_s = self._failures.pop(name, (0.0, 0.0))
        pause_s = min(max(self._factor * pause_s, self._min_s), self._max_s if max_s is None else max_s)
        self._failures[name] = (now + pause_s * random.uniform(1 - self._jitter, 1 + self._jitter), pause_s)
        while len(self._failures) > self._peers_max or self._oldest_is_spent(now):
            self._failures.popitem(last=False)

    def reset(self, name: str) -> None:
        """Forget the failures of a name that works again."""
        self._failures.pop(name, None)

    def _oldest_is_spent(self, now: float) -> bool:
        """Whether the oldest entry is of no more use: a cool-down's is, once over; a growing pause sets the next."""
        return self._factor == 1 and next(iter(self._failures.values()))[0] <= now
