"""What a terminal shows of a `Progress`: a line a peer or, where the coordinator looks on, a line a group; and below it
what happened last."""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Final

from rich.box import HEAVY_HEAD, SIMPLE_HEAD
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from cli.views.facts import GroupRow, Row

if TYPE_CHECKING:
    from cli.views.progress import Progress

_WHOLE: Final = ("peer", "round", "members", "phase", "loss", "held-out", "up", "down", "state")
_PIPELINE: Final = ("peer", "stage", "round", "mb/s", "queue", "phase", "loss", "held-out")  # 80 columns wide
_LEFT: Final = ("peer", "phase", "state")
NOTHING: Final = "-"  # what does not apply, or is not known yet


def live_view(progress: Progress) -> RenderableType:
    """The table and the notes below it."""
    peers = [row for row in progress.rows.values() if row.role != "coordinator"]
    table = _peers(progress.title, peers) if peers or not progress.groups else _groups(progress)
    return Group(table, *(Text(note, style="dim") for note in progress.notes))


def _peers(title: str, rows: Iterable[Row]) -> Table:
    """One line a peer."""
    rows = list(rows)
    pipelined = any(row.pipelined for row in rows)
    columns, box = (_PIPELINE, SIMPLE_HEAD) if pipelined else (_WHOLE, HEAVY_HEAD)
    table = Table(title=title, title_justify="left", expand=False, box=box)
    for column in columns:
        table.add_column(column, justify="left" if column in _LEFT else "right")
    for row in rows:
        cells = _cells(row)
        table.add_row(*(cells[column] for column in columns), style="red" if row.gone else "")
    return table


def _groups(progress: Progress) -> Table:
    """One line a group: the whole run, or a stage of a pipeline."""
    groups = sorted(progress.groups.values(), key=lambda group: -1 if group.stage is None else group.stage)
    columns = ("stage", "round", "members", "phase") if any(g.stage is not None for g in groups) else _WHOLE[1:4]
    table = Table(title=progress.title, title_justify="left", expand=False, box=SIMPLE_HEAD)
    for column in columns:
        table.add_column(column, justify="left" if column in _LEFT else "right")
    for group in groups:
        cells = _group_cells(group)
        table.add_row(*(cells[column] for column in columns))
    return table


def _cells(row: Row) -> dict[str, str]:
    """Each column's text."""
    known = row.round or row.state_hash  # round 0 is one, too
    at_stage = row.stage is not None
    return {
        "peer": row.name,
        "stage": str(row.stage) if at_stage else NOTHING,
        "mb/s": f"{row.rate:.1f}" if at_stage or row.role == "feeder" else NOTHING,
        "queue": f"{row.queue:.0f}" if at_stage else NOTHING,
        "round": str(row.round) if known else NOTHING,
        "members": str(row.members or ""),
        "phase": row.gone or row.phase,
        "loss": number_text(row.loss),
        "held-out": number_text(row.val_loss),
        "up": size_text(row.bytes_up),
        "down": size_text(row.bytes_down),
        "state": row.state_hash[:8],
    }


def _group_cells(group: GroupRow) -> dict[str, str]:
    return {
        "stage": NOTHING if group.stage is None else str(group.stage),
        "round": str(group.round),
        "members": str(group.members),
        "phase": group.phase,
    }


def size_text(size_bytes: float) -> str:
    """1536 -> "1.5 kB"."""
    for unit in ("B", "kB", "MB", "GB"):
        if size_bytes < 1000 or unit == "GB":
            return f"{size_bytes:.0f} {unit}" if unit == "B" else f"{size_bytes:.1f} {unit}"
        size_bytes /= 1000
    raise AssertionError("unreachable")


def several(count: int, what: str) -> str:
    """ "1 peer", "2 peers", "3 micro-batches"."""
    return f"{count} {what}{'' if count == 1 else 'es' if what.endswith('ch') else 's'}"


def quoted(path: Path) -> str:
    """As it is typed in a shell."""
    return shlex.quote(str(path))


def number_text(value: float | None) -> str:
    """A loss; nothing for None."""
    return "" if value is None else f"{value:.3f}"


def console() -> Console:
    """Where people look: standard error, so that standard output stays for what scripts read."""
    return Console(stderr=True)


def plain(text: str) -> str:
    """What somebody else wrote, without characters that a terminal obeys."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)
