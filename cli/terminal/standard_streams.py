"""The three standard streams of this process, made such that what is said can always be written.

A terminal may go away under a peer that stays: its window is closed, its ssh connection lost. Later output then
goes nowhere, for this process and its children. Letters that an encoding lacks are written as escapes. So
no writer of this program has to ask for either.
"""

from __future__ import annotations

import errno
import io
import os
import select
import sys
from typing import Any, Final, TextIO

GONE: Final = (errno.EIO, errno.ENXIO, errno.ENODEV)
"""How a terminal that is no more answers to a write or a read."""
_MODES: Final = (("stdin", os.O_RDONLY), ("stdout", os.O_WRONLY), ("stderr", os.O_WRONLY))
_lost: set[int] = set()
"""The descriptors whose terminal has gone away."""


class _Outlet(io.FileIO):
    """The descriptor of standard output or standard error."""

    def __init__(self, fd: int) -> None:
        super().__init__(fd, "wb", closefd=False)
        self._is_terminal = os.isatty(fd)

    def write(self, data: Any) -> int:
        while True:
            try:
                written: int | None = super().write(data)
            except OSError as error:
                if not (self._is_terminal and error.errno in GONE):
                    raise
                self._lead_nowhere()
                return len(data)
            if written is not None:
                return written
            select.select([], [self.fileno()], [])  # another program has made it non-blocking, and it is full

    def _lead_nowhere(self) -> None:
        _lost.add(self.fileno())
        self._is_terminal = False
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self.fileno())
        os.close(nowhere)


def open_standard_streams() -> None:
    """Put such streams in the place of those that Python has opened. A stream that another program has closed, or
    replaced as tests do, leads nowhere or stays."""
    for fd, (name, mode) in enumerate(_MODES):
        try:
            os.fstat(fd)
        except OSError:  # else the next file that is opened would be taken for it
            os.set_inheritable(os.open(os.devnull, mode), True)
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "r" if mode == os.O_RDONLY else "w"))  # noqa: SIM115  it stays
        elif mode == os.O_WRONLY and stream is getattr(sys, f"__{name}__"):
            setattr(sys, name, _lasting(stream))


def _lasting(stream: io.TextIOWrapper) -> io.TextIOWrapper:
    return io.TextIOWrapper(
        io.BufferedWriter(_Outlet(stream.fileno())),
        encoding=stream.encoding,
        errors="backslashreplace",
        line_buffering=stream.line_buffering or stream.write_through,
    )


def write(text: str, err: bool = False) -> None:
    """Write to standard output or standard error at once."""
    stream: TextIO = sys.stderr if err else sys.stdout
    stream = getattr(stream, "rich_proxied_file", stream)  # a live view takes what libraries print
    stream.write(text)
    stream.flush()


def flush_output() -> None:
    """Write what libraries have left in standard output. Raises OSError."""
    sys.stdout.flush()


def is_watched() -> bool:
    """Whether standard output still leads somewhere; False once its terminal has gone away."""
    return sys.__stdout__ is None or sys.__stdout__.fileno() not in _lost
