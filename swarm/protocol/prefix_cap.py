"""At most so many members of one address prefix in a head, so that one host with many identities is no crowd.

A rule of the leader and of the coordinator, which take newcomers in. The other members cannot check it: two peers may
see a third at different addresses.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from swarm.protocol.head import Member


@dataclass(frozen=True)
class Newcomers:
    """The newcomers that may take part, and those that must wait."""

    admitted: tuple[Member, ...]
    waiting: Counter[str]
    """How many newcomers of each full prefix wait."""


def admit(newcomers: Iterable[tuple[Member, str]], staying: Iterable[str], per_prefix: int, room: int) -> Newcomers:
    """Choose at most `room` newcomers (each with its prefix), the first first, so that with the members that are
    `staying` (their prefixes) there are at most `per_prefix` of one prefix."""
    taken, waiting = Counter(staying), Counter[str]()
    admitted: list[Member] = []
    for member, prefix in newcomers:
        if taken[prefix] >= per_prefix:
            waiting[prefix] += 1
        elif len(admitted) < room:
            taken[prefix] += 1
            admitted.append(member)
    return Newcomers(tuple(admitted), waiting)


class FullPrefixes:
    """The prefixes whose newcomers wait, each told of once for as long as it is full."""

    def __init__(self) -> None:
        self._told: frozenset[str] = frozenset()

    def fresh(self, admission: Newcomers) -> dict[str, int]:
        """Return the prefixes that have become full since the last call, and how many newcomers of each wait."""
        told, self._told = self._told, frozenset(admission.waiting)
        return {prefix: waiting for prefix, waiting in admission.waiting.items() if prefix not in told}
