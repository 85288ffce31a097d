"""Who asks to take part: for how long a knock counts, and who has to wait because it let the group down before."""

from __future__ import annotations

from typing import Final

import trio

from swarm.protocol.head import Head, Member
from swarm.protocol.plan import WorkPlan

LASTS_S: Final = 10.0
JOIN_REQUESTS_MAX: Final = 1024
BACK_OFF_S: Final = 5.0  # doubled with every further round missed
BACK_OFF_MAX_S: Final = 600.0


class JoinRequests:
    """Bounded, whoever knocks. A peer that was given work and did not get as far as the commit costs the others a wait;
    the first time may be an accident, from the second in a row on it is planned for less and less often. It is never
    shut out: laptops sleep."""

    def __init__(self) -> None:
        self._waiting: dict[str, tuple[Member, float]] = {}
        self._missed: dict[str, tuple[int, float]] = {}  # rounds in a row, not before this time

    def request_join(self, member: Member) -> None:
        """It is there and ready."""
        now = trio.current_time()
        if len(self._waiting) >= JOIN_REQUESTS_MAX:
            self._waiting = {peer: entry for peer, entry in self._waiting.items() if entry[1] > now}
        if member.peer in self._waiting or len(self._waiting) < JOIN_REQUESTS_MAX:
            self._waiting[member.peer] = (member, now + LASTS_S)

    def ready(self, room: int) -> dict[str, Member]:
        """Whom to plan for, `room` at most, by peer id."""
        now = trio.current_time()
        ready = [m for m, until in self._waiting.values() if until > now >= self._missed.get(m.peer, (0, now))[1]]
        return {member.peer: member for member in sorted(ready)[: max(room, 0)]}

    def settle(self, plan: WorkPlan, head: Head) -> None:
        """A round that began with `plan` was committed as `head`."""
        now = trio.current_time()
        for member in head.members:
            self._waiting.pop(member.peer, None)
            self._missed.pop(member.peer, None)
        for assignment in plan.assignments:
            if not head.has(assignment.member) and len(self._missed) < JOIN_REQUESTS_MAX:
                missed = self._missed.get(assignment.member.peer, (0, now))[0] + 1
                wait_s = min(BACK_OFF_S * 2.0 ** (missed - 2), BACK_OFF_MAX_S) if missed > 1 else 0.0
                self._missed[assignment.member.peer] = (missed, now + wait_s)
