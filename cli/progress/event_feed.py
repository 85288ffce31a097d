"""The events of this process, from memory: what a view shows does not depend on a disk that may be full."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any, Final

from peer.events import Event

KEPT_MAX: Final = 10_000


class EventFeed:
    """Events as they are emitted, for a reader that polls, as `EventTail` reads those of another process.

    `take` is called in the thread that emits one. A reader that comes too late finds the last `KEPT_MAX`.
    """

    def __init__(self) -> None:
        self._events: deque[Event] = deque(maxlen=KEPT_MAX)

    def take(self, event: Event) -> None:
        """Keep an event until the next poll."""
        self._events.append(event)

    def poll(self) -> Iterator[tuple[float, str, dict[str, Any]]]:
        """Yield (Unix time, name, fields) of each event since the last call."""
        while self._events:
            event = self._events.popleft()
            yield round(event.at, 3), event.name, dict(event.fields)
