"""Handlers of the events that only pipelines have: stages, load, moves, restored stages and feeders."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from cli.progress.facts import FeederRow, Fields, MoveRow, Row
from cli.progress.micro_batch_audit import AuditTotals
from cli.progress.state import ViewState
from cli.terminal.figures import several

FEEDING_EVERY_S: Final = 60.0  # a feeder has no other news


def _replica_opened(view: ViewState, row: Row, at: float, fields: Fields) -> None:
    stage = int(fields["stage"])
    if row.stage is None:  # a move has its own notes
        view.note(f"{row.name} takes stage {stage}")
    row.stage, row.pipelined = stage, True
    row.rate, row.queue = 0.0, 0.0


def _stage_load(view: ViewState, row: Row, at: float, fields: Fields) -> None:
    row.queue, row.rate = float(fields["queue"]), float(fields["rate"])
    row.phase = str(fields["phase"])


def _pipeline_progress(view: ViewState, row: Row, at: float, fields: Fields) -> None:
    counters = {name: int(fields[name]) for name in ("dispatched", "completed", "retried", "abandoned")}
    view.audit_trail.totals.setdefault(row.name, AuditTotals()).note(counters)


def _move_started(view: ViewState, row: Row, at: float, fields: Fields) -> None:
    move = MoveRow(
        row.name, at, int(fields["source"]), int(fields["target"]), str(fields["reason"]), float(fields["gain"])
    )
    view.keep_move(move)
    row.phase = f"moving to stage {move.target}"
    view.note(f"{row.name} moves from stage {move.source} to {move.target}: {move.reason}")


def _move_finished(view: ViewState, row: Row, at: float, fields: Fields) -> None:
    view.note(f"{row.name} works in stage {fields['target']} after {float(fields['seconds']):.0f} s")


def _stages_missing(view: ViewState, row: Row, at: float, fields: Fields) -> None:
    stages = [str(stage) for stage in fields["stages"]]
    missing = f"stage{'' if len(stages) == 1 else 's'} {', '.join(stages)}"
    view.note(f"{row.name} waits for {missing}" if stages else f"{row.name} sees all stages served")


def _stage_restored(view: ViewState, row: Row, at: float, fields: Fields) -> None:
    backup = f"round {fields['round']}, from the backups of {several(int(fields['donors']), 'peer')}"
    view.note(f"{row.name} restores stage {fields['stage']} at {backup}")


def _pipeline_refused(view: ViewState, row: Row, at: float, fields: Fields) -> None:
    """A synchronous batch needs every sample, so it is retried until the samples or the weights change."""
    samples = f"samples {int(fields['first'])} to {int(fields['last']) - 1}"
    reason = str(fields["reason"]).rstrip(".")
    remedy = ": lower [inner] lr, or continue from an earlier checkpoint" if fields["cause"] == "not_finite" else ""
    if not fields["synchronous"]:
        view.note(f"{row.name} puts off {samples}, which every replica refuses ({reason}){remedy}")
        return
    view.note(f"the batch cannot be completed while every replica refuses {samples} ({reason}){remedy}")


def _text_fed(view: ViewState, row: Row, at: float, fields: Fields) -> None:
    """Note a feeder's start, each new replica that asks for text, and a total once a minute."""
    peers, count, last = tuple(map(str, fields["peers"])), int(fields["micro_batches"]), row.fed
    row.role, row.phase, row.pipelined = "feeder", "waiting for requests", True
    if last is None or count < last.micro_batches:  # counters restart with the process
        view.note(f"{row.name} is a feeder: it reads text for the replicas of the first stage and holds no weights")
        row.fed = FeederRow(at, count, peers, at)
        return
    if at - last.at >= 1.0:  # an earlier event reports a new peer, not a rate
        row.rate = (count - last.micro_batches) / (at - last.at)
    row.phase = f"feeding {several(len(peers), 'peer')}" if peers else row.phase
    told_at = last.told_at
    if len(peers) > len(last.peers):
        names = ", ".join(view.name_of(peer) for peer in peers[len(last.peers) :])
        view.note(f"{row.name} feeds {names}")
    elif at - told_at >= FEEDING_EVERY_S:
        view.note(f"{row.name} has read {count} micro-batches for {several(len(peers), 'peer')}")
        told_at = at
    row.fed = FeederRow(at, count, peers, told_at)


PIPELINE_EVENTS: Final[dict[str, Callable[[ViewState, Row, float, Fields], None]]] = {
    "replica_opened": _replica_opened,
    "stage_load": _stage_load,
    "pipeline_progress": _pipeline_progress,
    "pipeline_refused": _pipeline_refused,
    "move_started": _move_started,
    "move_finished": _move_finished,
    "stages_missing": _stages_missing,
    "stage_restored": _stage_restored,
    "text_fed": _text_fed,
}
