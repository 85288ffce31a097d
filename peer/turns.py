"""Turns at sending to one peer.

Payloads that are sent side by side share the link: all arrive late, and together, so that a pipeline's forwards crowd
one direction while the other lies idle, and then its backwards do. In turns each arrives as early as it can.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

import trio

AT_ONCE: Final = 2  # one alone leaves the link idle while its congestion window grows anew (RFC 5681, 4.1)
STALLED_S: Final = 2.0


class Turns:
    """At most `AT_ONCE` at a time, in order; who has waited for `STALLED_S` goes to the end."""

    def __init__(self) -> None:
        self._free = trio.Semaphore(AT_ONCE)
        self._ended = 0

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Waits for one; where none has ended for a while it goes without, as whoever reads the others may be waiting
        for us."""
        held = await self._wait()
        try:
            yield
        finally:
            self._ended += 1
            if held:
                self._free.release()

    async def _wait(self) -> bool:
        """Whether it is to be released."""
        while True:
            ended = self._ended
            with trio.move_on_after(STALLED_S) as patience:
                await self._free.acquire()
            if not patience.cancelled_caught:
                return True
            if self._ended == ended:
                return False
