"""The timers of one node."""

from __future__ import annotations

from collections.abc import Callable

import trio


class Timers:
    """Calls `fire` with the id of each timer once it is due. Times are trio's."""

    def __init__(self, fire: Callable[[str], object]) -> None:
        self._fire = fire
        self._due: dict[str, float] = {}
        self._changed = trio.Event()

    def set(self, id: str, at: float) -> None:
        """Set a timer, in place of one of the same id."""
        self._due[id] = at
        self._changed.set()

    def cancel(self, id: str) -> None:
        """Forget a timer."""
        self._due.pop(id, None)

    async def run(self) -> None:
        """Fire timers until cancelled."""
        while True:
            self._changed = trio.Event()
            soonest = min(self._due.values(), default=float("inf"))
            with trio.move_on_at(soonest):
                await self._changed.wait()
            now = trio.current_time()
            for id in sorted(id for id, at in self._due.items() if at <= now):
                if self._due.pop(id, now + 1) <= now:
                    self._fire(id)
