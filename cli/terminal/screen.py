"""Rich tables on a terminal, made of plain text: markup, emoji codes and control characters in a cell are shown, not
obeyed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Final

from rich.console import Console, ConsoleOptions, RenderableType
from rich.live import Live
from rich.segment import Segment

from cli.terminal.lines import through
from peer.plain_text import plain

_UNCUT: Final = 1 << 20  # rich wraps and crops
_PIPE_COLUMNS: Final = 100


class _PlainConsole(Console):
    """A console whose styles and cursor movements are its own, and whose text is plain."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(_plain_lines(segment.text), segment.style)

    def on_broken_pipe(self) -> None:
        raise  # the BrokenPipeError, which rich would make exit code 1


def screen(err: bool = False, width: int | None = None, wraps: bool = True) -> Console:
    """Return a console on standard output, or with `err` on standard error."""
    return _PlainConsole(stderr=err, width=width, markup=False, emoji=False, highlight=False, soft_wrap=not wraps)


def table_screen(columns: int = _PIPE_COLUMNS) -> Console:
    """Return a console on standard output: as wide as the terminal, or `columns` wide where there is none."""
    console = screen()
    return console if console.is_terminal else screen(width=max(columns, console.width))


@contextmanager
def live(renderable: RenderableType, on: Console) -> Iterator[Live]:
    """Show a display that is redrawn by `update` until the block ends. Lines of `say` are written above it, unbroken:
    who copies an invite from there gets it whole."""
    above = through(lambda text: on.print(text, soft_wrap=True))
    with Live(renderable, console=on, auto_refresh=False) as display, above:
        yield display


def _plain_lines(text: str) -> str:
    return "\n".join(plain(line, _UNCUT) for line in text.split("\n"))
