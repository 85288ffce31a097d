"""The iterative Kademlia lookup as a state machine without I/O: which peers to ask next, and when it is over.

It asks the nearest candidates, a few at a time, and each answer names nearer peers. It is over when the `width` nearest
that have not failed have all answered. The driver (`dht.router`) gives each query a deadline and reports a slow peer as
failed, so a frozen peer costs one timeout, not the lookup.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from dht.key import distance, node_key

QUERIES_MAX: Final = 64  # hostile answers may invent ever nearer peers
CANDIDATES_MAX: Final = 256


class Lookup:
    """Finds the `width` nearest live peers to `target`, with at most `parallel` queries in flight.

    The caller asks every peer from `take`, and reports each by `answered` or `failed`.
    """

    def __init__(
        self, target: int, width: int, parallel: int, seeds: Iterable[str], exclude: Iterable[str] = ()
    ) -> None:
        self._target = target
        self._width = width
        self._parallel = parallel
        self._excluded = frozenset(exclude)
        self._candidates: dict[str, int] = {}  # peer -> distance; failed ones are gone
        self._gone: set[str] = set()
        self._asked: set[str] = set()
        self._answered: set[str] = set()
        self._learn(seeds)

    def take(self, extra: int = 0) -> list[str]:
        """Return the peers to ask now. `extra` raises the number in flight, to get past silent peers."""
        free = self._parallel + extra - len(self._in_flight())
        free = min(free, QUERIES_MAX - len(self._asked))
        chosen = [peer for peer in self._front() if peer not in self._asked][: max(0, free)]
        self._asked.update(chosen)
        return chosen

    def answered(self, peer: str, named: Iterable[str]) -> None:
        """Take the answer of `peer`, with the peers that it named."""
        self._answered.add(peer)
        self._learn(named)

    def failed(self, peer: str) -> None:
        """Drop a peer that is dead, frozen or too slow."""
        self._candidates.pop(peer, None)
        self._gone.add(peer)

    @property
    def finished(self) -> bool:
        if len(self._asked) >= QUERIES_MAX:
            return not self._in_flight()
        return all(peer in self._answered for peer in self._front())

    def pending(self) -> list[str]:
        """Return the peers that were asked and have neither answered nor failed."""
        return sorted(self._in_flight(), key=self._candidates.__getitem__)

    def result(self) -> list[str]:
        """Return the nearest peers that have answered, nearest first, at most `width`."""
        return sorted(self._answered, key=lambda peer: distance(node_key(peer), self._target))[: self._width]

    def _front(self) -> list[str]:
        return sorted(self._candidates, key=self._candidates.__getitem__)[: self._width]

    def _in_flight(self) -> set[str]:
        return self._asked - self._answered - self._gone

    def _learn(self, peers: Iterable[str]) -> None:
        for peer in peers:
            if peer not in self._excluded and peer not in self._gone:
                self._candidates.setdefault(peer, distance(node_key(peer), self._target))
        if len(self._candidates) > CANDIDATES_MAX:
            nearest = sorted(self._candidates.items(), key=lambda item: item[1])
            kept = dict(nearest[:CANDIDATES_MAX])
            self._candidates = kept | {peer: self._candidates[peer] for peer in self._asked & self._candidates.keys()}
