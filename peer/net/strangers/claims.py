"""Addresses at which no dial of ours has found their peer: how often they are dialled."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Final

import trio

from peer.bounds import Latest
from peer.errors import DialError
from peer.net.backoff import PEERS_MAX, Backoff

CLOSED_S: Final = 60.0  # no claimed address of an IP is dialled for so long after one was not its claimant's
PORT_CLOSED_MIN_S: Final = 1.0
FAILURES_MAX: Final = 10  # in CLOSED_S, at all IPs together
FOUND_MAX: Final = 4096
FAILURES_AT_ONE_MAX: Final = 20  # in CLOSED_S, at one IP that trusted peers have told of


class UnprovenDials:
    """Permits dials to addresses at which we have not found their peer: one at a time a place, and none for a while
    after a failure.

    A dial that finds its peer costs nothing, so honest peers behind one address are dialled one after another. One that
    does not may have disturbed a third party. In a run such a failure at a claimed address closes the IP address for a
    minute, and ten close all. Elsewhere it closes the port, for a second at first: at a host of no run, and where a
    peer that the run trusts has reported it. Twenty of these in a minute close their IP address.
    """

    def __init__(self, is_guarded: Callable[[], bool]) -> None:
        self._is_guarded = is_guarded
        self._closed = Backoff(CLOSED_S, CLOSED_S, factor=1)
        self._closed_ports = Backoff(PORT_CLOSED_MIN_S, CLOSED_S)
        self._failures: deque[float] = deque()
        self._failures_at = Latest[str, deque[float]](PEERS_MAX)
        self._dialling: dict[str, trio.Lock] = {}
        self._found = Latest[tuple[str, str], None](FOUND_MAX)

    def note_found(self, peer: str, address: str) -> None:
        """Note that a dial has found a peer at an address: further ones disturb no third party."""
        self._found[peer, address] = None

    def is_proven(self, peer: str, address: str) -> bool:
        """Whether a dial has found the peer there, as far as is remembered."""
        return (peer, address) in self._found

    @asynccontextmanager
    async def permit(self, address: str, claimed: bool = True) -> AsyncIterator[None]:
        """Dial an address in the block; `claimed`: there is only its peer's word. Raises DialError if it may not be
        dialled now."""
        _, host, _, port = address.split("/")[1:5]
        guarded, strict = self._is_guarded(), self._is_guarded() and claimed
        place, closed = (host, self._closed) if strict else (f"{host} {port}", self._closed_ports)
        failures = self._failures if strict else self._failures_of(host)
        lock = self._dialling.setdefault(place, trio.Lock())
        try:
            async with lock:
                spent = _recent(failures) >= (FAILURES_MAX - self._others() if strict else FAILURES_AT_ONE_MAX)
                if closed.paused(place) or (guarded and spent):
                    what = "is only claimed" if claimed else "has not led to its peer yet"
                    raise DialError(f"{address} {what}, and recent dials there failed", "refused")
                try:
                    yield
                except BaseException:
                    closed.failed(place)
                    failures.append(trio.current_time())
                    raise
                closed.reset(place)
        finally:
            if not lock.locked() and not lock.statistics().tasks_waiting:
                self._dialling.pop(place, None)

    def _failures_of(self, host: str) -> deque[float]:
        """Return the failures at a host, which is forgotten last."""
        kept = self._failures_at.get(host, deque(maxlen=FAILURES_AT_ONE_MAX))
        self._failures_at[host] = kept
        return kept

    def _others(self) -> int:
        """Return how many IP addresses beside that of the caller are dialled by claims now."""
        return sum(" " not in place for place in self._dialling) - 1


def _recent(failures: deque[float]) -> int:
    while failures and trio.current_time() - failures[0] > CLOSED_S:
        failures.popleft()
    return len(failures)
