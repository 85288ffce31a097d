"""Scores of gossip partners: which peers this peer avoids, because they failed or broke the protocol.

A peer that fails (a timeout, a lost connection) is avoided for a while, longer each time, and never banned: volunteers
close their laptops. A peer that breaks the protocol gets a penalty: three in an hour keep it out for one. Scores are
local; the authority's bans (`swarm.run.gate`) come on top of them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Final

from peer.bounds import Latest
from peer.net.backoff import Backoff

PAUSE_S: Final = 5.0
PAUSE_MAX_S: Final = 600.0
PENALTIES_MAX: Final = 3
MEMORY_S: Final = 3600.0
PEERS_MAX: Final = 8192


class PeerScores:
    """The failures and penalties of at most `PEERS_MAX` peers. `clock` returns seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._failures = Backoff(PAUSE_S, PAUSE_MAX_S, peers_max=PEERS_MAX, clock=clock)
        self._barred = Backoff(MEMORY_S, MEMORY_S, factor=1, peers_max=PEERS_MAX, clock=clock)
        self._penalties = Latest[str, deque[float]](PEERS_MAX)

    def failed(self, peer: str) -> None:
        """Note that the peer did not answer: avoid it for 5 s, then 10, 20 ... up to ten minutes."""
        self._failures.failed(peer)

    def penalize(self, peer: str) -> None:
        """Note a protocol violation: a failure, and the third within an hour counts for an hour."""
        self.failed(peer)
        times = self._penalties.setdefault(peer, deque(maxlen=PENALTIES_MAX))
        times.append(self._clock())
        if len(times) == PENALTIES_MAX and times[-1] - times[0] < MEMORY_S:
            self._barred.failed(peer)

    def fine(self, peer: str) -> None:
        """Forget the peer's failures, not its penalties: an exchange with it went well."""
        self._failures.reset(peer)

    def avoids(self, peer: str) -> bool:
        return self._failures.paused(peer) or self._barred.paused(peer)
