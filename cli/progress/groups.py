"""Handlers of the coordinator's events about its groups: one for the whole model, or one a stage of a pipeline."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from cli.progress.facts import STARTING, Fields, GroupRow, Row, finite
from cli.progress.state import ViewState
from cli.terminal.figures import several, size_text
from peer.plain_text import plain
from swarm.run.sections import STAGES_MAX

_NAMES_MAX: Final = 32  # in one note
_CATCHES_UP_S: Final = 30.0


def _run_entered(view: ViewState, row: Row, at: float, fields: Fields) -> None:
    """A peer, or the coordinator itself, is connected to the run."""
    stages, rounds = int(fields["stages"]), int(fields["rounds"])
    row.role, row.pipelined, row.phase, view.rounds = str(fields["role"]), stages > 1, STARTING, rounds
    view.min_peers = int(fields.get("min_peers") or 0)
    if row.role == "coordinator":
        for stage in range(min(stages, STAGES_MAX)) if stages > 1 else (None,):
            view.groups.setdefault(stage, GroupRow(stage))
    if len(view.rows) == 1:
        cut = f"a model in {stages} stages, " if stages > 1 else ""
        until = several(rounds, "round") if rounds else "no last round"
        own = str(fields.get("tokenizer", ""))
        text = "" if not own else ", text as bytes" if own == "bytes" else f", text by tokenizer.json {own[:8]}"
        view.note(f"{row.name} is in the run {fields['name']!r}: {cut}{until}{text}")


def _head_seen(view: ViewState, row: Row, at: float, fields: Fields) -> None:
    group = view.group_of(fields)
    newer = int(fields["round"]) > group.round
    group.round, group.members, group.phase = int(fields["round"]), int(fields["members"]), "training"
    if group.round and view.pace.elapsed_s(at) is None:
        row.catches_up_until = at + _CATCHES_UP_S
    view.pace.note(group.round, at, int(fields.get("tokens") or 0), seen=at >= row.catches_up_until)
    if newer and len(view.rows) == 1:  # peers in the same view report their commits in more detail
        of = "" if group.stage is None else f" of stage {group.stage}"
        view.note(f"round {group.round}{of} committed by {several(group.members, 'member')}")


def _members_told(view: ViewState, row: Row, at: float, fields: Fields) -> None:
    """What the members say of themselves, in the coordinator's view."""
    if int(fields["round"]) > row.told_round:
        row.told_round, row.loss = int(fields["round"]), finite(fields.get("loss"))
        row.curve.add(row.loss)
        view.loss_curve.add(row.loss)
    if (held_out := finite(fields.get("val_loss"))) is not None:
        row.val_loss, told = held_out, fields.get("val_round")
        row.val_round = None if told is None else int(told)
    row.steps_per_s = float(fields["steps_per_s"])
    row.bytes_up, row.bytes_down = int(fields["bytes_up"]), int(fields["bytes_down"])


def _regrouped(view: ViewState, row: Row, at: float, fields: Fields) -> None:
    group, term = view.group_of(fields), int(fields["term"])
    group.round, group.members, group.phase = int(fields["round"]), int(fields["members"]), "training"
    members = several(group.members, "member")
    if term == 1:
        view.note(f"{group.name} begins with {members}")
    else:
        view.note(f"{group.name} is regrouped and continues from round {group.round} with {members} (term {term})")


def _quorum_lost(view: ViewState, row: Row, at: float, fields: Fields) -> None:
    """Too few voters answer, or no peer that answers has the last weights."""
    group = view.group_of(fields)
    names = ", ".join(view.name_of(peer) for peer in fields.get("away") or ()) or "its members"
    group.phase = "cannot go on"
    remedy = f"start {names} again, or continue without them with `peer regroup {view.home_option(row)}`"
    if fields.get("alone"):
        remedy = (
            f"no member answers, so check this machine's own connection first. If they are gone, {remedy}: if they are"
            " not, what they do meanwhile is lost"
        )
    view.note(f"{group.name} cannot go on from round {fields['round']} ({fields['reason']}): {remedy}")


def _run_replaced(view: ViewState, row: Row, at: float, fields: Fields) -> None:
    view.note(
        f"RUN.toml describes another run than {fields['name']} {fields['run_id']}, in which no peer has committed:"
        " that one is replaced, its invite no longer holds, and its files lie in the home's folder `replaced`"
    )


def _coordinator_restored(view: ViewState, row: Row, at: float, fields: Fields) -> None:
    group = view.group_of(fields)
    group.phase = "waits for `peer regroup`"
    view.note(
        f"the coordinator's disk is not the newest one of {group.name}: it does nothing before"
        f" `peer regroup {view.home_option(row)}`; use that once the members that are alive are connected"
    )


def _second_process(view: ViewState, row: Row, at: float, fields: Fields) -> None:
    where = f" at {fields['ip']}" if fields["ip"] else ""
    view.note(
        f"another process was started{where} with this coordinator's key, and has stopped: keep one home with that key,"
        " and none of its copies where others can start it"
    )


def _member_unsaved(view: ViewState, row: Row, at: float, fields: Fields) -> None:
    """A member says of itself that its disk takes nothing."""
    view.note(
        f"{fields['name']} {fields['reason']}: it takes part in no round until its owner frees some space, or starts it"
        " again"
    )


def _prefix_full(view: ViewState, row: Row, at: float, fields: Fields) -> None:
    """Newcomers wait because too many members share their address prefix."""
    waiting, most = several(int(fields["waiting"]), "peer"), several(int(fields["most"]), "member")
    view.note(
        f"{waiting} of the address prefix {fields['prefix']} must wait: a group has {most} of one prefix at most;"
        " for more machines of one network, create the run with a higher [run] members_per_prefix"
    )


def _roster_full(view: ViewState, row: Row, at: float, fields: Fields) -> None:
    """A round had no room for some contributions. Told again once it has none for more of them."""
    group, count = view.group_of(fields), int(fields["left_out"])
    if count <= group.left_out:
        return
    group.left_out = count
    held, size = several(int(fields["members"]), "update"), size_text(int(fields["bytes"]))
    names = ", ".join(view.name_of(str(peer)) for peer in list(fields.get("peers") or ())[:_NAMES_MAX])
    view.note(
        f"round {fields['round']} of {group.name} has room for {held} ({size}), not for {count} more"
        f" ({names}): all take turns, and what is not merged is kept for the next update; create the next run with a"
        " lower [run] max_peers or more [pipeline] stages"
    )


def _group_full(view: ViewState, row: Row, at: float, fields: Fields) -> None:
    """This peer asks to join in vain."""
    group, most = view.group_of(fields), several(int(fields["most"]), "peer")
    view.note(
        f"{row.name} waits for a place: {group.name} has {most}, as many as its [run] max_peers allows; it is taken in"
        " once one of these has left"
    )


def _votes_in_one_hand(view: ViewState, row: Row, at: float, fields: Fields) -> None:
    """One invite or address prefix holds half or more of the votes, and the coordinator's is not required."""
    from swarm.membership.vote_shares import VoteShare, caution

    invite, prefix = str(fields["invite"]), str(fields["prefix"])
    votes, members, stage = int(fields["votes"]), int(fields["members"]), fields.get("stage")
    share = VoteShare(
        invite=invite, prefix=prefix, votes=votes, members=members, stage=None if stage is None else int(stage)
    )
    view.note(
        f'{caution(share)}; where you post an invite publicly, create the run with [run] coordinator = "required"'
    )


def _invite_withdrawn(view: ViewState, row: Row, at: float, fields: Fields) -> None:
    """The invite printed before brings in no other peer."""
    kept, dropped = [plain(str(name)) for name in fields["kept"]], int(fields["dropped"])
    more = f" and {len(kept) - _NAMES_MAX} more" if len(kept) > _NAMES_MAX else ""
    view.note(
        f"the invite printed before is withdrawn: it keeps {', '.join(kept[:_NAMES_MAX]) or 'no peer'}{more}, and"
        f" {several(dropped, 'key')} that came by it {'is' if dropped == 1 else 'are'} out"
    )


def _stage_set_back(view: ViewState, row: Row, at: float, fields: Fields) -> None:
    group = view.group_of(fields)
    view.note(
        f"{group.name} continues at round {fields['goes_on_at']} like the others,"
        f" with the weights it had at round {fields['round']}"
    )


def _run_completed(view: ViewState, row: Row, at: float, fields: Fields) -> None:
    """Note it once: several peers in one view tell it of the same group."""
    group = view.group_of(fields)
    group.round, group.phase, group.complete = int(fields["round"]), "complete", True
    if view.complete and len(view.groups) >= view.stages and not view.told_complete:
        view.told_complete = True
        view.note(f"complete: round {group.round} of {view.rounds or group.round}")


def _run_found_complete(view: ViewState, row: Row, at: float, fields: Fields) -> None:
    """A peer has come to a run that is over."""
    number, stages = int(fields["round"]), int(fields["stages"])
    if not fields["kept"]:
        view.note(
            f"complete: round {number} of {number}, but the coordinator does not have the last state yet: start a"
            " member again that took part to the end"
        )
        return
    group = view.group_of({})
    group.round, group.phase, group.complete = number, "complete", True
    row.phase, where = "complete", view.home_option(row) if stages == 1 and row.role != "feeder" else "INVITE"
    if not fields["common"]:
        where = "--home HOME_OF_ONE_THAT_TOOK_PART"
    view.told_complete = True
    view.note(f"complete: round {number} of {number}; `peer export {where} --out DIR` writes the model")


def _last_state_missing(view: ViewState, row: Row, at: float, fields: Fields) -> None:
    group = view.group_of(fields)
    group.phase = "waits for its last state"
    view.note(f"the last state of {group.name}, of round {fields['round']}, is not kept yet: {fields['reason']}")


GROUP_EVENTS: Final[dict[str, Callable[[ViewState, Row, float, Fields], None]]] = {
    "run_entered": _run_entered,
    "head_seen": _head_seen,
    "members_told": _members_told,
    "regrouped": _regrouped,
    "quorum_lost": _quorum_lost,
    "run_replaced": _run_replaced,
    "coordinator_restored": _coordinator_restored,
    "second_process": _second_process,
    "member_unsaved": _member_unsaved,
    "prefix_full": _prefix_full,
    "roster_full": _roster_full,
    "group_full": _group_full,
    "votes_in_one_hand": _votes_in_one_hand,
    "invite_withdrawn": _invite_withdrawn,
    "stage_set_back": _stage_set_back,
    "run_completed": _run_completed,
    "run_found_complete": _run_found_complete,
    "last_state_missing": _last_state_missing,
}
