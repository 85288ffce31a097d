"""Handlers of the coordinator's events about its groups: one for the whole model, or one a stage of a pipeline."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from cli.views.facts import Fields, GroupRow, Row
from cli.views.state import ViewState
from cli.views.text import several


def _run_entered(view: ViewState, row: Row, at: float, fields: Fields) -> None:
    """A peer, or the coordinator itself, is connected to the run."""
    stages, rounds = int(fields["stages"]), int(fields["rounds"])
    row.role, row.pipelined = str(fields["role"]), stages > 1
    if row.role == "coordinator":
        for stage in range(stages) if stages > 1 else (None,):
            view.groups.setdefault(stage, GroupRow(stage))
    if len(view.rows) == 1:
        cut = f"a model in {stages} stages, " if stages > 1 else ""
        until = f"{rounds} rounds" if rounds else "no last round"
        view.note(f"{row.name} is in the run {fields['name']!r}: {cut}{until}")


def _head_seen(view: ViewState, row: Row, at: float, fields: Fields) -> None:
    group = view.group_of(fields)
    newer = int(fields["round"]) > group.round
    group.round, group.members, group.phase = int(fields["round"]), int(fields["members"]), "training"
    if newer and len(view.rows) == 1:  # peers in the same view report their commits in more detail
        of = "" if group.stage is None else f" of stage {group.stage}"
        view.note(f"round {group.round}{of} committed by {several(group.members, 'member')}")


def _regrouped(view: ViewState, row: Row, at: float, fields: Fields) -> None:
    group, term = view.group_of(fields), int(fields["term"])
    group.round, group.members, group.phase = int(fields["round"]), int(fields["members"]), "training"
    members = several(group.members, "member")
    if term == 1:
        view.note(f"{group.name} begins with {members}")
    else:
        view.note(f"{group.name} is regrouped and continues from round {group.round} with {members} (term {term})")


def _majority_missing(view: ViewState, row: Row, at: float, fields: Fields) -> None:
    group = view.group_of(fields)
    group.phase = f"{fields['alive']} of {several(int(fields['members']), 'member')} alive"
    view.note(f"{group.name} has lost its majority at round {fields['round']}: {group.phase}")


def _members_away(view: ViewState, row: Row, at: float, fields: Fields) -> None:
    group = view.group_of(fields)
    names = ", ".join(view.name_of(peer) for peer in fields.get("members") or ()) or "its members"
    if group.complete:
        view.note(f"no peer with the last round of {group.name} is left: for late joiners, start one of {names} again")
        return
    group.phase = "its last members are away"
    view.note(f"no live peer can continue {group.name} from round {fields['round']}: start one of {names} again")


def _prefix_full(view: ViewState, row: Row, at: float, fields: Fields) -> None:
    """Newcomers wait because too many members share their address prefix."""
    waiting, most = several(int(fields["waiting"]), "peer"), several(int(fields["most"]), "member")
    view.note(
        f"{waiting} of the address prefix {fields['prefix']} must wait: a group has {most} of one prefix at most;"
        " for more machines of one network, create the run with a higher [run] members_per_prefix"
    )


def _stage_set_back(view: ViewState, row: Row, at: float, fields: Fields) -> None:
    group = view.group_of(fields)
    view.note(
        f"{group.name} continues at round {fields['goes_on_at']} like the others,"
        f" with the weights it had at round {fields['round']}"
    )


def _run_completed(view: ViewState, row: Row, at: float, fields: Fields) -> None:
    group = view.group_of(fields)
    group.round, group.phase, group.complete = int(fields["round"]), "complete", True
    if view.complete:
        view.note(f"the run is complete at round {group.round}")


GROUP_EVENTS: Final[dict[str, Callable[[ViewState, Row, float, Fields], None]]] = {
    "run_entered": _run_entered,
    "head_seen": _head_seen,
    "regrouped": _regrouped,
    "majority_missing": _majority_missing,
    "members_away": _members_away,
    "prefix_full": _prefix_full,
    "stage_set_back": _stage_set_back,
    "run_completed": _run_completed,
}
