"""Pairing of gossiping peers: how far apart two may be, and what a round number means without a common round.

A peer's round counts its outer steps. Two peers exchange updates only if their rounds differ by `APART_MAX` at most:
that bounds the staleness of a mean. After an exchange both are one round further than the one that was ahead, so slower
peers keep up with faster ones. No single claim carries a peer beyond the middle of the group.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from random import Random
from statistics import median_low
from typing import Final

APART_MAX: Final = 4
CLAIM_MAX: Final = 4.0  # no peer counts as faster than this many times the median


@dataclass(frozen=True)
class PeerView:
    """This peer's view of another live peer."""

    round: int
    speed: float = 0.0
    """Inner steps a second, 0 if not yet measured."""


def candidates(others: Mapping[str, PeerView], mine: int, avoided: Collection[str], random: Random) -> list[str]:
    """Return the peers to propose to, in random order. Those that seem too far apart come last: what is known of them
    may be old."""
    names = [peer for peer in sorted(others) if peer not in avoided]
    random.shuffle(names)
    return sorted(names, key=lambda peer: abs(others[peer].round - mine) > APART_MAX)


def group_round(others: Mapping[str, PeerView]) -> int | None:
    """Return the median round of the others; None if there are none. Half of them would have to lie to move it."""
    return median_low([seen.round for seen in others.values()]) if others else None


def round_after(mine: int, theirs: int, others: Mapping[str, PeerView]) -> int:
    """Return this peer's round after an exchange."""
    middle = group_round(others)
    return 1 + max(mine, min(theirs, mine if middle is None else middle))


def round_after_alone(mine: int, others: Mapping[str, PeerView]) -> int:
    """Return this peer's round after a step without a partner: it does not run away from the others."""
    middle = group_round(others)
    return mine + 1 if middle is None else max(mine, min(mine + 1, middle + APART_MAX))


def is_left_behind(mine: int, others: Mapping[str, PeerView]) -> bool:
    """Whether most of the others are too far ahead for an exchange, so that this peer must fetch a state."""
    middle = group_round(others)
    return middle is not None and middle > mine + APART_MAX


def steps_for(speed: float, others: Mapping[str, PeerView], most: int) -> int:
    """Return this peer's inner steps in a round: `most` for the fastest peer, fewer in proportion for slower ones, so
    that all are ready at about the same time (DyLU, arXiv 2401.09135)."""
    known = [seen.speed for seen in others.values() if 0 < seen.speed < 1e9]
    if not known or not speed > 0:
        return most
    fastest = min(max(known), CLAIM_MAX * median_low([*known, speed]))
    return max(1, min(most, round(most * speed / fastest)))
