"""A pseudo-terminal that a command writes to, read by a terminal emulator: what a person sees."""

from __future__ import annotations

import fcntl
import os
import pty
import struct
import subprocess
import sys
import termios
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Final

import pyte
import trio

from tests.support.forking.forked import ForkedProcess

ROOT: Final = Path(__file__).parents[3]
LINES: Final = 40
WAIT_S: Final = 120.0


class Terminal:
    """A screen of so many columns, with all that has left it at the top."""

    def __init__(self, columns: int) -> None:
        self.columns = columns
        self._screen = pyte.HistoryScreen(columns, LINES, history=1000, ratio=0.5)
        self._stream = pyte.ByteStream(self._screen)
        self._gone: dict[int, tuple[object, str]] = {}
        """Rows that have left the screen, by identity, as they were read: they never change."""
        self.changed = trio.Event()
        self.keyboard = -1
        """The descriptor that keys go to, of a terminal with a program."""

    def press(self, keys: str | bytes) -> None:
        os.write(self.keyboard, keys if isinstance(keys, bytes) else keys.encode())

    def write(self, data: bytes) -> None:
        self._stream.feed(data)
        self.changed.set()
        self.changed = trio.Event()

    @property
    def rows(self) -> list[str]:
        """All rows, the oldest first, as wide as the screen."""
        self._gone = {id(row): self._gone.get(id(row)) or self._read(row) for row in self._screen.history.top}
        return [*(text for _, text in self._gone.values()), *self._screen.display]

    def _read(self, row: Mapping[int, pyte.screens.Char]) -> tuple[object, str]:
        return row, "".join(row[column].data for column in range(self.columns))

    @property
    def text(self) -> str:
        """All rows joined, as a person copies what runs over the end of a row."""
        return "".join(self.rows)

    async def until(self, condition: Callable[[str], bool]) -> None:
        """Wait until the text is such."""
        with trio.move_on_after(WAIT_S):
            while not condition(self.text):
                await self.changed.wait()
            return
        raise AssertionError("the terminal shows:\n" + "\n".join(self.rows))


@asynccontextmanager
async def command(columns: int, *arguments: str) -> AsyncIterator[tuple[Terminal, subprocess.Popen[bytes]]]:
    """Run a `peer` command in a terminal until the block ends."""
    async with program(columns, [sys.executable, "-m", "cli.main", *arguments]) as running:
        yield running


@asynccontextmanager
async def forked(columns: int, *arguments: str) -> AsyncIterator[tuple[Terminal, subprocess.Popen[bytes]]]:
    """Run a `peer` command and its children as forks in a terminal until the block ends."""

    def start(terminal: int, environment: dict[str, str]) -> subprocess.Popen[bytes]:
        return ForkedProcess(
            *("cli.main", *arguments), stdin=terminal, stdout=terminal, stderr=terminal, env=environment, cwd=ROOT
        )

    async with _started(columns, start) as running:
        yield running


@asynccontextmanager
async def program(columns: int, arguments: Sequence[str]) -> AsyncIterator[tuple[Terminal, subprocess.Popen[bytes]]]:
    def start(terminal: int, environment: dict[str, str]) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            arguments,
            stdin=terminal,
            stdout=terminal,
            stderr=terminal,
            env=environment,
            cwd=ROOT,
            start_new_session=True,
            preexec_fn=_take_control,
        )

    async with _started(columns, start) as running:
        yield running


def _take_control() -> None:
    """Make standard input the terminal whose Ctrl-C is a signal for this process."""
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


@asynccontextmanager
async def _started(
    columns: int, start: Callable[[int, dict[str, str]], subprocess.Popen[bytes]]
) -> AsyncIterator[tuple[Terminal, subprocess.Popen[bytes]]]:
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", LINES, columns, 0, 0))
    environment = {key: value for key, value in os.environ.items() if key not in ("COLUMNS", "LINES", "NO_COLOR")}
    environment |= {"TERM": "xterm-256color", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    process = start(theirs, environment)
    os.close(theirs)
    os.set_blocking(ours, False)
    terminal = Terminal(columns)
    terminal.keyboard = ours

    async def read() -> None:
        with suppress(OSError):  # how a pseudo-terminal ends
            while True:
                await trio.lowlevel.wait_readable(ours)
                terminal.write(os.read(ours, 1 << 16))

    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(read)
            yield terminal, process
            nursery.cancel_scope.cancel()
    finally:
        process.kill()
        process.wait()
        os.close(ours)
