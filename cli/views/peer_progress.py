"""Handlers of a peer's own events: phases, commits, losses, checkpoints and lost contacts."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Final

from cli.views.facts import CommitRow, Fields, Row, Saved
from cli.views.micro_batch_audit import AuditEntry
from cli.views.state import PEERS_MAX, ViewState
from cli.views.text import number_text, several
from swarm.rounds.trainers.trained_rounds import REMEDY


def _phase_entered(view: ViewState, row: Row, at: float, fields: Fields) -> None:
    row.phase = str(fields.get("phase", row.phase))


def _inner_step(view: ViewState, row: Row, at: float, fields: Fields) -> None:
    row.phase = f"step {fields.get('step')}"
    row.loss = _loss_in(fields)


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
    if newest:
        of = "" if stage is None else f" of stage {stage}"
        members = several(row.members, "member")
        view.note(f"round {number}{of} committed by {members}{_learned(row, fields)}, state {row.state_hash[:8]}")


def _head_adopted(view: ViewState, row: Row, at: float, fields: Fields) -> None:
    if fields.get("stage") is not None:
        _record_merged(view, fields["stage"], fields)
    _position(view, row, at, fields)
    reached = f"caught up with round {row.round}" if row.round else "has the initial weights"
    view.note(f"{row.name} {reached}, state {row.state_hash[:8]}")


def _gossip_round(view: ViewState, row: Row, at: float, fields: Fields) -> None:
    """A round of a gossip run is this peer's own; other peers may be at other rounds."""
    _position(view, row, at, fields)
    partner, distance = str(fields.get("partner", "")), fields.get("distance")
    met = f"met {view.name_of(partner)} for" if partner else "had no partner for"
    apart = "" if distance is None else f", {float(distance):.1%} apart"
    view.note(f"{row.name} {met} round {row.round}{apart}{_learned(row, fields)}")


def _round_discarded(view: ViewState, row: Row, at: float, fields: Fields) -> None:
    place, reason = (row.stage, int(fields.get("round", 0))), str(fields.get("reason", ""))
    if place not in view.discarded:
        view.discarded[place] = reason
        view.trim(view.discarded)
        of = "" if row.stage is None else f" of stage {row.stage}"
        view.note(f"round {place[1]}{of} discarded: {reason}")


def _corpus_read(view: ViewState, row: Row, at: float, fields: Fields) -> None:
    """Note it once: each new worker reads the same text again."""
    account = str(fields.get("account", ""))
    if account != row.corpus:
        row.corpus = account
        view.note(f"{row.name}: {account}")


def _val_evaluated(view: ViewState, row: Row, at: float, fields: Fields) -> None:
    number, row.val_loss = int(fields["round"]), _loss_in(fields)
    if row.val_loss is None:
        view.note(f"{row.name} measured a held-out loss of NaN or infinity after round {number}: {REMEDY}")
    view.val_losses.setdefault(number, math.nan if row.val_loss is None else row.val_loss)
    view.trim(view.val_losses)


def _numbers(view: ViewState, row: Row, at: float, fields: Fields) -> None:
    if "loss" in fields:
        row.loss = _loss_in(fields)
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
    view.names[str(fields.get("peer", ""))] = str(fields.get("name", ""))
    while len(view.names) > PEERS_MAX:
        del view.names[next(iter(view.names))]


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


def _last_checkpoint_failed(view: ViewState, row: Row, at: float, fields: Fields) -> None:
    view.left_unsaved = True


def _position(view: ViewState, row: Row, at: float, fields: Fields) -> None:
    """Take in the round, state and members that a peer stands at."""
    row.round = int(fields["round"])
    row.unsaved = False
    row.state_hash = str(fields.get("state_hash", ""))
    row.members = int(fields.get("members") or row.members)
    _numbers(view, row, at, fields)


def _loss_in(fields: Fields) -> float | None:
    """Return the event's loss; None for one that is no number: the log has null for NaN."""
    loss = fields.get("loss")
    return float(loss) if isinstance(loss, int | float) and math.isfinite(loss) else None


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
    "state_progress": _state_progress,
    "contact_failed": _problem,
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
    "progress": _numbers,
    "majority_lost": _problem,
    "worker_died": _problem,
    "worker_failed": _problem,
    "checkpoint_failed": _problem,
    "records_unsaved": _records_unsaved,
    "state_at_risk": _problem,
    "last_checkpoint_failed": _last_checkpoint_failed,
    "checkpoint_saved": _checkpoint_saved,
    "peer_suspect": _peer_suspect,
    "peer_recovered": _peer_recovered,
    "member_joined": _member_joined,
    "commit_served": _commit_served,
    "commit_unserved": _commit_unserved,
    "micro_batch_halved": _micro_batch_halved,
    "run_finished": _run_finished,
    "bug": _problem,
}
