"""Lines that come in on standard input while other tasks run."""

from __future__ import annotations

import os
import sys
from typing import Final

import trio

from cli.terminal.standard_streams import GONE

LINE_BYTES_MAX: Final = 1 << 20
_PIECE_BYTES: Final = 1 << 14


class TypedLines:
    """Standard input, line by line: of a terminal, a pipe or a file."""

    def __init__(self) -> None:
        self._fd = sys.stdin.fileno()
        self._was_terminal = self.is_terminal
        self._held = bytearray()
        self._is_over = False

    @property
    def is_terminal(self) -> bool:
        return os.isatty(self._fd)

    async def next(self) -> str | None:
        """Return the next line without its end; None behind the last one."""
        while True:
            line, end, rest = self._held.partition(b"\n")
            if end or (self._is_over and line) or len(line) > LINE_BYTES_MAX:
                self._held = rest
                return line.decode(errors="replace").rstrip("\r")
            if self._is_over:
                return None
            more = await self._read()
            self._is_over = not more
            self._held += more

    async def _read(self) -> bytes:
        try:
            await trio.lowlevel.wait_readable(self._fd)
        except PermissionError:  # a file, which never makes one wait
            await trio.lowlevel.checkpoint()
        try:
            return os.read(self._fd, _PIECE_BYTES)
        except OSError as error:
            if error.errno in GONE and self._was_terminal:
                return b""
            raise
