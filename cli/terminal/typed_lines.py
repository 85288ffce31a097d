"""Text that comes in on standard input: all of it, or line by line while other tasks run."""

from __future__ import annotations

import os
import sys
from typing import Final

import trio

from cli.terminal.standard_streams import GONE
from peer.errors import ConfigError

LINE_BYTES_MAX: Final = 1 << 20
INPUT_BYTES_MAX: Final = 16 << 20
_PIECE_BYTES: Final = 1 << 14


def decoded(data: bytes, what: str) -> str:
    """Return typed bytes as text. Raises ConfigError, which names them as `what`."""
    told = sys.stdin.encoding or "utf-8"
    encoding = "utf-8" if told.lower().replace("-", "") in ("ascii", "usascii", "ansi_x3.41968") else told
    try:
        return data.decode(encoding)
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{what} is no text in {encoding.upper()} (byte {error.start}): convert it, as by iconv, or set the"
            " terminal's encoding"
        ) from error


def whole_input() -> str:
    """Return what comes on standard input up to its end. Raises ConfigError if it is no text, or too long."""
    data = sys.stdin.buffer.read(INPUT_BYTES_MAX + 1)
    if len(data) > INPUT_BYTES_MAX:
        raise ConfigError(f"standard input has more than {INPUT_BYTES_MAX >> 20} MiB: give a shorter text")
    return decoded(data, "standard input").replace("\r\n", "\n").replace("\r", "\n")


class TypedLines:
    """Standard input, line by line: of a terminal, a pipe or a file."""

    def __init__(self) -> None:
        self._fd = sys.stdin.fileno()
        self.is_terminal = os.isatty(self._fd)
        self._held = bytearray()
        self._is_over = False

    async def next(self) -> str | None:
        """Return the next line without its end; None after the last one. Raises ConfigError for one that is no text,
        or too long; the next call continues after it."""
        skips = False
        while True:
            line, end, rest = self._held.partition(b"\n")
            skips = skips or len(line) > LINE_BYTES_MAX
            if end or (self._is_over and (line or skips)):
                self._held = rest
                if skips:
                    raise ConfigError(f"a line has more than {LINE_BYTES_MAX >> 20} MiB: break it into several")
                return decoded(bytes(line), "the line").rstrip("\r")
            if self._is_over:
                return None
            if skips:
                self._held.clear()
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
            if self.is_terminal and error.errno in GONE:
                return b""
            raise
