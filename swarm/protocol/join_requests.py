"""Requests to join the group, with a back-off for peers that failed to complete their first rounds."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import trio

from swarm.protocol.head import Head, Member
from swarm.protocol.plan import WorkPlan
from swarm.protocol.prefix_cap import Newcomers, admit

REQUEST_LASTS_S: Final = 10.0
JOIN_REQUESTS_MAX: Final = 1024
WAITING_FACTOR: Final = 4  # requests of one address prefix, for each of its members that a head may have
BACK_OFF_S: Final = 5.0  # doubled with every further round missed
BACK_OFF_MAX_S: Final = 600.0


class JoinRequests:
    """The peers that ask to join, at most `JOIN_REQUESTS_MAX`. `per_prefix`: members of one address prefix in a head.

    A peer that was given work and missed the commit has cost the others a wait. After the second miss in a row the
    peer must wait before it is planned for again, twice as long each time. It is never excluded for good."""

    def __init__(self, per_prefix: int = JOIN_REQUESTS_MAX) -> None:
        self._per_prefix = per_prefix
        self._waiting: dict[str, tuple[Member, str, float]] = {}  # (member, prefix, until)
        self._missed: dict[str, tuple[int, float]] = {}  # (rounds missed in a row, earliest time)

    def add(self, member: Member, prefix: str) -> None:
        """Note that the peer, seen at an address of that prefix, holds the head's state and is ready."""
        now = trio.current_time()
        if member.peer not in self._waiting and not self._has_room(prefix):
            self._waiting = {peer: entry for peer, entry in self._waiting.items() if entry[2] > now}
            if not self._has_room(prefix):
                return
        self._waiting[member.peer] = (member, prefix, now + REQUEST_LASTS_S)

    def _has_room(self, prefix: str) -> bool:
        of_prefix = sum(entry[1] == prefix for entry in self._waiting.values())
        return len(self._waiting) < JOIN_REQUESTS_MAX and of_prefix < WAITING_FACTOR * self._per_prefix

    def ready(self, room: int, staying: Iterable[str]) -> Newcomers:
        """Choose the peers to plan for, at most `room`, those that have waited longest first. `staying`: the prefixes
        of the members of the head."""
        now = trio.current_time()
        self._waiting = {peer: entry for peer, entry in self._waiting.items() if entry[2] > now}
        ready = [
            (member, prefix)
            for member, prefix, _ in self._waiting.values()
            if now >= self._missed.get(member.peer, (0, now))[1]
        ]
        return admit(ready, staying, self._per_prefix, room)

    def settle(self, plan: WorkPlan, head: Head) -> None:
        """Note that the round of `plan` was committed as `head`."""
        now = trio.current_time()
        for member in head.members:
            self._waiting.pop(member.peer, None)
            self._missed.pop(member.peer, None)
        for assignment in plan.assignments:
            if not head.has(assignment.member) and len(self._missed) < JOIN_REQUESTS_MAX:
                missed = self._missed.get(assignment.member.peer, (0, now))[0] + 1
                wait_s = min(BACK_OFF_S * 2.0 ** (missed - 2), BACK_OFF_MAX_S) if missed > 1 else 0.0
                self._missed[assignment.member.peer] = (missed, now + wait_s)
