"""What the peers of a pipeline say besides: where each sits, how busy it is, who moves, who feeds whom."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from cli.views.facts import FeederRow, Fields, MoveRow, Row
from cli.views.micro_batch_audit import AuditTotals
from cli.views.table import plain, several

if TYPE_CHECKING:
    from cli.views.progress import Progress

FEEDING_EVERY_S: Final = 60.0  # a feeder has nothing else to say


def _seated(progress: Progress, row: Row, at: float, fields: Fields) -> None:
    stage = int(fields["stage"])
    if row.stage is None:  # a move is told by itself
        progress.note(f"{row.name} takes stage {stage}")
    row.stage, row.pipelined = stage, True
    row.rate, row.queue = 0.0, 0.0


def _load(progress: Progress, row: Row, at: float, fields: Fields) -> None:
    row.queue, row.rate = float(fields["queue"]), float(fields["rate"])
    row.phase = str(fields["phase"])


def _dispatched(progress: Progress, row: Row, at: float, fields: Fields) -> None:
    counters = {name: int(fields[name]) for name in ("dispatched", "completed", "retried", "abandoned")}
    progress.accounts.totals.setdefault(row.name, AuditTotals()).note(counters)


def _moving(progress: Progress, row: Row, at: float, fields: Fields) -> None:
    move = MoveRow(
        row.name, at, int(fields["source"]), int(fields["target"]), str(fields["reason"]), float(fields["gain"])
    )
    progress.keep_move(move)
    row.phase = f"moving to stage {move.target}"
    progress.note(f"{row.name} moves from stage {move.source} to {move.target}: {move.reason}")


def _moved(progress: Progress, row: Row, at: float, fields: Fields) -> None:
    progress.note(f"{row.name} is at work in stage {fields['target']} after {float(fields['seconds']):.0f} s")


def _missing(progress: Progress, row: Row, at: float, fields: Fields) -> None:
    stages = ", ".join(fields["stages"])
    progress.note(f"{row.name} waits for stage {stages}" if stages else f"{row.name} sees all stages served")


def _restored(progress: Progress, row: Row, at: float, fields: Fields) -> None:
    kept = f"round {fields['round']}, which {several(int(fields['donors']), 'peer')} kept"
    progress.note(f"{row.name} brings back stage {fields['stage']} from {kept}")


def _refused(progress: Progress, row: Row, at: float, fields: Fields) -> None:
    """Of a synchronous batch no sample may be left out, so it is tried for ever."""
    samples = f"samples {int(fields['first'])} to {int(fields['last']) - 1}"
    why = plain(str(fields["reason"])).rstrip(".")
    if not fields["synchronous"]:
        progress.note(f"{row.name} puts off {samples}, which every replica refuses ({why})")
        return
    remedy = ": lower [inner] lr, or go on from an earlier checkpoint" if fields["cause"] == "not_finite" else ""
    progress.note(f"the batch cannot be completed while every replica refuses {samples} ({why}){remedy}")


def _fed(progress: Progress, row: Row, at: float, fields: Fields) -> None:
    """A feeder reads text: told as it begins, with each replica that asks for the first time, and once a minute."""
    peers, count, last = tuple(map(str, fields["peers"])), int(fields["micro_batches"]), row.fed
    row.role, row.phase, row.pipelined = "feeder", "waiting to be asked", True
    if last is None or count < last.micro_batches:  # of an earlier life
        progress.note(f"{row.name} feeds: it reads text for the replicas of the first stage and holds no weights")
        row.fed = FeederRow(at, count, peers, at)
        return
    if at - last.at >= 1.0:  # sooner is a new peer, not a rate
        row.rate = (count - last.micro_batches) / (at - last.at)
    row.phase = f"feeding {several(len(peers), 'peer')}" if peers else row.phase
    told_at = last.told_at
    if len(peers) > len(last.peers):
        names = ", ".join(progress.name_of(peer) for peer in peers[len(last.peers) :])
        progress.note(f"{row.name} feeds {names}")
    elif at - told_at >= FEEDING_EVERY_S:
        progress.note(f"{row.name} has read {count} micro-batches for {several(len(peers), 'peer')}")
        told_at = at
    row.fed = FeederRow(at, count, peers, told_at)


PIPELINED: Final[dict[str, Callable[[Progress, Row, float, Fields], None]]] = {
    "replica_opened": _seated,
    "stage_load": _load,
    "pipeline_progress": _dispatched,
    "pipeline_refused": _refused,
    "move_started": _moving,
    "move_finished": _moved,
    "stages_missing": _missing,
    "stage_restored": _restored,
    "text_fed": _fed,
}
