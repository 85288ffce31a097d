"""The event log in words: what peers told, newest first. What several peers say of one thing is one line.

Everything here is a claim, and its texts are strangers': they are cut and made plain."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Final

from peer.catalogue.groups import MemberJoined
from peer.catalogue.reading import Heard
from peer.plain_text import plain
from swarm.status.state import LogLine

LINES_MAX: Final = 200
OF_ONE_MAX: Final = 60
"""Lines of one peer, so that a talkative one does not fill the log."""
SAME_S: Final = 60.0
"""Within so long two peers that say the same mean one thing."""


def names_told(told: Mapping[str, Sequence[Heard]]) -> dict[str, str]:
    """Return the names of peers that others told of: for those that had left before the monitor came."""
    return {
        event.peer: event.name
        for events in told.values()
        for _, event in events
        if isinstance(event, MemberJoined) and event.name
    }


def log_lines(told: Mapping[str, Sequence[Heard]], names: Mapping[str, str]) -> tuple[LogLine, ...]:
    """Return the log, newest first. `names`: by peer id."""

    def who(peer: str) -> str:
        return plain(names.get(peer, f"…{peer[-6:]}"), 64)

    lines: list[tuple[float, str, str]] = []
    for peer, events in told.items():
        newest_first = ((at, peer, plain(event.sentence(who(peer), who))) for at, event in reversed(events))
        lines += islice((line for line in newest_first if line[2]), OF_ONE_MAX)
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
