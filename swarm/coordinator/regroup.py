"""The operator's regroup, in the running coordinator: every group is asked, and the outcome is reported."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Final

import msgspec
import trio

from peer.catalogue.groups import CoordinatorRestored, Regrouped
from peer.errors import ResourceError
from peer.events import EventLog, Field
from peer.files import write_atomically
from peer.notifier import ask_at_once
from swarm.coordinator.coordinated_group import CoordinatedGroup
from swarm.coordinator.regroup_files import (
    LOOK_EVERY_S,
    GroupOutcome,
    Outcome,
    RegroupAnswer,
    RegroupRequest,
    read_file,
)
from swarm.protocol.agreement import events
from swarm.run.home import Home

REQUEST_S: Final = 60.0  # a request that is older was left by a process that is gone
SPARE_S: Final = 5.0  # beyond what the answers of peers may take
_DECIDED: Final[dict[str, Outcome]] = {
    "regroup_withdrawn": "withdrawn",
    "regroup_undoes": "would_undo",
    "regroup_failed": "failed",
    Regrouped.event_name(): "resumed",
}


async def serve_requests(home: Home, groups: Sequence[CoordinatedGroup], log: EventLog) -> None:
    """Answer requests in that home, one after the other, until cancelled."""
    while True:
        await trio.sleep(LOOK_EVERY_S)
        if not home.regroup_request.exists():
            continue
        request, age_s = read_file(home.regroup_request, RegroupRequest), _age_s(home)
        home.regroup_request.unlink(missing_ok=True)
        if request is None or age_s > REQUEST_S:
            log.emit("regroup_refused", reason="a request that cannot be read, or is old")
            continue
        log.emit("regroup_asked", without=list(request.without), undo=request.undo)
        answer = RegroupAnswer(request.nonce, await regroup_all(groups, request))
        try:
            write_atomically(home.regroup_answer, msgspec.json.encode(answer))
        except ResourceError as error:
            log.emit("regroup_refused", reason=str(error))


async def regroup_all(groups: Sequence[CoordinatedGroup], request: RegroupRequest) -> tuple[GroupOutcome, ...]:
    """Ask all groups for a new term; return the outcome."""
    return tuple(await ask_at_once(lambda group: regroup(group, request), groups))


async def regroup(group: CoordinatedGroup, request: RegroupRequest) -> GroupOutcome:
    """Ask one group for a new term, wait until it has decided and is in that term.

    In a run that only the operator continues, members that do not answer may be alive and continue elsewhere: their
    work is then lost. So the operator must name each of them."""
    config = group.driver.config
    for event in _DECIDED:
        group.last_told.pop(event, None)
    all_named = config.mode == "witness"
    group.driver.feed(events.RegroupRequested(request.without, request.readmit, request.undo, all_named))
    if not await group.told.until(lambda: bool(_DECIDED.keys() & group.last_told), config.ask_s + SPARE_S):
        return GroupOutcome("silent", group.stage, group.head.round, connected=group.connected)
    if not group.head.members:
        return await _beginning(group)
    event = next(event for event in _DECIDED if event in group.last_told)
    fields = group.last_told[event]
    unnamed = _names(fields, "away")
    outcome: Outcome = "unnamed" if unnamed else _DECIDED[event]
    term = _number(fields, "term")
    if outcome == "resumed":
        await group.told.until(lambda: group.head.term >= term, SPARE_S)
    return GroupOutcome(
        outcome,
        group.stage,
        _number(fields, "goes_on_at" if "goes_on_at" in fields else "round"),
        term,
        _number(fields, "members"),
        str(fields.get("reason", "")),
        away=unnamed,
        alone=bool(unnamed) and len(group.away) == len(group.head.members),
        connected=group.connected,
        undone=_number(fields, "undone") if outcome == "would_undo" else 0,
        branches=_names(fields, "branches"),
    )


async def _beginning(group: CoordinatedGroup) -> GroupOutcome:
    """Return the outcome for a group that has not begun. A restored coordinator lacks only the operator's word if
    enough peers are connected: then it begins at once."""
    connected, restored = group.connected, CoordinatorRestored.event_name() in group.last_told
    if connected and await group.told.until(lambda: bool(group.head.members), SPARE_S):
        head = group.head
        return GroupOutcome("begun", group.stage, head.round, head.term, len(head.members))
    return GroupOutcome("unbegun", group.stage, 0, connected=connected, needed=group.needed, restored=restored)


def _number(fields: dict[str, Field], name: str) -> int:
    value = fields.get(name, 0)
    return value if isinstance(value, int) else 0


def _names(fields: dict[str, Field], name: str) -> tuple[str, ...]:
    value = fields.get(name)
    return tuple(value) if isinstance(value, list | tuple) else ()


def _age_s(home: Home) -> float:
    try:
        return time.time() - home.regroup_request.stat().st_mtime
    except OSError:
        return REQUEST_S + 1.0
