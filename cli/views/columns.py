"""Lines of a table: a heading and a line for each row, with as many columns as a terminal shows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from rich.cells import cell_len
from rich.text import Text

from peer.figures import NOTHING

_LEFT: Final = ("peer", "id", "in", "state")
_FIRST_TO_GO: Final = (
    "state", "up", "down", "seen", "tokens", "waiting", "queue", "batch/s", "quorum", "id", "down/s", "up/s", "kv",
    "ms", "speed", "merged", "margin", "held out", "members", "loss", "pages", "in", "sessions", "blocks",
    "stage",
)  # fmt: skip
"""Columns that a narrow terminal omits."""
_PHASE_LEAST: Final = 9


def table_lines(rows: Sequence[tuple[dict[str, str], str]], width: int, phase_least: int = _PHASE_LEAST) -> list[Text]:
    """Return a heading and a line for each row of cells and its style, with as many columns as `width` shows, and none
    that is empty. The last column is the phase, which takes what is left, and `phase_least` columns at least."""
    if not rows:
        return []
    known = [name for name in rows[0][0] if any(cells[name] not in ("", NOTHING) for cells, _ in rows)]
    least = {name: max(cell_len(name), *(cell_len(cells[name]) for cells, _ in rows)) for name in known}
    shown = fitting(known, least | {"phase": phase_least}, width)
    lines = [({name: name for name in shown}, "bold"), *rows]
    return [Text(" ".join(_aligned(cells, name, least) for name in shown).rstrip(), style=s) for cells, s in lines]


def _aligned(cells: dict[str, str], name: str, least: dict[str, int]) -> str:
    if name == "phase":
        return cells[name]
    space = " " * (least[name] - cell_len(cells[name]))
    return cells[name] + space if name in _LEFT else space + cells[name]


def fitting(columns: Sequence[str], least: Mapping[str, int], width: int) -> list[str]:
    """Return the columns that a terminal of `width` shows whole, those of `_FIRST_TO_GO` left out."""
    kept = list(columns)
    for column in _FIRST_TO_GO:
        if sum(least[name] + 1 for name in kept) <= width:
            break
        if column in kept:
            kept.remove(column)
    return kept
