"""What this peer measures, in exchanges, of the links of others: for the shares of `swarm.protocol.shares`.

All flows of an exchange move at once, so a peer's link carries as many times the rate of one flow as it has flows. How
fast another peer can send is what arrives from it; how fast it can receive is what it takes from this peer, where it
takes less than others do.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import exp, inf, log
from statistics import median
from typing import Final

import trio

from peer.net.host import Host
from swarm.protocol.shares import code_of

MEASURED_MIN: Final = 256 << 10  # bytes; fewer measure round trips and buffers
LIMITED: Final = 0.7  # of what others take: a peer that takes less is limited by its own link
MEMORY: Final = 0.5  # weight of the exchanges before


@dataclass
class _Sent:
    """What was delivered to one peer, and for how long any of it was under way."""

    size_bytes: int = 0
    seconds: float = 0.0
    under_way: int = 0
    since: float = 0.0

    @property
    def rate(self) -> float:
        return self.size_bytes / self.seconds if self.size_bytes >= MEASURED_MIN and self.seconds > 0 else 0.0


class LinkRates:
    """The links of the members of one group, smoothed over exchanges."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._peers: tuple[str, ...] = ()
        self._owners: frozenset[str] = frozenset()
        self._received: dict[str, tuple[int, float]] = {}
        self._sent: dict[str, _Sent] = {}
        self._ups: dict[str, float] = {}
        self._downs: dict[str, float] = {}

    @property
    def codes(self) -> dict[str, bytes]:
        """The links that are known, as `swarm.protocol.shares.links_of` reads them."""
        known = sorted({*self._ups, *self._downs})
        return {p: bytes((code_of(self._ups.get(p, 0.0)), code_of(self._downs.get(p, inf)))) for p in known}

    def begin(self, peers: Sequence[str], owners: Collection[str]) -> None:
        """Measure an exchange among these contributors, of whom some own slices."""
        self._peers, self._owners = tuple(peer for peer in peers if peer != self._host.peer_id), frozenset(owners)
        self._received = {peer: self._host.received_from(peer) for peer in self._peers}
        self._sent = {peer: _Sent() for peer in self._peers}

    @contextmanager
    def sending(self, peer: str, size_bytes: int) -> Iterator[None]:
        """Measure a delivery in the block; one that fails takes time and delivers nothing."""
        sent = self._sent.setdefault(peer, _Sent())
        sent.since = trio.current_time() if not sent.under_way else sent.since
        sent.under_way += 1
        try:
            yield
            sent.size_bytes += size_bytes
        finally:
            sent.under_way -= 1
            if not sent.under_way:
                sent.seconds += trio.current_time() - sent.since

    def end(self) -> None:
        """Take the exchange into account. A second call does nothing."""
        if not self._peers:
            return
        taken = {peer: self._sent[peer].rate for peer in self._peers}
        usual = median(rates) if (rates := [rate for rate in taken.values() if rate]) else 0.0
        for peer in self._peers:
            size, seconds = self._host.received_from(peer)
            size, seconds = size - self._received[peer][0], seconds - self._received[peer][1]
            flows = len(self._peers) if peer in self._owners else len(self._owners)
            if size >= MEASURED_MIN and seconds > 0:
                self._ups[peer] = _smoothed(self._ups.get(peer), flows * size / seconds)
            if 0 < taken[peer] < LIMITED * usual:
                self._downs[peer] = _smoothed(self._downs.get(peer), flows * taken[peer])
            elif taken[peer]:
                self._downs.pop(peer, None)
        for known in (self._ups, self._downs):
            for peer in set(known).difference(self._peers):
                del known[peer]
        self._peers = ()


def _smoothed(old: float | None, new: float) -> float:
    return new if old is None else exp(MEMORY * log(old) + (1 - MEMORY) * log(new))
