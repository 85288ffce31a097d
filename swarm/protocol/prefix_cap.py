"""At most so many members of one address prefix in a head, so that one host with many identities is no crowd.

A rule of the leader and of the coordinator, which take newcomers in. The other members cannot check it: two peers may
see a third at different addresses.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from swarm.protocol.head import Member

ASKS_AGAIN_S: Final = 10.0  # as long a request to join counts
ASKING_MAX: Final = 1024


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


class PrefixCap:
    """Decides which newcomers may ask to take part. Every method takes the current time in seconds."""

    def __init__(self, most: int) -> None:
        """`most`: members of one prefix in a head."""
        self._most = most
        self._let_in: dict[str, tuple[str, float]] = {}  # (prefix, until), of peers that are in no head yet
        self._waiting: dict[str, tuple[str, float]] = {}
        self._told: frozenset[str] = frozenset()

    def lets_in(self, peer: str, prefix: str, inside: Mapping[str, str], now: float) -> bool:
        """Return whether a request of `peer`, seen at an address of that prefix, counts. `inside`: the prefix of each
        member and learner of the head. Who was let in keeps its place as long as it goes on asking."""
        self._let_in = {p: entry for p, entry in self._let_in.items() if entry[1] > now and p not in inside}
        self._waiting = {p: entry for p, entry in self._waiting.items() if entry[1] > now and p not in inside}
        others = Counter([*inside.values(), *(of for p, (of, _) in self._let_in.items() if p != peer)])
        if peer in inside or others[prefix] < self._most:
            self._waiting.pop(peer, None)
            if peer not in inside and (peer in self._let_in or len(self._let_in) < ASKING_MAX):
                self._let_in[peer] = (prefix, now + ASKS_AGAIN_S)
            return True
        if peer in self._waiting or len(self._waiting) < ASKING_MAX:
            self._waiting[peer] = (prefix, now + ASKS_AGAIN_S)
        return False

    def newly_full(self) -> dict[str, int]:
        """Return the prefixes that have become full since the last call, and how many newcomers of each wait."""
        waiting = Counter(prefix for prefix, _ in self._waiting.values())
        told, self._told = self._told, frozenset(waiting)
        return {prefix: number for prefix, number in waiting.items() if prefix not in told}
