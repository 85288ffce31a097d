"""What the events that peers told while the monitor looked add up to. All of it is claimed."""

from __future__ import annotations

from collections import Counter
from typing import Final

from peer.bounds import Latest
from peer.catalogue.groups import PeerPenalized
from peer.catalogue.happening import Happening
from peer.catalogue.reading import Heard
from peer.catalogue.rounds import PhaseEntered
from peer.catalogue.stages import MoveFinished
from swarm.status.time_histogram import TimeHistogram

PHASES: Final = ("compute", "submit", "exchange", "vote")
"""Of a round, in order. How long the last one takes is not told."""
LONGEST_S: Final = 1e5
PEERS_MAX: Final = 256


class ToldCounts:
    """Counts since a time, of events that are each taken once."""

    def __init__(self, since: float) -> None:
        self._since = since
        self.events: Counter[type[Happening]] = Counter()
        """Of `MoveFinished` and `PeerPenalized`."""
        self.phases: dict[str, TimeHistogram] = {}
        """By phase; only those that were told."""
        self._entered = Latest[str, tuple[int, str, float]](PEERS_MAX)  # by peer: round, phase and when

    def take(self, peer: str, heard: Heard) -> None:
        """Count an event. Those of before are told when the monitor begins, and count nothing."""
        if heard.at < self._since:
            return
        match heard.event:
            case MoveFinished() | PeerPenalized():
                self.events[type(heard.event)] += 1
            case PhaseEntered(round=number, phase=phase):
                self._enter(peer, number, phase, heard.at)

    def _enter(self, peer: str, number: int, phase: str, at: float) -> None:
        last_round, last, since = self._entered.pop(peer, (-1, "", at))
        if phase not in PHASES:
            return
        if last and number == last_round and PHASES.index(phase) == PHASES.index(last) + 1:
            self.phases.setdefault(last, TimeHistogram()).add(min(LONGEST_S, max(0.0, at - since)))
        self._entered[peer] = (number, phase, at)
