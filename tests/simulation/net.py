"""The network of one world: delays with heavy tails, loss, duplicates, reordering, cuts of one or both directions."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

USUAL_PER_S = 40.0  # of the exponential delay
DELAY_MAX_S = 20.0
TAIL = 1.1  # of the Pareto distribution: infinite variance


@dataclass
class Network:
    """Its fields are what faults set; all but the cuts end at `heals_at`."""

    random: Random
    heals_at: float
    drop: float = 0.0
    duplicate: float = 0.0
    tails: float = 0.0
    """The share of messages with a heavy-tailed delay."""
    slow: frozenset[str] = frozenset()
    """Tags of messages that are late or lost more often than others."""
    cut: dict[tuple[str, str], int] = field(default_factory=dict)
    """How many cuts hold of each direction."""
    away: frozenset[str] = frozenset()
    """Peers that are cut off from all others for ever."""

    def has_parted(self, source: str, target: str) -> bool:
        """Return whether nothing comes from one to the other any more, for ever."""
        return bool(self.away) and (source in self.away) != (target in self.away)

    def is_cut(self, source: str, target: str) -> bool:
        if self.has_parted(source, target):
            return True
        return bool(self.cut) and self.cut.get((source, target), 0) > 0

    def delays(self, source: str, target: str, tag: str, now: float) -> tuple[float, ...]:
        """Return after how many seconds each copy of a message arrives; none if it is lost."""
        random = self.random
        delay = random.expovariate(USUAL_PER_S)
        if now >= self.heals_at:
            return (delay,)
        if self.drop and random.random() < self.drop:
            return ()
        if self.tails and random.random() < self.tails:
            delay += 0.5 * random.paretovariate(TAIL)
        if tag in self.slow:
            draw = random.random()
            if draw < 0.25:
                return ()
            if draw < 0.6:
                delay += 0.4 * random.paretovariate(1.0)
        delay = min(delay, DELAY_MAX_S)
        if self.duplicate and random.random() < self.duplicate:
            return (delay, delay + random.expovariate(1.0))
        return (delay,)

    def add_cut(self, pairs: tuple[tuple[str, str], ...]) -> None:
        for pair in pairs:
            self.cut[pair] = self.cut.get(pair, 0) + 1

    def end_cut(self, pairs: tuple[tuple[str, str], ...]) -> None:
        for pair in pairs:
            self.cut[pair] = self.cut.get(pair, 0) - 1
