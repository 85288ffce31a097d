"""Children of a test: an attack, its victim, and an honest caller that is called as often as before."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import msgspec
import pytest
import trio

ANSWER_S = 300.0
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


class Child:
    """A process that is told lines and answers with lines."""

    def __init__(self, process: trio.Process) -> None:
        assert process.stdin is not None and process.stdout is not None
        self._stdin, self._stdout, self._unread = process.stdin, process.stdout, b""

    async def tell(self, line: str) -> None:
        await self._stdin.send_all(line.encode() + b"\n")

    async def line(self) -> str:
        with trio.fail_after(ANSWER_S):
            while b"\n" not in self._unread:
                more = await self._stdout.receive_some()
                assert more, "the child has ended"
                self._unread += more
        line, _, self._unread = self._unread.partition(b"\n")
        return line.decode().strip()


@asynccontextmanager
async def running(module: str, *arguments: str) -> AsyncIterator[Child]:
    """Run a module of tests in a process, which ends with its stdin."""
    command = [sys.executable, "-m", f"tests.{module}", *arguments]
    process = await trio.lowlevel.open_process(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        yield Child(process)
    finally:
        with trio.CancelScope(shield=True):
            assert process.stdin is not None
            await process.stdin.aclose()
            with trio.move_on_after(10) as late:
                await process.wait()
            if late.cancelled_caught:
                process.kill()
                await process.wait()


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
    async with running("peer.support.honest_child", address) as child:
        await child.line()
        caller = HonestCaller(child)
        await caller.latency()
        yield caller
