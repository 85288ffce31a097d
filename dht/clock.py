"""The swarm's time, so that a machine with a wrong clock can still take part.

Every reply carries the clock of the peer that sent it. Once a node has seen two other clocks, it signs and judges
records by the median of theirs and its own. So a single wrong clock corrects itself, and a minority cannot move the
right ones. With one other clock it is unknown which is wrong: nothing is corrected, only reported.

In a run only trusted peers' clocks are seen (`dht.router`), and those of one public address prefix have one vote
together. They may correct this machine by ten minutes at most; by more only if an anchor, a peer of the invite, shows
the same time. Else the clock stays wrong, and the event `dht_clock_wrong` asks to set it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Final

from peer.bounds import Latest

PEERS_MAX: Final = 64
ROUND_TRIP_MAX_S: Final = 2.0  # slower samples say little
NEGLIGIBLE_S: Final = 1.0  # smaller corrections are not worth making
CORRECTION_MAX_S: Final = 600.0  # in a run, without an anchor's word
ANCHOR_AGREES_S: Final = 10.0


@dataclass(frozen=True)
class _Sample:
    ahead_s: float
    """The peer's wall clock less our monotonic one."""
    prefix: str
    is_anchor: bool


class SwarmClock:
    """Wall time in seconds since the epoch, corrected by the peers' clocks.

    A sample is kept as (peer's wall clock - own monotonic clock), so earlier samples stay valid when the own wall clock
    jumps (NTP).
    """

    def __init__(self, wall: Callable[[], float] = time.time, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._wall = wall
        self._monotonic = monotonic
        self._samples = Latest[str, _Sample](PEERS_MAX)
        self.bounded = False
        """Whether corrections are bounded, as in a run."""

    def observe(
        self, peer: str, peer_wall_s: float, round_trip_s: float, *, prefix: str = "", is_anchor: bool = False
    ) -> None:
        """Take a sample from a reply that has just arrived. Peers of one `prefix` vote together; "" is none."""
        if round_trip_s <= ROUND_TRIP_MAX_S:
            ahead_s = peer_wall_s + round_trip_s / 2 - self._monotonic()
            self._samples[peer] = _Sample(ahead_s, prefix or peer, is_anchor)

    def forget(self, peer: str) -> None:
        """Drop the sample of a peer that is gone."""
        self._samples.pop(peer, None)

    @property
    def disagreement_s(self) -> float:
        """How far the peers' clocks (their median) are ahead of this machine's; 0 if none was seen."""
        return median(self._votes()) - self._own() if self._samples else 0.0

    @property
    def correction_s(self) -> float:
        """Seconds that `now` adds to this machine's wall clock."""
        votes = self._votes()
        if len(votes) < 2:
            return 0.0
        right = median((self._own(), *votes))
        correction = right - self._own()
        if abs(correction) <= NEGLIGIBLE_S:
            return 0.0
        if self.bounded and abs(correction) > CORRECTION_MAX_S and not self._anchored(right):
            return 0.0
        return correction

    def _votes(self) -> list[float]:
        by_prefix: dict[str, list[float]] = {}
        for sample in self._samples.values():
            by_prefix.setdefault(sample.prefix, []).append(sample.ahead_s)
        return [median(samples) for samples in by_prefix.values()]

    def _anchored(self, right: float) -> bool:
        anchors = (sample.ahead_s for sample in self._samples.values() if sample.is_anchor)
        return any(abs(ahead_s - right) <= ANCHOR_AGREES_S for ahead_s in anchors)

    def now(self) -> float:
        """Return the corrected time."""
        return self._wall() + self.correction_s

    def raw(self) -> float:
        """Return this machine's wall clock. Replies carry it, because corrected times would feed back."""
        return self._wall()

    def _own(self) -> float:
        return self._wall() - self._monotonic()
