"""A bar on standard error for work of a known size: redrawn in a terminal, a line for each tenth elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from rich.console import Console, ConsoleOptions
from rich.text import Text

from cli.terminal.fact_lines import bar
from cli.terminal.lines import say
from cli.terminal.screen import live, screen
from peer.figures import duration_text, size_text

_STEPS: Final = 10
_REDRAWN_S: Final = 0.2


class WorkShown:
    """How far some work is: bytes that are done, of how many, and since when."""

    def __init__(self, label: str) -> None:
        self.done_bytes = self.of_bytes = 0
        self._label = label
        self._first: int | None = None
        self._began = time.monotonic()

    @property
    def share(self) -> float:
        return min(1.0, self.done_bytes / self.of_bytes) if self.of_bytes else 1.0

    def set(self, done_bytes: int, of_bytes: int) -> None:
        """Note the bytes done so far. The rate leaves out those of the first call: an earlier process did them."""
        self.done_bytes, self.of_bytes = done_bytes, of_bytes
        if self._first is None:
            self._first, self._began = done_bytes, time.monotonic()

    def text(self) -> str:
        """Return the share, the rate and the time that is left."""
        took_s = time.monotonic() - self._began
        here = self.done_bytes - (self._first or 0)
        facts = f"{self._label} {100 * self.share:3.0f} % of {size_text(self.of_bytes)}"
        if here <= 0 or took_s <= 0:
            return facts
        rate = here / took_s
        left = f", {duration_text(round((self.of_bytes - self.done_bytes) / rate))} left" if self.share < 1 else ""
        return f"{facts}, {size_text(rate)}/s{left}"

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        line = Text.assemble(bar(self.share, options.ascii_only), f" {self.text()}", no_wrap=True, overflow="ellipsis")
        yield line


@contextmanager
def work_bar(label: str) -> Iterator[Callable[[int, int], None]]:
    """Yield what takes the bytes that are done, and those of all; it may be called from any thread."""
    work, on = WorkShown(label), screen(err=True)
    if not on.is_terminal:
        said = -1

        def say_tenth(done_bytes: int, of_bytes: int) -> None:
            nonlocal said
            work.set(done_bytes, of_bytes)
            if (step := int(_STEPS * work.share)) > said:
                said = step
                say(work.text(), err=True)

        yield say_tenth
        return
    with live(work, on) as display:
        drawn = 0.0

        def draw(done_bytes: int, of_bytes: int) -> None:
            nonlocal drawn
            work.set(done_bytes, of_bytes)
            if time.monotonic() - drawn >= _REDRAWN_S or work.share == 1:
                drawn = time.monotonic()
                display.update(work, refresh=True)

        yield draw
