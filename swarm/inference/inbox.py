"""What servers have sent to one session, in order, until the session looks at it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Final

import trio

from peer.net.flow.flow import Flow
from peer.notifier import Notifier
from swarm.inference.messages import ServingMessage

INBOX_MAX: Final = 1024
"""Messages that wait; a good server sends at most a token each of those that it may draw, and little else."""
Arrival = tuple[Flow, ServingMessage, float]
"""A message, the flow that it came over, and when, in trio's time."""


class Inbox:
    """The messages that wait."""

    def __init__(self) -> None:
        self._waiting = deque[Arrival]()
        self._came = Notifier()

    def put(self, flow: Flow, message: ServingMessage) -> bool:
        """Add a message, and wake who waits. Return whether there was room."""
        has_room = len(self._waiting) < INBOX_MAX
        if has_room:
            self._waiting.append((flow, message, trio.current_time()))
        self._came.notify()
        return has_room

    def take(self) -> Iterator[Arrival]:
        """Yield what waits, also what comes meanwhile; what is not asked for stays."""
        while self._waiting:
            yield self._waiting.popleft()

    def put_back(self, arrivals: Sequence[Arrival]) -> None:
        """Put messages before all others."""
        self._waiting.extendleft(reversed(arrivals))

    def clear(self) -> None:
        """Drop all messages."""
        self._waiting.clear()

    def wake(self) -> None:
        """Wake who waits: something else has changed."""
        self._came.notify()

    async def wait(self) -> None:
        """Wait until a message comes, or something else changes."""
        await self._came.wait()
