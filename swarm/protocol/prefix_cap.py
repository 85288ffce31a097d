"""A cap on the members of one address prefix in a head, so that one host with many identities is no crowd.

Each peer applies it to the join requests that it receives itself. Other members cannot check it: two peers may see a
third at different addresses. No clock of its own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Final

ASKS_AGAIN_S: Final = 10.0  # as long a request to join counts
ASKING_MAX: Final = 1024


class PrefixCap:
    """Decides which newcomers may ask to take part."""

    def __init__(self, most: int) -> None:
        """`most`: members of one prefix in a head."""
        self._most = most
        self._let_in: dict[str, tuple[str, float]] = {}  # (prefix, until), of peers that are in no head yet
        self._waiting: dict[str, tuple[str, float]] = {}
        self._told: frozenset[str] = frozenset()

    def lets_in(self, peer: str, prefix: str, inside: Mapping[str, str], now: float) -> bool:
        """Return whether a request of `peer`, seen at an address of that prefix, counts. `inside`: the prefix of each
        member and learner of the head. `now` is in seconds. An admitted peer keeps its slot while it keeps asking."""
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
