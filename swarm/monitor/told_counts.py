"""What the events that peers told while the monitor looked add up to. All of it is claimed."""

from __future__ import annotations

from collections import Counter
from typing import Final

from swarm.membership.told_events import ToldEvent
from swarm.status.time_histogram import TimeHistogram

PHASES: Final = ("compute", "submit", "exchange", "vote")
"""Of a round, in order. How long the last one takes is not told."""
LONGEST_S: Final = 1e5
PEERS_MAX: Final = 256


class ToldCounts:
    """Counts since a time, of events that are each taken once."""

    def __init__(self, since: float) -> None:
        self._since = since
        self.events: Counter[str] = Counter()
        """Of `move_finished` and `peer_penalized`."""
        self.phases: dict[str, TimeHistogram] = {}
        """By phase; only those that were told."""
        self._entered: dict[str, tuple[object, str, float]] = {}  # by peer: round, phase and when

    def take(self, peer: str, event: ToldEvent) -> None:
        """Count an event. Those of before are told when the monitor begins, and count nothing."""
        if event.at < self._since:
            return
        if event.name in ("move_finished", "peer_penalized"):
            self.events[event.name] += 1
        elif event.name == "phase_entered":
            self._enter(peer, event.fields.get("round"), event.fields.get("phase"), event.at)

    def _enter(self, peer: str, number: object, phase: object, at: float) -> None:
        last_round, last, since = self._entered.pop(peer, (None, "", at))
        if phase not in PHASES:
            return
        if last and number == last_round and PHASES.index(phase) == PHASES.index(last) + 1:
            self.phases.setdefault(last, TimeHistogram()).add(min(LONGEST_S, max(0.0, at - since)))
        self._entered[peer] = (number, phase, at)
        while len(self._entered) > PEERS_MAX:
            del self._entered[next(iter(self._entered))]
