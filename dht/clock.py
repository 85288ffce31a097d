"""The swarm's idea of the time, so that one machine with a wrong clock still takes part.

Replies carry the clock of who answered. With two or more other clocks seen, the median of theirs and one's own is the
time that records are signed and judged by: one wrong clock among right ones corrects itself, and a minority cannot move
the right ones. With a single other clock nobody can say which is wrong, so nothing is corrected, only reported.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from statistics import median
from typing import Final

PEERS_MAX: Final = 64
ROUND_TRIP_MAX_S: Final = 2.0  # a sample this slow says little
NEGLIGIBLE_S: Final = 1.0  # below this the own clock is as good as any


class SwarmClock:
    """Wall time in seconds since the epoch, corrected by the peers' clocks.

    A sample is kept as (peer's wall clock - own monotonic clock), so a step of the own wall clock (NTP catching up)
    does not spoil the samples taken before it.
    """

    def __init__(self, wall: Callable[[], float] = time.time, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._wall = wall
        self._monotonic = monotonic
        self._samples: OrderedDict[str, float] = OrderedDict()

    def observe(self, peer: str, peer_wall_s: float, round_trip_s: float) -> None:
        """A reply has just arrived that shows `peer`'s clock."""
        if round_trip_s <= ROUND_TRIP_MAX_S:
            self._samples[peer] = peer_wall_s + round_trip_s / 2 - self._monotonic()
            self._samples.move_to_end(peer)
            if len(self._samples) > PEERS_MAX:
                self._samples.popitem(last=False)

    def forget(self, peer: str) -> None:
        """A peer is gone; its clock no longer counts."""
        self._samples.pop(peer, None)

    @property
    def disagreement_s(self) -> float:
        """How far the peers' clocks (their median) are ahead of this machine's; 0 if none was seen."""
        return median(self._samples.values()) - self._own() if self._samples else 0.0

    @property
    def correction_s(self) -> float:
        """What `now` adds to this machine's wall clock."""
        if len(self._samples) < 2:
            return 0.0
        correction = median((self._own(), *self._samples.values())) - self._own()
        return correction if abs(correction) > NEGLIGIBLE_S else 0.0

    def now(self) -> float:
        """The corrected time."""
        return self._wall() + self.correction_s

    def raw(self) -> float:
        """This machine's wall clock, as shown to others: corrected times must not feed back."""
        return self._wall()

    def _own(self) -> float:
        return self._wall() - self._monotonic()
