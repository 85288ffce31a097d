"""Tasks of one process: a broadcast between them, and tasks beside a block without the groups that a nursery makes of
errors."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from math import inf
from typing import TypeVar

import trio

if sys.version_info < (3, 11):
    from exceptiongroup import BaseExceptionGroup

Item = TypeVar("Item")
Found = TypeVar("Found")


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


@asynccontextmanager
async def beside_block() -> AsyncIterator[trio.Nursery]:
    """Open a nursery whose tasks are cancelled with the end of the block. An error of the block is raised as it is."""
    failure: BaseException | None = None
    try:
        async with trio.open_nursery() as nursery:
            try:
                yield nursery
            except (Exception, BaseExceptionGroup) as error:  # noqa: BLE001 - raised below, outside the nursery
                failure = error
            nursery.cancel_scope.cancel()
    finally:
        if failure is not None:  # the nursery would wrap it, and a cancellation would take its place
            raise failure


async def ask_at_once(ask: Callable[[Item], Awaitable[Found]], items: Iterable[Item]) -> list[Found]:
    """Call `ask` with all items at once; return what each call returns, in the order of the items."""
    found = dict[int, Found]()

    async def one(place: int, item: Item) -> None:
        found[place] = await ask(item)

    async with trio.open_nursery() as nursery:
        for place, item in enumerate(items):
            nursery.start_soon(one, place, item)
    return [found[place] for place in sorted(found)]
