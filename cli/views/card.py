"""What one process says of its part in a run: what it does or waits for, how long that takes and how well it goes."""

from __future__ import annotations

import math
from typing import Final

from rich.console import Group, RenderableType
from rich.text import Text

from cli.progress.live_peer import LivePeer
from cli.progress.state import WAITING, ViewState
from cli.terminal.fact_lines import FactLines, Part, bar
from cli.views.data_set import own_parts
from peer.figures import NOTHING, duration_text, held_out_text, number_text, several, size_text
from swarm.status.state import StageState

_SPARK: Final = 24


def peer_card(view: ViewState, peer: LivePeer) -> RenderableType:
    """Return the lines of one peer, or of a coordinator with one group."""
    lines = FactLines(lambda ascii_only: card_lines(view, peer, view.now(), ascii_only))
    return Group(Text(view.title, style="italic"), Text(), lines, *([Text()] if view.notes else []))


def run_card(view: ViewState) -> RenderableType:
    """Return the lines of the run as a whole, below a table of its peers or groups."""
    lines = FactLines(lambda ascii_only: run_lines(view, view.now(), ascii_only))
    return Group(lines, *([Text()] if view.notes and run_lines(view, view.now()) else []))


def run_lines(view: ViewState, now: float, ascii_only: bool = False) -> list[tuple[str, list[Part]]]:
    losses = [peer.claims.loss for peer in view.peers.values() if peer.claims.loss is not None]
    curve = view.loss_curve.drawn(0 if ascii_only else _SPARK)
    lines: list[tuple[str, list[Part]]] = []
    if pace := _pace(view, now):
        lines.append(("run", [_rounds(view, view.round), *pace]))
    if curve and losses:
        lines.append(("loss", [number_text(sum(losses) / len(losses)), curve, *_held_out(view)]))
    return lines


def card_lines(view: ViewState, peer: LivePeer, now: float, ascii_only: bool = False) -> list[tuple[str, list[Part]]]:
    """Return the labels and facts of one peer or coordinator, the most important of each line first."""
    says, group = peer.claims, view.groups.get(None) if peer.claims.role == "coordinator" else None
    facts = None if group is None else group.facts
    number, members = (peer.round, peer.members) if facts is None else (facts.round, facts.members)
    speed = says.speed or 0.0
    lines: list[tuple[str, list[Part]]] = [("now", _now(view, peer, group, now, ascii_only))]
    if says.stage is not None:
        lines.append(("stage", [str(says.stage), f"{speed:.1f} micro-batches/s", f"{says.queue or 0:.0f} waiting"]))
    elif says.role == "feeder":
        lines.append(("text", [f"{speed:.1f} micro-batches/s"]))
    if number or says.state_hash or (facts is not None and members):
        there = [several(members, "member")] * bool(members)
        lines.append(("round", [_rounds(view, number), *_pace(view, now), *there]))
    if says.loss is not None or says.val_loss is not None:
        curve = peer.curve.drawn(0 if ascii_only else _SPARK)
        lines.append(("loss", [number_text(says.loss), *([curve] * bool(curve)), *_held_out(view, peer)]))
    if parts := own_parts(peer):
        lines.append(("data set", list(parts)))
    if paces := _speed(view, peer):
        lines.append(("speed", paces))
    if peer.device:
        lines.append(("device", list(peer.device)))
    if says.bytes_up or says.bytes_down:
        lines.append(("traffic", _traffic(peer)))
    if says.state_hash:
        lines.append(("state", [says.state_hash[:8]]))
    return lines


def _now(view: ViewState, peer: LivePeer, group: StageState | None, now: float, ascii_only: bool) -> list[Part]:
    """Return what the process does or waits for."""
    if group is not None:
        phase = group.claims.phase
        if phase == WAITING:
            return [_waiting(view)]
        round_s, elapsed_s = view.pace.round_s, view.pace.elapsed_s(now)
        if phase != "training" or not round_s or elapsed_s is None:
            return [phase]
        done = bar(min(1.0, elapsed_s / round_s), ascii_only)
        return [phase, done, f"{duration_text(elapsed_s)} of about {duration_text(round_s)}"]
    if peer.gone:
        return [peer.gone]
    work = peer.work
    if work is not None and work.size and peer.doing == "training":
        left_s = work.left_s(now)
        left = [] if left_s is None else [f"{duration_text(left_s)} left"]
        return ["training", bar(work.share, ascii_only), f"step {work.done} of {work.size}", *left]
    others = several(max(1, peer.members - 1), "other member") if peer.members > 1 else ""
    said = {
        "training": "training",
        "submitting": f"waiting for the updates of {others}" if others else "handing in the update",
        "exchanging": f"exchanging updates with {others}" if others else "merging the update",
        "voting": f"waiting for the votes of {others}" if others else "voting",
        WAITING: _waiting(view),
    }
    return [said.get(peer.doing, peer.doing)]


def _waiting(view: ViewState) -> str:
    """Return what a peer or coordinator waits for before the first round that it sees."""
    if not view.min_peers:
        return WAITING
    if len(view.here) < view.min_peers:
        return f"{WAITING}: {len(view.here)} of {view.min_peers}"
    return f"waiting for the next term: {len(view.here)} of {several(view.min_peers, 'peer')} are here"


def _rounds(view: ViewState, number: int) -> str:
    return f"{number} of {view.rounds}" if view.rounds else str(number)


def _pace(view: ViewState, now: float) -> list[Part]:
    round_s, left_s = view.pace.round_s, view.pace.left_s(view.rounds, now)
    took: list[Part] = [] if round_s is None else [f"{duration_text(round_s)} a round"]
    return took if left_s is None else [*took, f"ends in about {duration_text(math.ceil(left_s))}"]


def _held_out(view: ViewState, peer: LivePeer | None = None) -> list[Part]:
    last = max(view.val_losses, default=-1)
    loss, measured = (
        (peer.claims.val_loss, peer.claims.val_round) if peer is not None else (view.val_losses.get(last), last)
    )
    return [f"held out {held_out_text(loss, measured)}"] * (number_text(loss) != NOTHING)


def _speed(view: ViewState, peer: LivePeer) -> list[Part]:
    own, whole = peer.work.tokens_per_s if peer.work is not None else 0.0, view.pace.tokens_per_s
    parts: list[Part] = [f"{own:,.0f} tokens/s"] * bool(own)
    if whole is not None:
        parts.append(f"{whole:,.0f} {'by all members' if own else 'tokens/s by all members'}")
    steps_per_s = (peer.claims.speed or 0.0) if peer.claims.role == "coordinator" else 0.0  # of all that train
    return [*parts, f"{steps_per_s:.1f} steps/s"] if steps_per_s else parts


def _traffic(peer: LivePeer) -> list[Part]:
    sent: list[Part] = [f"{size_text(peer.claims.bytes_up)} sent", f"{size_text(peer.claims.bytes_down)} received"]
    return [*sent, f"{size_text(peer.round_bytes_up)} sent a round"] if peer.round_bytes_up else sent
