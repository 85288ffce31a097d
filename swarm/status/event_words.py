"""The event log in words: what peers told, newest first. What several peers say of one thing is one line.

Everything here is a claim, and its texts are strangers': they are cut and made plain."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final

from peer.plain_text import plain
from swarm.membership.told_events import ToldEvent
from swarm.status.state import LogLine

LINES_MAX: Final = 200
OF_ONE_MAX: Final = 60
"""Lines of one peer, so that a talkative one does not fill the log."""
SAME_S: Final = 60.0
"""Within so long two peers that say the same mean one thing."""
TEXT_MAX: Final = 160

Fields = Mapping[str, object]
Words = Callable[[Callable[[object], str], Fields], str]
"""Returns the sentence about an event; `who` names the peer that a field holds."""


def _of(fields: Fields) -> str:
    return "" if fields.get("stage") is None else f" of stage {fields['stage']}"


def _why(fields: Fields) -> str:
    return f": {fields['reason']}" if fields.get("reason") else ""


_SHARED: Final[dict[str, Words]] = {  # of which several peers tell, and who does matters little
    "attempt_failed": lambda who, f: f"attempt {f.get('attempt')} at round {f.get('round')}{_of(f)} failed{_why(f)}",
    "member_joined": lambda who, f: f"{who(f.get('peer'))} is here",
    "member_left": lambda who, f: f"{who(f.get('peer'))} is gone",
    "quorum_lost": lambda who, f: f"the group{_of(f)} has no majority after round {f.get('round')}",
    "regrouped": lambda who, f: (
        f"term {f.get('term')}{_of(f)} begins after round {f.get('round')} with {f.get('members')} members"
        + (f", {f['undone']} rounds undone" if f.get("undone") else "")
    ),
    "roster_full": lambda who, f: (
        f"round {f.get('round')}{_of(f)} has room for {f.get('members')} updates, not for {f.get('left_out')} more"
    ),
    "round_empty": lambda who, f: f"round {f.get('round')} merged nothing",
    "run_completed": lambda who, f: f"the run is complete with round {f.get('round')}",
    "peer_suspect": lambda who, f: f"{who(f.get('peer'))} is not heard",
    "peer_recovered": lambda who, f: f"{who(f.get('peer'))} is heard again",
}
_OWN: Final[dict[str, Words]] = {  # of the peer that tells: its name comes first
    "catch_up_failed": lambda who, f: f"could not catch up with round {f.get('round')}",
    "checkpoint_failed": lambda who, f: f"could not save round {f.get('round')}",
    "contribution_judged": lambda who, f: (
        f"finds that what {who(f.get('peer'))} sent in round {f.get('round')} makes the loss worse"
        + (", and leaves it out where it leads" if f.get("left_out") else "")
    ),
    "group_full": lambda who, f: f"waits for a place: the group{_of(f)} has its {f.get('most')} peers",
    "head_seen": lambda who, f: f"sees that round {f.get('round')}{_of(f)} is committed",
    "merge_failed": lambda who, f: f"could not merge round {f.get('round')}",
    "move_finished": lambda who, f: f"is at stage {f.get('target')}",
    "move_started": lambda who, f: f"moves from stage {f.get('source')} to stage {f.get('target')}",
    "peer_penalized": lambda who, f: f"refuses what {who(f.get('peer'))} sent{_why(f)}",
    "pipeline_lost": lambda who, f: f"gave up {f.get('samples')} samples that a stage has lost",
    "pipeline_redispatched": lambda who, f: f"sent {f.get('samples')} samples again that a stage has lost",
    "pipeline_resumed": lambda who, f: f"goes on: stage {f.get('stage')} is served again",
    "pipeline_waiting": lambda who, f: f"waits for stage {f.get('stage')}",
    "round_committed": lambda who, f: f"has committed round {f.get('round')}{_of(f)}",
    "round_discarded": lambda who, f: f"discarded its work for round {f.get('round')}",
    "run_finished": lambda who, f: f"is done with round {f.get('round')}",
    "stage_restored": lambda who, f: f"brought stage {f.get('stage')} back from a backup of round {f.get('round')}",
    "state_fetched": lambda who, f: f"has fetched the state of round {f.get('round')}",
    "steps_skipped": lambda who, f: (
        f"skipped {f.get('skipped')} of {f.get('steps')} steps of round {f.get('round')}, as NaN or infinite"
    ),
    "worker_died": lambda who, f: "lost its worker process, and replaces it",
    "worker_failed": lambda who, f: f"had its worker fail in round {f.get('round')}",
}
WORDED: Final = frozenset({*_SHARED, *_OWN})
"""The events that the log has words for."""


def names_told(told: Mapping[str, Sequence[ToldEvent]]) -> dict[str, str]:
    """Return the names of peers that others told of: for those that had left before the monitor came."""
    return {
        str(event.fields["peer"]): str(event.fields["name"])
        for events in told.values()
        for event in events
        if event.name == "member_joined" and {"peer", "name"} <= event.fields.keys()
    }


def log_lines(told: Mapping[str, Sequence[ToldEvent]], names: Mapping[str, str]) -> tuple[LogLine, ...]:
    """Return the log, newest first. `names`: by peer id."""

    def who(peer: object) -> str:
        return plain(names.get(str(peer), f"…{str(peer)[-6:]}"), 64)

    lines = [
        (event.at, peer, text)
        for peer, events in told.items()
        for event, text in _worded(peer, events, who)[-OF_ONE_MAX:]
    ]
    merged: list[LogLine] = []
    newest: dict[str, int] = {}  # the place in `merged` of the last line with a text
    for at, peer, text in sorted(lines, reverse=True):
        place = newest.get(text)
        if place is not None and merged[place].at - at <= SAME_S:
            line = merged[place]
            tellers = line.tellers if peer in line.tellers else (*line.tellers, peer)
            merged[place] = LogLine(at=line.at, text=text, tellers=tellers)
        elif len(merged) < LINES_MAX:
            newest[text] = len(merged)
            merged.append(LogLine(at=at, text=text, tellers=(peer,)))
    return tuple(merged)


def _worded(peer: str, events: Sequence[ToldEvent], who: Callable[[object], str]) -> list[tuple[ToldEvent, str]]:
    found = []
    for event in events:
        if words := _SHARED.get(event.name):
            found.append((event, plain(words(who, event.fields), TEXT_MAX)))
        elif words := _OWN.get(event.name):
            found.append((event, plain(f"{who(peer)} {words(who, event.fields)}", TEXT_MAX)))
    return found
