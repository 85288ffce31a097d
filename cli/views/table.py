"""The live table in a terminal: one line a peer (for the coordinator: one line a group), and the last notes below."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from rich.box import HEAVY_HEAD, SIMPLE_HEAD
from rich.console import Group, JustifyMethod, RenderableType
from rich.table import Table
from rich.text import Text

from cli.progress.live_peer import LivePeer
from cli.progress.state import ViewState
from cli.views.card import peer_card, run_card
from peer.figures import NOTHING, held_out_text, number_text, size_text
from swarm.status.state import StageState

_WHOLE: Final = ("peer", "round", "members", "phase", "loss", "held out", "up", "down", "state")
_PIPELINE: Final = ("peer", "stage", "round", "batch/s", "queue", "phase", "loss", "held out")  # 80 columns wide
_LEFT: Final = ("peer", "phase", "state")
_WRAPPED: Final = ("peer", "phase")
_LEAST: Final = {
    "peer": 4, "phase": 9, "state": 8, "round": 5, "members": 7, "loss": 5, "held out": 8, "up": 8, "down": 8,
    "stage": 5, "batch/s": 7, "queue": 5,
}  # fmt: skip
"""Columns of the terminal that a cell needs."""
_FIRST_TO_GO: Final = ("down", "up", "state", "queue", "batch/s", "members", "held out", "loss", "stage")
"""What a narrow terminal does not show. Peer, round and phase always stay."""
_LONGEST_NAME: Final = 14
_BESIDE: Final = 3  # a rule, and a space on either side of the text


def live_view(view: ViewState, width: int) -> RenderableType:
    """Return the table for a terminal of `width` columns, the pinned line above it and the notes below."""
    shown = list(view.peers.values())
    if len(shown) == 1 and (shown[0].claims.role != "coordinator" or view.groups.keys() <= {None}):
        table: RenderableType = peer_card(view, shown[0])
    else:
        peers = [peer for peer in shown if peer.claims.role != "coordinator"]
        several = _peers(view.title, peers, width) if peers else _groups(view) if view.groups else Text(view.title)
        table = Group(several, run_card(view))
    pinned = [Text(view.pinned)] if view.pinned else []  # on top: a terminal that is too low cuts the end
    return Group(*pinned, table, *(Text(note, style="dim") for note in view.notes))


def _peers(title: str, peers: Sequence[LivePeer], width: int) -> Table:
    """Return a table with one line a peer, and as many columns as `width` has room for."""
    pipelined = any(peer.pipelined for peer in peers)
    named = min(_LONGEST_NAME, max(len(peer.name) for peer in peers))
    held_out = max(len(_cells(peer)["held out"]) for peer in peers)
    least = {**_LEAST, "peer": max(_LEAST["peer"], named), "held out": max(_LEAST["held out"], held_out)}
    columns = fitting(_PIPELINE if pipelined else _WHOLE, least, width)
    table = Table(title=title, title_justify="left", expand=False, box=SIMPLE_HEAD if pipelined else HEAVY_HEAD)
    for column in columns:
        wraps = column in _WRAPPED
        justify: JustifyMethod = "left" if column in _LEFT else "right"
        table.add_column(column, justify=justify, no_wrap=not wraps, min_width=least[column] if wraps else None)
    for peer in peers:
        cells = _cells(peer)
        table.add_row(*(cells[column] for column in columns), style="red" if peer.gone else "")
    return table


def fitting(
    columns: Sequence[str],
    least: Mapping[str, int],
    width: int,
    first_to_go: Sequence[str] = _FIRST_TO_GO,
    gap: int = _BESIDE,
) -> list[str]:
    """Return the columns that a terminal of `width` shows whole, `gap` apart, those that are `first_to_go` left out."""
    kept = list(columns)
    for column in first_to_go:
        if sum(least[name] + gap for name in kept) + 1 <= width:
            break
        if column in kept:
            kept.remove(column)
    return kept


def _groups(view: ViewState) -> Table:
    """Return a table with one line a group."""
    staged = any(stage is not None for stage in view.groups)
    columns = ("stage", "round", "members", "phase") if staged else _WHOLE[1:4]
    table = Table(title=view.title, title_justify="left", expand=False, box=SIMPLE_HEAD)
    for column in columns:
        table.add_column(column, justify="left" if column in _LEFT else "right")
    for group in sorted(view.groups.values(), key=lambda group: group.stage):
        cells = _group_cells(group)
        table.add_row(*(cells[column] for column in columns))
    return table


def _cells(peer: LivePeer) -> dict[str, str]:
    """Return the text of each column."""
    says = peer.claims
    at_stage, speed = says.stage is not None, says.speed or 0.0
    return {
        "peer": peer.name,
        "stage": str(says.stage) if at_stage else NOTHING,
        "batch/s": f"{speed:.1f}" if at_stage or says.role == "feeder" else NOTHING,
        "queue": f"{says.queue or 0:.0f}" if at_stage else NOTHING,
        "round": str(peer.round) if peer.round or says.state_hash else NOTHING,  # round 0 counts
        "members": str(peer.members or ""),
        "phase": peer.gone or _phase(peer),
        "loss": number_text(says.loss),
        "held out": held_out_text(says.val_loss, says.val_round),
        "up": size_text(says.bytes_up),
        "down": size_text(says.bytes_down),
        "state": says.state_hash[:8],
    }


def _phase(peer: LivePeer) -> str:
    work = peer.work
    if work is None or not work.steps or peer.doing != "training":
        return peer.doing
    return f"step {work.done}/{work.steps}"


def _group_cells(group: StageState) -> dict[str, str]:
    facts = group.facts
    return {
        "stage": str(group.stage),
        "round": str(facts.round if facts else 0),
        "members": str(facts.members if facts else 0),
        "phase": group.claims.phase,
    }
