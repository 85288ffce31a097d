"""Requests to join the group, with a back-off for peers that failed to complete their first rounds."""

from __future__ import annotations

from typing import Final

import trio

from swarm.protocol.head import Head, Member
from swarm.protocol.plan import WorkPlan

REQUEST_LASTS_S: Final = 10.0
JOIN_REQUESTS_MAX: Final = 1024
BACK_OFF_S: Final = 5.0  # doubled with every further round missed
BACK_OFF_MAX_S: Final = 600.0


class JoinRequests:
    """The peers that ask to join, at most `JOIN_REQUESTS_MAX`.

    A peer that was given work and missed the commit has cost the others a wait. After the second miss in a row the
    peer must wait before it is planned for again, twice as long each time. It is never excluded for good."""

    def __init__(self) -> None:
        self._waiting: dict[str, tuple[Member, float]] = {}
        self._missed: dict[str, tuple[int, float]] = {}  # (rounds missed in a row, earliest time)

    def add(self, member: Member) -> None:
        """Note that the peer holds the head's state and is ready."""
        now = trio.current_time()
        if len(self._waiting) >= JOIN_REQUESTS_MAX:
            self._waiting = {peer: entry for peer, entry in self._waiting.items() if entry[1] > now}
        if member.peer in self._waiting or len(self._waiting) < JOIN_REQUESTS_MAX:
            self._waiting[member.peer] = (member, now + REQUEST_LASTS_S)

    def ready(self, room: int) -> dict[str, Member]:
        """Return the peers to plan for, at most `room`, by peer id."""
        now = trio.current_time()
        ready = [m for m, until in self._waiting.values() if until > now >= self._missed.get(m.peer, (0, now))[1]]
        return {member.peer: member for member in sorted(ready)[: max(room, 0)]}

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
