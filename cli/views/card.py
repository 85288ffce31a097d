"""What one process says of its part in a run: what it does or waits for, how long that takes and how well it goes."""

from __future__ import annotations

import math
from typing import Final

from rich.console import Group, RenderableType
from rich.text import Text

from cli.progress.facts import GroupRow, Row
from cli.progress.state import ViewState
from cli.terminal.fact_lines import FactLines, Part, bar
from cli.terminal.figures import NOTHING, duration_text, held_out_text, number_text, several, size_text

_SPARK: Final = 24


def peer_card(view: ViewState, row: Row) -> RenderableType:
    """Return the lines of one peer, or of a coordinator with one group."""
    lines = FactLines(lambda ascii_only: card_lines(view, row, view.now(), ascii_only))
    return Group(Text(view.title, style="italic"), Text(), lines, *([Text()] if view.notes else []))


def run_card(view: ViewState) -> RenderableType:
    """Return the lines of the run as a whole, below a table of its peers or groups."""
    lines = FactLines(lambda ascii_only: run_lines(view, view.now(), ascii_only))
    return Group(lines, *([Text()] if view.notes and run_lines(view, view.now()) else []))


def run_lines(view: ViewState, now: float, ascii_only: bool = False) -> list[tuple[str, list[Part]]]:
    losses = [row.loss for row in view.rows.values() if row.loss is not None]
    curve = view.loss_curve.drawn(0 if ascii_only else _SPARK)
    lines: list[tuple[str, list[Part]]] = []
    if pace := _pace(view, now):
        lines.append(("run", [_rounds(view, view.round), *pace]))
    if curve and losses:
        lines.append(("loss", [number_text(sum(losses) / len(losses)), curve, *_held_out(view)]))
    return lines


def card_lines(view: ViewState, row: Row, now: float, ascii_only: bool = False) -> list[tuple[str, list[Part]]]:
    """Return the labels and facts of one peer or coordinator, the most important of each line first."""
    group = view.groups.get(None) if row.role == "coordinator" else None
    number = group.round if group is not None else row.round
    known = bool(number or row.state_hash or (group is not None and group.members))
    lines: list[tuple[str, list[Part]]] = [("now", _now(view, row, group, now, ascii_only))]
    if row.stage is not None:
        lines.append(("stage", [str(row.stage), f"{row.rate:.1f} micro-batches/s", f"{row.queue:.0f} waiting"]))
    elif row.role == "feeder":
        lines.append(("text", [f"{row.rate:.1f} micro-batches/s"]))
    if known:
        members = group.members if group is not None else row.members
        there = [several(members, "member")] * bool(members)
        lines.append(("round", [_rounds(view, number), *_pace(view, now), *there]))
    if row.loss is not None or row.val_loss is not None:
        curve = row.curve.drawn(0 if ascii_only else _SPARK)
        lines.append(("loss", [number_text(row.loss), *([curve] * bool(curve)), *_held_out(view, row)]))
    if speed := _speed(view, row):
        lines.append(("speed", speed))
    if row.device:
        lines.append(("device", list(row.device)))
    if row.bytes_up or row.bytes_down:
        lines.append(("traffic", _traffic(row)))
    if row.state_hash:
        lines.append(("state", [row.state_hash[:8]]))
    return lines


def _now(view: ViewState, row: Row, group: GroupRow | None, now: float, ascii_only: bool) -> list[Part]:
    """Return what the process does or waits for."""
    if group is not None:
        if group.phase == "waiting for peers":
            return [_waiting(view)]
        round_s, elapsed_s = view.pace.round_s, view.pace.elapsed_s(now)
        if group.phase != "training" or not round_s or elapsed_s is None:
            return [group.phase]
        done = bar(min(1.0, elapsed_s / round_s), ascii_only)
        return [group.phase, done, f"{duration_text(elapsed_s)} of about {duration_text(round_s)}"]
    if row.gone:
        return [row.gone]
    work = row.work
    if work is not None and work.steps and row.doing == "training":
        left_s = work.left_s(now)
        left = [] if left_s is None else [f"{duration_text(left_s)} left"]
        return ["training", bar(work.share, ascii_only), f"step {work.done} of {work.steps}", *left]
    others = several(max(1, row.members - 1), "other member") if row.members > 1 else ""
    said = {
        "training": "training",
        "submitting": f"waiting for the updates of {others}" if others else "handing in the update",
        "exchanging": f"exchanging updates with {others}" if others else "merging the update",
        "voting": f"waiting for the votes of {others}" if others else "voting",
        "waiting for peers": _waiting(view),
    }
    return [said.get(row.doing, row.doing)]


def _waiting(view: ViewState) -> str:
    """Return what a peer or coordinator waits for before the first round that it sees."""
    if not view.min_peers:
        return "waiting for peers"
    if len(view.here) < view.min_peers:
        return f"waiting for peers: {len(view.here)} of {view.min_peers}"
    return f"waiting for the next term: {len(view.here)} of {several(view.min_peers, 'peer')} are here"


def _rounds(view: ViewState, number: int) -> str:
    return f"{number} of {view.rounds}" if view.rounds else str(number)


def _pace(view: ViewState, now: float) -> list[Part]:
    round_s, left_s = view.pace.round_s, view.pace.left_s(view.rounds, now)
    took: list[Part] = [] if round_s is None else [f"{duration_text(round_s)} a round"]
    return took if left_s is None else [*took, f"ends in about {duration_text(math.ceil(left_s))}"]


def _held_out(view: ViewState, row: Row | None = None) -> list[Part]:
    last = max(view.val_losses, default=-1)
    loss, measured = (row.val_loss, row.val_round) if row is not None else (view.val_losses.get(last), last)
    return [f"held out {held_out_text(loss, measured)}"] * (number_text(loss) != NOTHING)


def _speed(view: ViewState, row: Row) -> list[Part]:
    own, whole = row.work.tokens_per_s if row.work is not None else 0.0, view.pace.tokens_per_s
    parts: list[Part] = [f"{own:,.0f} tokens/s"] * bool(own)
    if whole is not None:
        parts.append(f"{whole:,.0f} {'by all members' if own else 'tokens/s by all members'}")
    return [*parts, f"{row.steps_per_s:.1f} steps/s"] if row.steps_per_s else parts


def _traffic(row: Row) -> list[Part]:
    sent: list[Part] = [f"{size_text(row.bytes_up)} sent", f"{size_text(row.bytes_down)} received"]
    return [*sent, f"{size_text(row.round_bytes_up)} sent a round"] if row.round_bytes_up else sent
