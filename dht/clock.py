"""The swarm's time, so that a machine with a wrong clock can still take part.

Every reply carries the clock of the peer that sent it. Once a node has seen two other clocks, it signs and judges
records by the median of theirs and its own. So a single wrong clock corrects itself, and a minority cannot move the
right ones. With one other clock it is unknown which is wrong: nothing is corrected, only reported.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from statistics import median
from typing import Final

PEERS_MAX: Final = 64
ROUND_TRIP_MAX_S: Final = 2.0  # slower samples say little
NEGLIGIBLE_S: Final = 1.0  # smaller corrections are not worth making


class SwarmClock:
    """Wall time in seconds since the epoch, corrected by the peers' clocks.

    A sample is kept as (peer's wall clock - own monotonic clock), so earlier samples stay valid when the own wall clock
    jumps (NTP).
    """

    def __init__(self, wall: Callable[[], float] = time.time, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._wall = wall
        self._monotonic = monotonic
        self._samples: OrderedDict[str, float] = OrderedDict()

    def observe(self, peer: str, peer_wall_s: float, round_trip_s: float) -> None:
        """Take a sample from a reply that has just arrived."""
        if round_trip_s <= ROUND_TRIP_MAX_S:
            self._samples[peer] = peer_wall_s + round_trip_s / 2 - self._monotonic()
            self._samples.move_to_end(peer)
            if len(self._samples) > PEERS_MAX:
                self._samples.popitem(last=False)

    def forget(self, peer: str) -> None:
        """Drop the sample of a peer that is gone."""
        self._samples.pop(peer, None)

    @property
    def disagreement_s(self) -> float:
        """How far the peers' clocks (their median) are ahead of this machine's; 0 if none was seen."""
        return median(self._samples.values()) - self._own() if self._samples else 0.0

    @property
    def correction_s(self) -> float:
        """Seconds that `now` adds to this machine's wall clock."""
        if len(self._samples) < 2:
            return 0.0
        correction = median((self._own(), *self._samples.values())) - self._own()
        return correction if abs(correction) > NEGLIGIBLE_S else 0.0

    def now(self) -> float:
        """Return the corrected time."""
        return self._wall() + self.correction_s

    def raw(self) -> float:
        """Return this machine's wall clock. Replies carry it, because corrected times would feed back."""
        return self._wall()

    def _own(self) -> float:
        return self._wall() - self._monotonic()
