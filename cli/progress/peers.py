"""Handlers of a peer's own events: phases, commits, losses, checkpoints and lost contacts."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Final

from cli.progress.facts import STARTING, CommitRow, ComputePhase, Fields, Row, Saved, finite
from cli.progress.micro_batch_audit import AuditEntry
from cli.progress.state import PEERS_MAX, ViewState
from cli.terminal.figures import number_text, several, size_text
from peer.corpus_facts import account_in
from peer.plain_text import plain
from swarm.rounds.trainers.trained_rounds import REMEDY
from swarm.run.owners_pause import PAUSED

_PHASES: Final = {"compute": "training", "submit": "submitting", "exchange": "exchanging", "vote": "voting"}
_ACCOUNT_CHARS_MAX: Final = 2048
_BETWEEN: Final = "waiting for the next round"


def _phase_entered(view: ViewState, row: Row, at: float, fields: Fields) -> None:
    phase = str(fields.get("phase", row.phase))
    row.phase = _PHASES.get(phase, phase)
    if "steps" in fields:
        last_rate = row.work.tokens_per_s if row.work is not None else 0.0
        row.work = ComputePhase(int(fields["step"]), int(fields["steps"]), at, tokens_per_s=last_rate)


def _inner_step(view: ViewState, row: Row, at: float, fields: Fields) -> None:
    row.loss, row.phase = finite(fields.get("loss")), "training"
    row.curve.add(row.loss)
    if row.work is not None:
        row.work.done, row.work.at = max(0, int(fields["step"]) - row.work.first + 1), at
        row.work.tokens_per_s = float(fields.get("tokens_per_s") or 0.0)


def _worker_ready(view: ViewState, row: Row, at: float, fields: Fields) -> None:
    """A worker has begun, the first one or one in the place of another; of several devices each has its own."""
    if not fields.get("device"):
        return  # it only reads text
    sequences, again = fields.get("sequences"), str(fields.get("recompute") or "none")
    parts = [str(fields["device"])]
    if memory := int(fields.get("memory_bytes") or 0):
        parts.append(f"{size_text(memory)} of memory")
    parts.append("bf16" if fields.get("bf16") else "fp32")
    parts += ["compiled"] * bool(fields.get("compiled"))
    if sequences is not None:
        parts.append(f"{several(int(sequences), 'sequence')} at a time")
    parts += ["blocks computed twice"] * (again != "none")
    if tuple(parts) != row.device:
        row.device = tuple(parts)
        view.note(f"{row.name} computes on {', '.join(parts)}")
    if row.phase == STARTING:
        row.phase = "waiting for peers"


def _peer_paused(view: ViewState, row: Row, at: float, fields: Fields) -> None:
    row.paused = True
    view.note(f"{row.name} is {PAUSED}: {fields['reason']}")


def _peer_resumed(view: ViewState, row: Row, at: float, fields: Fields) -> None:
    row.paused = False
    view.note(f"{row.name} goes on")


def _state_progress(view: ViewState, row: Row, at: float, fields: Fields) -> None:
    share = int(fields.get("done_bytes", 0)) / max(1, int(fields.get("size_bytes", 1)))
    row.phase = f"fetching state, {share:.0%}"


def _round_committed(view: ViewState, row: Row, at: float, fields: Fields) -> None:
    number = int(fields["round"])
    _position(view, row, at, fields)
    stage = fields.get("stage")
    newest = number > max((r for seen in view.commits.values() for r in seen), default=0)
    if stage is not None:
        newest = number > view.reached.get(stage, 0)
        view.reached[stage] = max(number, view.reached.get(stage, 0))
        _record_merged(view, stage, fields)
    commits = view.commits.setdefault(row.name, {})
    commits[number] = CommitRow(number, at, row.state_hash, fields)
    view.trim(commits)
    view.pace.note(number, at, int(fields.get("tokens") or 0))
    if newest:
        view.loss_curve.add(row.loss)
        of = "" if stage is None else f" of stage {stage}"
        members = several(row.members, "member")
        view.note(f"round {number}{of} committed by {members}{_learned(row, fields)}, state {row.state_hash[:8]}")


def _head_adopted(view: ViewState, row: Row, at: float, fields: Fields) -> None:
    if fields.get("stage") is not None:
        _record_merged(view, fields["stage"], fields)
    _position(view, row, at, fields)
    view.pace.note(row.round, at, int(fields.get("tokens") or 0), seen=not row.round)  # others may be further by now
    reached = f"caught up with round {row.round}" if row.round else "has the initial weights"
    view.note(f"{row.name} {reached}, state {row.state_hash[:8]}")


def _gossip_round(view: ViewState, row: Row, at: float, fields: Fields) -> None:
    """A round of a gossip run is this peer's own; other peers may be at other rounds."""
    _position(view, row, at, fields)
    partner, distance = str(fields.get("partner", "")), fields.get("distance")
    view.pace.note(row.round, at)
    met = f"met {view.name_of(partner)} for" if partner else "had no partner for"
    apart = "" if distance is None else f", {float(distance):.1%} apart"
    view.note(f"{row.name} {met} round {row.round}{apart}{_learned(row, fields)}")


def _round_discarded(view: ViewState, row: Row, at: float, fields: Fields) -> None:
    place, reason = (row.stage, int(fields.get("round", 0))), str(fields.get("reason", ""))
    if place not in view.discarded:
        view.discarded[place] = reason
        view.trim(view.discarded)
        row.phase = _BETWEEN
        of = "" if row.stage is None else f" of stage {row.stage}"
        view.note(f"round {place[1]}{of} discarded: {reason}")


def _corpus_read(view: ViewState, row: Row, at: float, fields: Fields) -> None:
    """Note it once: each new worker reads the same text again."""
    account = plain(account_in(fields), _ACCOUNT_CHARS_MAX)
    if account != row.corpus:
        row.corpus = account
        view.note(f"{row.name}: {account}")


def _val_evaluated(view: ViewState, row: Row, at: float, fields: Fields) -> None:
    number, row.val_loss = int(fields["round"]), finite(fields.get("loss"))
    row.val_round = number
    if row.val_loss is None:
        view.note(f"{row.name} measured a held-out loss of NaN or infinity after round {number}: {REMEDY}")
    view.val_losses.setdefault(number, math.nan if row.val_loss is None else row.val_loss)
    view.trim(view.val_losses)


def _numbers(view: ViewState, row: Row, at: float, fields: Fields) -> None:
    if "loss" in fields:
        row.loss = finite(fields.get("loss"))
    row.bytes_up = int(fields.get("bytes_up", row.bytes_up))
    row.bytes_down = int(fields.get("bytes_down", row.bytes_down))


def _problem(view: ViewState, row: Row, at: float, fields: Fields) -> None:
    view.note(f"{row.name}: {fields.get('reason') or fields.get('cause') or fields.get('error') or 'trouble'}")


def _steps_skipped(view: ViewState, row: Row, at: float, fields: Fields) -> None:
    row.useless_round = int(fields["round"])
    _problem(view, row, at, fields)


def _membership_stale(view: ViewState, row: Row, at: float, fields: Fields) -> None:
    """Note it once: on a bad network it happens over and over."""
    if not row.stale:
        row.stale = True
        _problem(view, row, at, fields)


def _records_unsaved(view: ViewState, row: Row, at: float, fields: Fields) -> None:
    """Note once why rounds stand still: it is tried again every second until the disk takes it."""
    if not row.unsaved:
        row.unsaved = True
        _problem(view, row, at, fields)


def _relay_failed(view: ViewState, row: Row, at: float, fields: Fields) -> None:
    """Note it once: a relay is asked again and again."""
    relay = str(fields["relay"])
    if row.relays.get(relay, True) and len(row.relays) < PEERS_MAX:
        row.relays[relay] = False
        view.note(f"{row.name} has no place at the relay {relay.partition('/p2p/')[0]}: {fields['reason']}")


def _relay_reserved(view: ViewState, row: Row, at: float, fields: Fields) -> None:
    relay = str(fields["relay"])
    if not row.relays.get(relay, False) and len(row.relays) < PEERS_MAX:
        row.relays[relay] = True
        view.note(f"{row.name} can be reached through the relay {relay.partition('/p2p/')[0]}")


def _port_mapped(view: ViewState, row: Row, at: float, fields: Fields) -> None:
    view.note(f"{row.name}: the router forwards {fields['address']} to this machine")


def _client_mode(view: ViewState, row: Row, at: float, fields: Fields) -> None:
    view.note(f"{row.name} cannot be dialled: it dials the others, and merges nothing")


def _client_mode_ended(view: ViewState, row: Row, at: float, fields: Fields) -> None:
    view.note(f"{row.name} can be dialled again")


def _peer_suspect(view: ViewState, row: Row, at: float, fields: Fields) -> None:
    peer = str(fields.get("peer", ""))
    if peer not in view.missed:
        view.missed.add(peer)
        while len(view.missed) > PEERS_MAX:
            view.missed.pop()
        view.note(f"{row.name} no longer hears {view.name_of(peer)}")


def _peer_recovered(view: ViewState, row: Row, at: float, fields: Fields) -> None:
    peer = str(fields.get("peer", ""))
    if peer in view.missed:
        view.missed.discard(peer)
        view.note(f"{row.name} hears {view.name_of(peer)} again")


def _member_joined(view: ViewState, row: Row, at: float, fields: Fields) -> None:
    peer = str(fields.get("peer", ""))
    view.names[peer] = str(fields.get("name", ""))
    if fields.get("role") in ("full", "stage") and len(view.here) < PEERS_MAX:
        view.here.add(peer)
        _note_those_here(view, row, f"{view.names[peer]} is here")
    while len(view.names) > PEERS_MAX:
        del view.names[next(iter(view.names))]


def _member_left(view: ViewState, row: Row, at: float, fields: Fields) -> None:
    peer = str(fields.get("peer", ""))
    if peer in view.here:
        view.here.discard(peer)
        _note_those_here(view, row, f"{view.name_of(peer)} is gone")


def _note_those_here(view: ViewState, row: Row, news: str) -> None:
    """Say how many of the peers that the first round needs are there, in the view of one process, until it begins."""
    begun = row.state_hash or any(group.members for group in view.groups.values())
    if view.min_peers and len(view.rows) == 1 and not begun:
        here, needed = len(view.here), view.min_peers
        view.note(f"{news}: {here} of {several(needed, 'peer')}" if here <= needed else f"{news}: {here} peers")


def _commit_served(view: ViewState, row: Row, at: float, fields: Fields) -> None:
    """Note it once: it happens with each round."""
    if not row.serves:
        row.serves = True
        view.note(f'{row.name} serves round {fields["round"]}, and later ones: `peer generate INVITE "..."` asks it')


def _commit_unserved(view: ViewState, row: Row, at: float, fields: Fields) -> None:
    view.note(f"{row.name} cannot serve round {fields['round']} ({fields['reason']}): it waits for the next one")


def _micro_batch_halved(view: ViewState, row: Row, at: float, fields: Fields) -> None:
    again = "" if fields["recompute"] == "none" else " and blocks computed twice"
    view.note(
        f"{row.name} had no memory left for a step: it goes on with {several(int(fields['sequences']), 'sequence')} at"
        f" a time{again}"
    )


def _run_finished(view: ViewState, row: Row, at: float, fields: Fields) -> None:
    row.phase = "finished"


def _checkpoint_saved(view: ViewState, row: Row, at: float, fields: Fields) -> None:
    path = str(fields["path"])
    if row.stage is None or f"stage-{row.stage}" in Path(path).parts:  # not a backup of another stage
        view.saved = Saved(int(fields["round"]), path, row.stage)


def _checkpoint_skipped(view: ViewState, row: Row, at: float, fields: Fields) -> None:
    view.note(f"{row.name} passes over the damaged checkpoint {fields['path']}: {fields['reason']}")


def _last_checkpoint_failed(view: ViewState, row: Row, at: float, fields: Fields) -> None:
    view.left_unsaved = True


def _position(view: ViewState, row: Row, at: float, fields: Fields) -> None:
    """Take in the round, state and members that a peer stands at."""
    row.round = int(fields["round"])
    row.unsaved, row.phase = False, _BETWEEN
    sent_before = row.bytes_up
    row.state_hash = str(fields.get("state_hash", ""))
    row.members = int(fields.get("members") or row.members)
    _numbers(view, row, at, fields)
    row.round_bytes_up = max(0, row.bytes_up - sent_before) if sent_before else 0
    if row.work is None or not row.work.tokens_per_s:  # no steps are told of: its rounds are short, or others'
        row.curve.add(row.loss)


def _learned(row: Row, fields: Fields) -> str:
    """Return what a round's event says of this peer's own steps, as the end of a sentence."""
    steps, skipped = fields.get("steps"), fields.get("skipped")
    lost = f" ({skipped} of {several(int(steps), 'step')} skipped)" if steps and skipped else ""
    return f", loss {number_text(row.loss)}{lost}"


def _record_merged(view: ViewState, stage: int, fields: Fields) -> None:
    """Keep what a commit of a stage has merged, for the report."""
    if view.keeps_all:
        merged = tuple(_ranges(text) for text in fields.get("counted") or ())
        view.audit_trail.commit(stage, AuditEntry(str(fields["head"]), str(fields["previous"]), merged))


def _ranges(text: str) -> tuple[tuple[int, int], ...]:
    """Parse "0-8,16-24" into half-open ranges."""
    pairs = (piece.split("-") for piece in text.split(",") if piece)
    return tuple((int(first), int(last)) for first, last in pairs)


PEER_EVENTS: Final[dict[str, Callable[[ViewState, Row, float, Fields], None]]] = {
    "phase_entered": _phase_entered,
    "inner_step": _inner_step,
    "peer_paused": _peer_paused,
    "peer_resumed": _peer_resumed,
    "state_progress": _state_progress,
    "contact_failed": _problem,
    "lan_unusable": _problem,
    "client_mode": _client_mode,
    "client_mode_ended": _client_mode_ended,
    "port_mapped": _port_mapped,
    "port_not_mapped": _problem,
    "relay_failed": _relay_failed,
    "relay_reserved": _relay_reserved,
    "text_missing": _problem,
    "tracking_failed": _problem,
    "corpus_read": _corpus_read,
    "membership_stale": _membership_stale,
    "round_committed": _round_committed,
    "round_discarded": _round_discarded,
    "steps_skipped": _steps_skipped,
    "head_adopted": _head_adopted,
    "gossip_met": _gossip_round,
    "gossip_alone": _gossip_round,
    "val_evaluated": _val_evaluated,
    "worker_died": _problem,
    "worker_failed": _problem,
    "checkpoint_failed": _problem,
    "records_unsaved": _records_unsaved,
    "state_at_risk": _problem,
    "last_checkpoint_failed": _last_checkpoint_failed,
    "checkpoint_saved": _checkpoint_saved,
    "checkpoint_skipped": _checkpoint_skipped,
    "worker_ready": _worker_ready,
    "peer_suspect": _peer_suspect,
    "peer_recovered": _peer_recovered,
    "member_joined": _member_joined,
    "member_left": _member_left,
    "commit_served": _commit_served,
    "commit_unserved": _commit_unserved,
    "micro_batch_halved": _micro_batch_halved,
    "run_finished": _run_finished,
    "bug": _problem,
}
