"""An honest caller of a peer under attack, in a process of its own."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import msgspec
import pytest

from tests.support.forking.children import Child, open_child

TRIES = 3
TIMED = pytest.mark.parametrize("timed", [False, pytest.param(True, marks=pytest.mark.soak)], ids=["untimed", "timed"])
"""For tests that look at latencies in the soak only: on a busy machine these say nothing about us."""
FLOOR_S = 0.02  # twice the longest garbage collection of a host that holds all it may


class Latency(msgspec.Struct, frozen=True):
    """How long honest calls take, in seconds of `clock.cpu_s`."""

    calls: int
    p50: float
    p99: float
    max: float

    def check_beside(self, quiet: Latency, times: float = 2.0) -> None:
        """Assert that these calls were at most that many times as slow as quiet ones."""
        assert self.p99 <= max(times * quiet.p99, FLOOR_S), (self, quiet)


class HonestCaller:
    """A peer of the victim that calls it a hundred times a second when it is told to.

    Processor time is measured, so that what else runs on the machine counts little.
    """

    def __init__(self, child: Child) -> None:
        self._child = child

    async def latency(self, meanwhile: Callable[[], Awaitable[object]] | None = None) -> Latency:
        """Return that of two hundred calls at least, and of all that begin while `meanwhile` runs."""
        await self._child.tell("begin")
        if meanwhile is not None:
            await meanwhile()
        await self._child.tell("end")
        return msgspec.convert(json.loads(await self._child.line()), Latency)

    async def check_beside(self, quiet: Latency) -> None:
        """Check calls beside an attack that goes on: the best of three times, as calls come in bursts."""
        tried = [await self.latency() for _ in range(TRIES)]
        min(tried, key=lambda latency: latency.p99).check_beside(quiet)


@asynccontextmanager
async def honest_caller(address: str) -> AsyncIterator[HonestCaller]:
    """Connect a caller to the victim at an address, and warm both up."""
    async with open_child("tests.peer.support.honest_child", address) as child:
        await child.line()
        caller = HonestCaller(child)
        await caller.latency()
        yield caller
