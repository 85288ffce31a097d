"""Places of a key: the nodes that keep its records, and those of them that a read asks.

In a network of up to `replicas` nodes every node keeps every record, and nothing is looked up. In a larger one those do
that are trusted, if they are not too many, and the nearest to the key. Positions near a key can be ground by hashing,
so nearness alone decides nothing: every record is stored at, and every read asks, the anchors (the bootstrap peers) and
some trusted peers as well; strangers come after trusted peers, and count once a public address prefix.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

import trio

from dht.key import as_int, nearest
from dht.router import Router
from peer.bounds import Latest

PLACEMENTS_MAX: Final = 256
TRUSTED_ASKED: Final = 2  # trusted peers that every read asks beside the anchors, and writes too in a large network


@dataclass(frozen=True)
class ReadPlan:
    """The stores that one read asks, until `first` have answered or failed, and `wanted` stores have answered."""

    first: tuple[str, ...]
    further: tuple[str, ...]
    wanted: int


class Places:
    """The placement of records, in one node's view."""

    def __init__(self, router: Router) -> None:
        self._router = router
        self._found = Latest[bytes, tuple[float, tuple[str, ...]]](PLACEMENTS_MAX)

    async def stores(self, digest: bytes) -> list[str]:
        """Return the nodes that should keep a record, nearest first within trusted ones and strangers."""
        router, target = self._router, as_int(digest)
        replicas, own = router.tuning.replicas, router.host.peer_id
        known = self._known()
        if len(known) < replicas:
            return self._by_trust(target, [*known, own])
        trusted = [peer for peer in known if router.is_trusted(peer)]
        if trusted and len(trusted) < replicas:
            chosen = {own, *trusted, *self._near(target, set(known).difference(trusted))}
        else:
            near = self._near(target, {*known, *await self._look_up(digest), own})
            chosen = {*near, *self._always(known)}
        return self._by_trust(target, chosen)

    async def plan_read(self, digest: bytes) -> ReadPlan:
        """Return which stores to ask, without ourselves."""
        router = self._router
        stores = [peer for peer in await self.stores(digest) if peer != router.host.peer_id]
        first = self._always(stores)
        further = [peer for peer in stores if peer not in first]
        if len(stores) < router.tuning.replicas:  # all keep it: ask those to whom no dial is due
            further.sort(key=lambda peer: (not router.is_trusted(peer), not router.host.is_connected(peer)))
        merged = trio.current_time() - router.merged_at < router.tuning.relookup_s
        wanted = router.tuning.stores if merged else router.tuning.readers
        return ReadPlan(tuple(first), tuple(further), min(max(wanted, len(first)), len(stores)))

    def _known(self) -> list[str]:
        """Return the live peers in the routing table."""
        router = self._router
        live = [peer for peer in router.table if router.available(peer)]
        return live or [peer for peer in router.table if router.is_probing(peer)]  # perhaps we stood still ourselves

    def _always(self, known: Iterable[str]) -> list[str]:
        """Return the anchors, and a few of the trusted peers at random: no peer can foresee which."""
        known = list(known)
        anchors = [peer for peer in known if peer in self._router.anchors]
        trusted = [peer for peer in known if peer not in anchors and self._router.is_trusted(peer)]
        return [*anchors, *random.sample(trusted, min(TRUSTED_ASKED, len(trusted)))]

    def _by_trust(self, target: int, peers: Iterable[str]) -> list[str]:
        router = self._router
        own = router.host.peer_id if router.host.admissions.guarded else None
        everyone = set(peers)
        near_first = nearest(target, everyone, len(everyone))
        return sorted(near_first, key=lambda peer: not (peer == own or router.is_trusted(peer)))

    def _near(self, target: int, peers: Iterable[str]) -> list[str]:
        """Return the k of these peers for a key: trusted ones first, then nearest, with one of a public prefix."""
        router, chosen, crowds = self._router, list[str](), set[str]()
        for peer in self._by_trust(target, peers):
            origin = router.table.origin(peer)
            crowd = None if origin is None else origin.crowd
            if crowd is None or crowd not in crowds:
                chosen.append(peer)
            if crowd is not None:
                crowds.add(crowd)
        return chosen[: router.tuning.stores]

    async def _look_up(self, digest: bytes) -> list[str]:
        """Return the nodes that a lookup has found nearest to a key. They are remembered for `relookup_s`; until then
        the routing table knows the nodes that have died or joined since."""
        router, now = self._router, trio.current_time()
        until, found = self._found.get(digest, (0.0, ()))
        if now >= until or until - router.tuning.relookup_s < router.merged_at:
            found = tuple(await router.find(as_int(digest)))
            self._found[digest] = (trio.current_time() + router.tuning.relookup_s, found)
        return [peer for peer in found if router.available(peer)]
