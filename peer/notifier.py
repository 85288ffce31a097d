"""A broadcast between the tasks of one process."""

from __future__ import annotations

from collections.abc import Callable
from math import inf

import trio


class Notifier:
    """A broadcast that wakes all waiting tasks."""

    def __init__(self) -> None:
        self._event = trio.Event()

    def notify(self) -> None:
        self._event.set()
        self._event = trio.Event()

    async def wait(self, timeout_s: float = inf) -> bool:
        """Wait for the next notification. Return False if `timeout_s` passes first."""
        with trio.move_on_after(timeout_s) as timeout:
            await self._event.wait()
        return not timeout.cancelled_caught

    async def until(self, ready: Callable[[], bool], timeout_s: float) -> bool:
        """Wait until `ready()` holds, checked at every notification. Return False if `timeout_s` passes first."""
        with trio.move_on_after(timeout_s):
            while not ready():
                await self._event.wait()
        return ready()
