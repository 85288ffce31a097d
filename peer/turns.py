"""Turns at sending to one peer.

Payloads that are sent side by side share the link: all arrive late, and together, so that a pipeline's forwards crowd
one direction while the other lies idle, and then its backwards do. In turns each arrives as early as it can.
"""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

import trio

AT_ONCE: Final = 2  # one alone leaves the link idle while its congestion window grows anew (RFC 5681, 4.1)
STALLED_S: Final = 2.0
WAIT_MAX_S: Final = 10.0


class Turns:
    """`AT_ONCE` at a time, in the order in which they came. Where those whose turn it is send nothing for `STALLED_S`,
    as whoever reads them may be waiting for another, all that wait go besides; and nobody waits for more than
    `WAIT_MAX_S`."""

    def __init__(self) -> None:
        self._free = AT_ONCE
        self._waiting: deque[trio.Event] = deque()
        self._moved_at = 0.0

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[bool]:
        """Waits for one. Gives whether it is one, and not besides the others: then `moved` is to be called."""
        held = await self._wait()
        try:
            yield held
        finally:
            if held:
                self._pass_on()

    def moved(self) -> None:
        """Somebody whose turn it is has sent something."""
        self._moved_at = trio.current_time()

    async def _wait(self) -> bool:
        if self._free:
            self._free -= 1
            self.moved()
            return True
        mine, latest = trio.Event(), trio.current_time() + WAIT_MAX_S
        self._waiting.append(mine)
        try:
            while not mine.is_set() and trio.current_time() < min(latest, self._moved_at + STALLED_S):
                with trio.move_on_at(min(latest, self._moved_at + STALLED_S)):
                    await mine.wait()
        except trio.Cancelled:
            self._leave(mine)
            raise
        if mine.is_set():
            return True
        self._leave(mine)
        return False

    def _leave(self, mine: trio.Event) -> None:
        if mine.is_set():
            self._pass_on()
        else:
            self._waiting.remove(mine)

    def _pass_on(self) -> None:
        self.moved()
        if self._waiting:
            self._waiting.popleft().set()
        else:
            self._free += 1
