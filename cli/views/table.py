"""The live table in a terminal: one line a peer (for the coordinator: one line a group), and the last notes below."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from rich.console import Group, RenderableType
from rich.text import Text

from cli.progress.live_peer import LivePeer
from cli.progress.state import ViewState
from cli.views.card import peer_card, run_card
from cli.views.columns import table_lines
from cli.views.members import member_cells
from peer.figures import NOTHING, held_out_text
from swarm.status.state import StageState

_PHASE_MOST: Final = 28
"""Columns of a phase that are kept before those of other cells."""


def live_view(view: ViewState, width: int) -> RenderableType:
    """Return the table for a terminal of `width` columns, the pinned line above it and the notes below."""
    shown = list(view.peers.values())
    if len(shown) == 1 and (shown[0].claims.role != "coordinator" or view.groups.keys() <= {None}):
        table: RenderableType = peer_card(view, shown[0])
    else:
        peers = [(_cells(peer), "red" if peer.gone else "") for peer in shown if peer.claims.role != "coordinator"]
        groups = sorted(view.groups.items(), key=lambda item: item[1].stage)
        rows = peers or [(_group_cells(stage, group), "") for stage, group in groups]
        table = Group(Text(view.title, style="italic"), Text(), *_lines(rows, width), Text(), run_card(view))
    pinned = [Text(view.pinned)] if view.pinned else []  # on top: a terminal that is too low cuts the end
    return Group(*pinned, table, *(Text(note, style="dim") for note in view.notes))


def _lines(rows: Sequence[tuple[dict[str, str], str]], width: int) -> list[Text]:
    longest = max((len(cells["phase"]) for cells, _ in rows), default=0)
    lines = table_lines(rows, width, min(_PHASE_MOST, longest))
    for line in lines:
        line.no_wrap, line.overflow = True, "ellipsis"
    return lines


def _cells(peer: LivePeer) -> dict[str, str]:
    """Return the cells of a peer, with its local steps as its phase."""
    says, work = peer.claims, peer.work
    in_steps = work is not None and work.size and peer.doing == "training"
    cells = member_cells(peer.member)
    return {
        "peer": cells["peer"],
        **{name: cells[name] for name in ("stage", "round")},
        "members": str(peer.members or ""),
        **{name: cells[name] for name in ("speed", "queue", "loss")},
        "held out": held_out_text(says.val_loss, says.val_round),
        "up": cells["up"] if says.bytes_up else NOTHING,
        "down": cells["down"] if says.bytes_down else NOTHING,
        "state": cells["state"],
        "phase": peer.gone or (f"step {work.done}/{work.size}" if work and in_steps else peer.doing),
    }


def _group_cells(stage: int | None, group: StageState) -> dict[str, str]:
    facts = group.facts
    return {
        "stage": "" if stage is None else str(stage),
        "round": str(facts.round if facts else 0),
        "members": str(facts.members if facts else 0),
        "phase": group.claims.phase,
    }
