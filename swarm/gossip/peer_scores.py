"""Whom this peer would rather not meet: what it remembers of those that broke the rules or did not come.

A peer that fails (a timeout, a lost connection) is left alone for a while, longer each time, and never banned:
volunteers close their laptops. One that breaks the protocol has a strike; three in an hour keep it out for an hour. All
this is our own opinion; the authority's bans (`swarm.run.gate`) come on top of it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

PAUSE_S: Final = 5.0
PAUSE_MAX_S: Final = 600.0
STRIKES: Final = 3
MEMORY_S: Final = 3600.0
PEERS_MAX: Final = 8192


@dataclass
class _Record:
    failures: int = 0
    avoid_until: float = float("-inf")
    strikes: deque[float] = field(default_factory=lambda: deque(maxlen=STRIKES))


class PeerScores:
    """`clock` gives seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._records: dict[str, _Record] = {}

    def failed(self, peer: str) -> None:
        """It did not answer or not come: 5 s without it, then 10, 20 ... up to ten minutes."""
        record = self._record(peer)
        pause_s = min(PAUSE_S * 2**record.failures, PAUSE_MAX_S)
        record.failures = min(record.failures + 1, 16)
        record.avoid_until = max(record.avoid_until, self._clock() + pause_s)

    def strike(self, peer: str) -> None:
        """It broke the protocol: as a failure, and the third time within an hour for an hour."""
        self.failed(peer)
        record = self._record(peer)
        record.strikes.append(self._clock())
        if len(record.strikes) == STRIKES and record.strikes[-1] - record.strikes[0] < MEMORY_S:
            record.avoid_until = max(record.avoid_until, self._clock() + MEMORY_S)

    def fine(self, peer: str) -> None:
        """A meeting with it went well: its failures are forgotten, its strikes are not."""
        if peer in self._records:
            self._records[peer].failures = 0

    def avoids(self, peer: str) -> bool:
        record = self._records.get(peer)
        return record is not None and self._clock() < record.avoid_until

    def _record(self, peer: str) -> _Record:
        if peer not in self._records and len(self._records) >= PEERS_MAX:
            del self._records[next(iter(self._records))]  # the oldest acquaintance
        return self._records.setdefault(peer, _Record())
