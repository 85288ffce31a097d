"""Forked processes that a test talks with, a line at a time."""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from subprocess import PIPE
from typing import Any, Final

import trio

from tests.support.forking.forked import ForkedProcess

LINE_S: Final = 300.0
POLL_S: Final = 0.01


class Child:
    """A process that is told lines and answers with lines; from `open_child`."""

    def __init__(self, process: ForkedProcess) -> None:
        assert process.stdin is not None and process.stdout is not None
        self.process = process
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


@asynccontextmanager
async def open_child(module: str, *arguments: str, **options: Any) -> AsyncIterator[Child]:
    """Run a module in a process until the block ends, which kills it. `options`: of `ForkedProcess`."""
    child = Child(ForkedProcess(module, *arguments, stdin=PIPE, stdout=PIPE, **options))
    try:
        yield child
    finally:
        await child.close()
