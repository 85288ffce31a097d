"""Counts of one host's connections, and of those that it refuses at a cap of ours, as events."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from typing import Final

import trio

from peer.events import EventLog

TELL_S: Final = 60.0
"""Between two events of each kind."""

Counts = Callable[[], dict[str, int]]


class ConnectionCounts:
    """The counters of one host, from the parts that keep them, and its events about them.

    `connections_counted` reports the counters once a minute, `connections_refused` the connections that gave way or
    were refused since the last such event, by the cap that was reached: the first at once, then one event a minute.
    """

    def __init__(self, events: EventLog, parts: tuple[Counts, ...], clock: Callable[[], float]) -> None:
        self._events = events
        self._parts = parts
        self._clock = clock
        self._refused: Counter[str] = Counter()
        self._told_at = -math.inf

    def now(self) -> dict[str, int]:
        """Return every counter. All are 0 while nothing is connected, dialled, accepted or called."""
        return {name: count for part in self._parts for name, count in part().items()}

    def refuse(self, cap: str) -> None:
        """Note that a connection was refused, or had to give way, because `cap` is reached."""
        self._refused[cap] += 1
        self._tell_refused()

    async def run(self) -> None:
        """Tell, until cancelled."""
        while True:
            await trio.sleep(TELL_S)
            self._tell_refused()
            self._events.emit("connections_counted", counts=self.now())

    def _tell_refused(self) -> None:
        now = self._clock()
        if not self._refused or now - self._told_at < TELL_S:
            return
        counts, self._refused, self._told_at = dict(self._refused), Counter(), now
        self._events.emit("connections_refused", counts=counts)
