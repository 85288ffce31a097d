"""What the coordinator says of the run's groups: one, or one for each stage of a pipeline."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from cli.views.facts import Fields, GroupRow, Row
from cli.views.table import several

if TYPE_CHECKING:
    from cli.views.progress import Progress


def group_of(progress: Progress, fields: Fields) -> GroupRow:
    """The group that an event is about."""
    stage = fields.get("stage")
    return progress.groups.setdefault(stage, GroupRow(stage))


def _entered(progress: Progress, row: Row, at: float, fields: Fields) -> None:
    """Somebody is in touch with the run: a peer, or the coordinator itself."""
    stages, rounds = int(fields["stages"]), int(fields["rounds"])
    row.role, row.pipelined = str(fields["role"]), stages > 1
    if row.role == "coordinator":
        for stage in range(stages) if stages > 1 else (None,):
            progress.groups.setdefault(stage, GroupRow(stage))
    if len(progress.rows) == 1:
        cut = f"a model in {stages} stages, " if stages > 1 else ""
        until = f"{rounds} rounds" if rounds else "rounds without end"
        progress.note(f"{row.name} is in the run {fields['name']!r}: {cut}{until}")


def _seen(progress: Progress, row: Row, at: float, fields: Fields) -> None:
    group = group_of(progress, fields)
    newer = int(fields["round"]) > group.round
    group.round, group.members, group.phase = int(fields["round"]), int(fields["members"]), "training"
    if newer and len(progress.rows) == 1:  # else the peers say it, and more
        of = "" if group.stage is None else f" of stage {group.stage}"
        progress.note(f"round {group.round}{of} committed by {several(group.members, 'member')}")


def _regrouped(progress: Progress, row: Row, at: float, fields: Fields) -> None:
    group, term = group_of(progress, fields), int(fields["term"])
    group.round, group.members, group.phase = int(fields["round"]), int(fields["members"]), "training"
    who = several(group.members, "member")
    if term == 1:
        progress.note(f"{group.name} begins with {who}")
    else:
        progress.note(f"{group.name} is regrouped: it goes on from round {group.round} with {who} (term {term})")


def _majority_missing(progress: Progress, row: Row, at: float, fields: Fields) -> None:
    group = group_of(progress, fields)
    group.phase = f"{fields['alive']} of {several(int(fields['members']), 'member')} there"
    progress.note(f"{group.name} has lost its majority: {group.phase}, at round {fields['round']}")


def _members_away(progress: Progress, row: Row, at: float, fields: Fields) -> None:
    group = group_of(progress, fields)
    names = ", ".join(progress.name_of(peer) for peer in fields.get("members") or ()) or "its members"
    if group.complete:
        progress.note(f"who has the last round of {group.name} has left: for latecomers, start one of {names} again")
        return
    group.phase = "its last members are away"
    here = f"nobody who is there may go on with {group.name} from round {fields['round']}"
    progress.note(f"{here}: start one of {names} again")


def _set_back(progress: Progress, row: Row, at: float, fields: Fields) -> None:
    group = group_of(progress, fields)
    known = f"what it had learned by round {fields['round']}"
    progress.note(f"{group.name} goes on with {known}, at round {fields['goes_on_at']} like the others")


def _completed(progress: Progress, row: Row, at: float, fields: Fields) -> None:
    group = group_of(progress, fields)
    group.round, group.phase, group.complete = int(fields["round"]), "complete", True
    if progress.complete:
        progress.note(f"the run is complete, with round {group.round}")


OVERSEEN: Final[dict[str, Callable[[Progress, Row, float, Fields], None]]] = {
    "run_entered": _entered,
    "head_seen": _seen,
    "regrouped": _regrouped,
    "majority_missing": _majority_missing,
    "members_away": _members_away,
    "stage_set_back": _set_back,
    "run_completed": _completed,
}
