"""This peer's measurements, in exchanges, of the links of others: for the shares of `swarm.protocol.shares`.

A peer's link carries as many times the rate of one flow as it has flows. Another peer's upload speed is the rate at
which its data arrives here, times its reported number of flows, which is capped. Results go to all at once: another
peer's download speed is the rate at which it takes this one's, if it takes less than others do, times the owners.
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
from swarm.rounds.exchange.send_window import SENDS_PER_OWNER, SendWindow

MEASURED_MIN: Final = 256 << 10  # bytes; fewer measure round trips and buffers
LIMITED: Final = 0.7  # of what others take: a peer that takes less is limited by its own link
MEMORY: Final = 0.5  # weight of the exchanges before


@dataclass
class _Sent:
    """The results delivered to one peer, and for how long any of them was under way."""

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
        self.window: Final = SendWindow()
        self._host, self._flows = host, 0
        self._peers: tuple[str, ...] = ()
        self._owners: frozenset[str] = frozenset()
        self._received: dict[str, tuple[int, float]] = {}
        self._sent: dict[str, _Sent] = {}
        self._told: dict[str, tuple[int, int]] = {}  # slices from a peer, and the sum of their flows
        self._ups: dict[str, float] = {}
        self._downs: dict[str, float] = {}

    @property
    def codes(self) -> dict[str, bytes]:
        """The links that are known, as `swarm.protocol.shares.links_of` reads them."""
        known = sorted({*self._ups, *self._downs})
        return {p: bytes((code_of(self._ups.get(p, 0.0)), code_of(self._downs.get(p, inf)))) for p in known}

    def begin(self, peers: Sequence[str], owners: Collection[str], members: Collection[str] = ()) -> None:
        """Measure an exchange among these contributors, some of them owners. Peers that are neither contributors nor in
        `members` are forgotten."""
        for known in (self._ups, self._downs):
            for peer in set(known).difference(peers, members):
                del known[peer]
        self._peers, self._owners = tuple(peer for peer in peers if peer != self._host.peer_id), frozenset(owners)
        self._received = {peer: self._host.received_from(peer) for peer in self._peers}
        self._sent = {peer: _Sent() for peer in self._peers}
        self._told = dict.fromkeys(self._peers, (0, 0))

    def receiving(self, peer: str, flows: int) -> None:
        """Note that a peer sends one slice, and how many at the same time."""
        if peer in self._told:
            others = max(1, len(self._peers))
            most = others * SENDS_PER_OWNER + (others if peer in self._owners else 0)
            count, total = self._told[peer]
            self._told[peer] = count + 1, total + min(max(1, flows), most)

    @contextmanager
    def sending(self, peer: str, size_bytes: int, is_result: bool) -> Iterator[int]:
        """Count a delivery in the block, and measure it if it is a result; one that fails takes time and delivers
        nothing. Gives the flows under way with it."""
        self._flows += 1
        try:
            if is_result:
                with self._measuring(peer, size_bytes):
                    yield self._flows
            else:
                yield self._flows
        finally:
            self._flows -= 1

    @contextmanager
    def _measuring(self, peer: str, size_bytes: int) -> Iterator[None]:
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
            count, flows = self._told[peer]
            if size >= MEASURED_MIN and seconds > 0 and count:
                self._ups[peer] = _smoothed(self._ups.get(peer), flows / count * size / seconds)
            if 0 < taken[peer] < LIMITED * usual:
                self._downs[peer] = _smoothed(self._downs.get(peer), len(self._owners - {peer}) * taken[peer])
            elif taken[peer]:
                self._downs.pop(peer, None)
        self._peers = ()


def _smoothed(old: float | None, new: float) -> float:
    return new if old is None else exp(MEMORY * log(old) + (1 - MEMORY) * log(new))
