"""One cell of the availability table: what all its schedules came to, summed, so that later runs can add to it."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, Final

from benchmarks.agreement.availability_model import MODEL, Modelled

ROUND_S: Final = 10.0
DAY_S: Final = 86400.0
SOON_S: Final = 600.0
LATE_S: Final = 7200.0
SHOWN: Final = 0.1  # points that are taken back, at least
SOON_MAX: Final = 4  # members of the groups of which it is also measured what the operator does soon
Cell = dict[str, Any]
Key = tuple[str, int, float, float, float]


def keys(members: Iterable[int]) -> list[Key]:
    """Return (mode, members, share of time that the coordinator is away, share of disks lost, seconds until the
    operator acts) of each cell."""
    found: list[Key] = []
    for row in MODEL:
        if row.members in members:
            for mode, operator_s in (("witness", LATE_S), ("witness", SOON_S), ("required", LATE_S)):
                if operator_s == LATE_S or row.members <= SOON_MAX:
                    found.append((mode, row.members, row.down, row.lost, operator_s))
    return sorted(found, key=lambda key: key[1])


def key_of(cell: Cell) -> Key:
    return cell["mode"], cell["members"], cell["down"], cell["lost"], cell["operator_s"]


def empty(key: Key) -> Cell:
    """Return a cell without a schedule."""
    sums = ("seconds", "windows", "committed", "squares", "kept", "starts", "undoing", "calls", "untold", "lost_runs")
    return {
        **dict(zip(("mode", "members", "down", "lost", "operator_s"), key, strict=True)),
        "seeds": 0,
        **dict.fromkeys(sums, 0),
        "longest_s": 0.0,
    }


def progress(cell: Cell) -> float:
    """Return the percentage of the time that made progress: committed rounds x 10 s / time."""
    return float(100 * ROUND_S * cell["committed"] / cell["seconds"])


def kept(cell: Cell) -> float:
    """Return the same of those rounds that are in the history at the end."""
    return float(100 * ROUND_S * cell["kept"] / cell["seconds"])


def error(cell: Cell) -> float:
    """Return the standard error of `progress`, from how much the windows differ; infinite if there is only one."""
    windows = cell["windows"]
    if windows < 2:
        return math.inf
    mean = cell["committed"] / windows
    variance = max(0.0, cell["squares"] / windows - mean * mean) * windows / (windows - 1)
    return float(100 * ROUND_S * math.sqrt(variance / windows) * windows / cell["seconds"])


def a_day(cell: Cell, what: str) -> float:
    return float(cell[what] * DAY_S / cell["seconds"])


HEAD: Final = (
    "disks lost",
    "W down",
    "n",
    "witness, operator 2 h",
    "model",
    "operator 10 min",
    "model",
    "required",
    "model 10 / 30 s",
    "starts a day (undoing)",
    "model",
    "runs lost a day",
)


def rows(cells: list[Cell]) -> list[list[str]]:
    """Return the lines of the table, as far as the cells have been measured, beside the model's."""
    found = {key_of(cell): cell for cell in cells if cell["seconds"]}
    lines = []
    for row in MODEL:
        place = (row.members, row.down, row.lost)
        witness, soon, required = (
            found.get((mode, *place, operator_s))
            for mode, operator_s in (("witness", LATE_S), ("witness", SOON_S), ("required", LATE_S))
        )
        if witness or soon or required:
            lines.append(_line(row, witness, soon, required))
    return lines


def _line(row: Modelled, witness: Cell | None, soon: Cell | None, required: Cell | None) -> list[str]:
    return [
        f"{row.lost:.0%}",
        f"{100 * row.down:g}%",
        str(row.members),
        _shown(witness),
        f"{row.witness:.1f}",
        _shown(soon),
        "" if row.witness_soon is None else f"{row.witness_soon:.1f}",
        _shown(required),
        f"{row.required:.1f} / {row.required_30:.1f}",
        f"{a_day(required, 'starts'):.0f} ({a_day(required, 'undoing'):.1f})" if required else "",
        f"{row.starts:.0f} ({row.undoing:.1f})",
        " / ".join(f"{a_day(cell, 'lost_runs'):.1f}" for cell in (witness, soon, required) if cell),
    ]


def _shown(cell: Cell | None) -> str:
    """Return progress, its standard error, and what of it stays if that is less.

    A round that was chosen and committed by nobody before a new term takes it up only counts as one that stays."""
    if cell is None:
        return ""
    spread = error(cell)
    text = f"{progress(cell):.1f}" + (f" ±{spread:.1f}" if math.isfinite(spread) else "")
    return text if progress(cell) - kept(cell) < SHOWN else f"{text}, {kept(cell):.1f} stay"
