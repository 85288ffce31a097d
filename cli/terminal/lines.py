"""Lines on standard output and standard error. Every command says what it says by `say` and `say_json`.

Each argument of `say` becomes exactly one line: text that another peer wrote can neither begin a line of its own nor be
obeyed by the terminal. While a live view is redrawn (`cli.terminal.screen.live`), lines go through it and stand above
it: a line written beside it would be drawn over.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, Final

from cli.terminal.standard_streams import write
from peer.plain_text import json_line, plain

LINE_MAX: Final = 1000
"""Characters of a line, in which several foreign sentences may stand."""
_UNCUT: Final = 1 << 20
_view: Callable[[str], None] | None = None
"""Writes a line above the live view; None while there is none."""


def say(*lines: str, err: bool = False, uncut: bool = False) -> None:
    """Write each argument as one plain line. `uncut` is for what this program has composed of its own words, such as
    an invite."""
    for line in lines:
        text = plain(line, _UNCUT if uncut else LINE_MAX)
        if _view is not None and (err or sys.stdout.isatty()):
            _view(text)
        else:
            write(f"{text}\n", err)


@contextmanager
def through(view: Callable[[str], None]) -> Iterator[None]:
    """Inside the block give to `view` the lines that would go to the terminal."""
    global _view
    _view = view
    try:
        yield
    finally:
        _view = None


def say_json(value: Mapping[str, Any], uncut: bool = False) -> None:
    """Write a line of ASCII JSON on standard output, with strings and lists cut unless `uncut`."""
    write(f"{json_line(value, None) if uncut else json_line(value)}\n")


def is_terminal() -> bool:
    """Whether a person sees both outputs. In a pipe nothing but errors goes to standard error."""
    return sys.stdout.isatty() and sys.stderr.isatty()


def say_traceback(error: BaseException | None) -> None:
    """Write a traceback on standard error."""
    if error is not None:
        say(*"".join(traceback.format_exception(error)).splitlines(), err=True)


@contextmanager
def plain_reports() -> Iterator[None]:
    """Inside the block send through `say` also what libraries log, and what Python reports of lost exceptions."""
    found = logging.lastResort, threading.excepthook, sys.unraisablehook
    logging.lastResort = _LogLines(logging.WARNING)
    threading.excepthook = lambda hook: say_traceback(hook.exc_value)
    sys.unraisablehook = lambda hook: say_traceback(hook.exc_value)
    try:
        yield
    finally:
        logging.lastResort, threading.excepthook, sys.unraisablehook = found


def close_output() -> None:
    """Write nothing more on standard output, whose reader has gone."""
    sys.stdout = open(os.devnull, "w")  # noqa: SIM115  the final flush needs an open file


class _LogLines(logging.Handler):
    """The handler of log records that no other handler takes."""

    def emit(self, record: logging.LogRecord) -> None:
        with suppress(OSError):  # standard error is gone
            say(record.getMessage(), err=True)
