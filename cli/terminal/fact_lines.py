"""Lines of a label and its facts. A fact for which a line has no room is left out, but never the first one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Final

from rich.console import Console, ConsoleOptions
from rich.text import Text

Part = str | Text
Lines = Sequence[tuple[str, Sequence[Part]]]

_LABEL: Final = 9  # columns, with what separates it from the facts
_INDENT: Final = "  "
_GAP: Final = "   "
_BAR: Final = 20


class FactLines:
    """What `lines` returns, drawn. It is told whether the terminal has ASCII only."""

    def __init__(self, lines: Callable[[bool], Lines]) -> None:
        self._lines = lines

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        for label, parts in self._lines(options.ascii_only):
            yield _fitted(label, parts, options.max_width)


def bar(share: float, ascii_only: bool) -> Text:
    """Return a bar of which `share`, 0 to 1, is done."""
    done, rest = ("#", "-") if ascii_only else ("━", "─")
    filled = round(share * _BAR)
    return Text.assemble((done * filled, "green"), (rest * (_BAR - filled), "dim"))


def _fitted(label: str, parts: Sequence[Part], room: int) -> Text:
    line = Text(f"{_INDENT}{label:<{_LABEL}}", no_wrap=True, overflow="ellipsis")
    for number, part in enumerate(parts):
        more = Text.assemble(_GAP if number else "", part)
        if number and line.cell_len + more.cell_len > room:
            continue
        line.append_text(more)
    return line
