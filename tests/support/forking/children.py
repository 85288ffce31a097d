"""Processes that a test talks with, a line at a time."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from subprocess import PIPE, Popen
from typing import Any, Final

import trio

from tests.support.forking.forked import ForkedProcess

LINE_S: Final = 300.0
POLL_S: Final = 0.01


class Child:
    """A process that is told lines and answers with lines; from `open_child`."""

    def __init__(self, process: Popen[bytes]) -> None:
        assert process.stdin is not None and process.stdout is not None
        self.process, self.pid = process, process.pid
        self.stdin = trio.lowlevel.FdStream(os.dup(process.stdin.fileno()))
        self._stdout = trio.lowlevel.FdStream(os.dup(process.stdout.fileno()))
        self._unread = b""
        process.stdin.close()
        process.stdout.close()

    async def tell(self, line: str) -> None:
        await self.stdin.send_all(line.encode() + b"\n")

    async def line(self) -> str:
        with trio.fail_after(LINE_S):
            while b"\n" not in self._unread:
                chunk = await self._stdout.receive_some()
                assert chunk, f"{self.process.args!r} has ended with {self.process.wait(LINE_S)}"
                self._unread += chunk
        line, _, self._unread = self._unread.partition(b"\n")
        return line.decode()

    async def ask(self, line: str) -> Any:
        """Tell a line; return the answer, which is JSON."""
        await self.tell(line)
        return json.loads(await self.line())

    async def close(self) -> None:
        self.process.kill()
        with trio.CancelScope(shield=True):
            while self.process.poll() is None:
                await trio.sleep(POLL_S)
            await self.stdin.aclose()
            await self._stdout.aclose()


def executed(module: str, *arguments: str, **options: Any) -> Popen[bytes]:
    """Start a process that shares no memory with others, for tests that look at what it takes."""
    return Popen([sys.executable, "-m", module, *arguments], **options)


@asynccontextmanager
async def open_child(
    module: str, *arguments: str, start: Callable[..., Popen[bytes]] = ForkedProcess, **options: Any
) -> AsyncIterator[Child]:
    """Run a module in a process until the block ends, which kills it. `options`: of `start`."""
    # In a thread: the first to be forked takes seconds, in which hosts of this process must not stand still.
    begun = partial(start, module, *arguments, stdin=PIPE, stdout=PIPE, **options)
    child = Child(await trio.to_thread.run_sync(begun))
    try:
        yield child
    finally:
        await child.close()
