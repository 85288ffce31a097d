"""Addresses of which there is only a peer's word: how often they are dialled."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Final

import trio

from peer.errors import DialError
from peer.net.backoff import Backoff

CLOSED_S: Final = 60.0  # no claimed address of an IP is dialled for so long after one was not its claimant's
PORT_CLOSED_MIN_S: Final = 1.0
FAILURES_MAX: Final = 10  # in CLOSED_S, at all IPs together


class ClaimedDials:
    """Permits dials to addresses that are only claimed: one at a time a place, and none for a while after a failure.

    A dial that finds its peer costs nothing, so honest peers behind one address are dialled one after another. One that
    does not may have disturbed a third party. In a run such a failure closes the IP address for a minute, and ten
    close all. At a host of no run it closes the port, for a second at first.
    """

    def __init__(self, is_guarded: Callable[[], bool]) -> None:
        self._is_guarded = is_guarded
        self._closed = Backoff(CLOSED_S, CLOSED_S, factor=1)
        self._closed_ports = Backoff(PORT_CLOSED_MIN_S, CLOSED_S)
        self._failures: deque[float] = deque()
        self._dialling: dict[str, trio.Lock] = {}

    @asynccontextmanager
    async def permit(self, address: str) -> AsyncIterator[None]:
        """Dial a claimed address in the block. Raises DialError if it may not be dialled now."""
        _, host, _, port = address.split("/")[1:5]
        guarded = self._is_guarded()
        place, closed = (host, self._closed) if guarded else (f"{host} {port}", self._closed_ports)
        lock = self._dialling.setdefault(place, trio.Lock())
        try:
            async with lock:
                if closed.paused(place) or (guarded and self._spent()):
                    raise DialError(f"{address} is only claimed, and dials to claims failed lately", "refused")
                try:
                    yield
                except BaseException:
                    closed.failed(place)
                    self._failures.append(trio.current_time())
                    raise
                closed.reset(place)
        finally:
            if not lock.locked() and not lock.statistics().tasks_waiting:
                self._dialling.pop(place, None)

    def _spent(self) -> bool:
        while self._failures and trio.current_time() - self._failures[0] > CLOSED_S:
            self._failures.popleft()
        return len(self._failures) + len(self._dialling) > FAILURES_MAX
