"""Scores of gossip partners: which peers this peer avoids, because they failed or broke the protocol.

A peer that fails (a timeout, a lost connection) is avoided for a while, longer each time, and never banned: volunteers
close their laptops. A peer that breaks the protocol gets a penalty: three in an hour keep it out for one. Scores are
local; the authority's bans (`swarm.run.gate`) come on top of them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

PAUSE_S: Final = 5.0
PAUSE_MAX_S: Final = 600.0
PENALTIES_MAX: Final = 3
MEMORY_S: Final = 3600.0
PEERS_MAX: Final = 8192


@dataclass
class _Record:
    failures: int = 0
    avoid_until: float = float("-inf")
    penalties: deque[float] = field(default_factory=lambda: deque(maxlen=PENALTIES_MAX))


class PeerScores:
    """The failures and penalties of at most `PEERS_MAX` peers. `clock` returns seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._records: dict[str, _Record] = {}

    def failed(self, peer: str) -> None:
        """Note that the peer did not answer: avoid it for 5 s, then 10, 20 ... up to ten minutes."""
        record = self._record(peer)
        pause_s = min(PAUSE_S * 2**record.failures, PAUSE_MAX_S)
        record.failures = min(record.failures + 1, 16)
        record.avoid_until = max(record.avoid_until, self._clock() + pause_s)

    def penalize(self, peer: str) -> None:
        """Note a protocol violation: a failure, and the third within an hour counts for an hour."""
        self.failed(peer)
        record = self._record(peer)
        record.penalties.append(self._clock())
        if len(record.penalties) == PENALTIES_MAX and record.penalties[-1] - record.penalties[0] < MEMORY_S:
            record.avoid_until = max(record.avoid_until, self._clock() + MEMORY_S)

    def fine(self, peer: str) -> None:
        """Forget the peer's failures, not its penalties: an exchange with it went well."""
        if peer in self._records:
            self._records[peer].failures = 0

    def avoids(self, peer: str) -> bool:
        record = self._records.get(peer)
        return record is not None and self._clock() < record.avoid_until

    def _record(self, peer: str) -> _Record:
        if peer not in self._records and len(self._records) >= PEERS_MAX:
            del self._records[next(iter(self._records))]  # the oldest
        return self._records.setdefault(peer, _Record())
