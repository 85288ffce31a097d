"""What a home keeps of a run whose peers do not answer, in lines that say how old each fact is."""

from __future__ import annotations

from typing import TYPE_CHECKING

from peer.figures import NOTHING, duration_text, held_out_text, number_text
from peer.plain_text import plain

if TYPE_CHECKING:
    from swarm.status.state import KeptHead, KeptHome

_MEMBERS_SHOWN = 16


def kept_lines(kept: KeptHome, now: float) -> list[str]:
    """Return the lines about `kept` at `now`, Unix time: what it is of, the last heads, the losses, the last events."""
    what = "run" if kept.kind == "run" else "served model"
    lines = [
        f"No peer answers. The home was last written {ago(kept.written_at, now)}"
        + (", and a process runs from it" if kept.in_use else "")
        + "; it keeps:",
        f"{plain(kept.name)}  {what} {kept.run_id}  {'open' if kept.open else 'by invitation'}",
    ]
    if kept.kind == "run":
        lines += _run_lines(kept, now)
    if kept.log:
        lines.append("last events of its peer:")
        lines += [f"  {ago(line.at, now):>12}  {plain(line.text, 160)}" for line in kept.log]
    return lines


def _run_lines(kept: KeptHome, now: float) -> list[str]:
    of = f" of {kept.rounds}" if kept.rounds else ""
    done = ", the last one" if kept.rounds and kept.round == kept.rounds else ""
    lines = [] if kept.round is None else [f"round {kept.round}{of} is committed{done}"]
    if not kept.heads:
        lines.append(
            "no head: its peer has proved no commit" if kept.round is None else "its peer's own round: no head"
        )
    for head in kept.heads:
        stage = f" of stage {head.stage}" if len(kept.heads) > 1 or head.stage else ""
        lines.append(
            f"last head{stage}: round {head.round}, {ago(head.at, now)}, hash {head.head[:8]},"
            f" state {head.state_hash[:8]}, {head.tokens / 1e6:.1f} M tokens"
        )
        lines.append(f"its members: {_members(kept, head)}")
    train = [point for point in kept.losses if point.train is not None][-1:]
    held_out = [point for point in kept.losses if point.held_out is not None][-1:]
    losses = [f"loss {number_text(point.train)} (round {point.round})" for point in train]
    losses += [f"held-out loss {held_out_text(point.held_out, point.round)}" for point in held_out]
    return [*lines, ", ".join(losses)] if losses else lines


def _members(kept: KeptHome, head: KeptHead) -> str:
    shown = [f"{plain(kept.names.get(peer, ''), 64)} {peer[-6:]}".strip() for peer in head.members[:_MEMBERS_SHOWN]]
    more = len(head.members) - len(shown)
    return ", ".join(shown) + (f" and {more} more" if more else "") if shown else NOTHING


def ago(at: float | None, now: float) -> str:
    """Return how long ago something was."""
    return "at an unknown time" if at is None else f"{duration_text(max(0.0, float(round(now - at))))} ago"
