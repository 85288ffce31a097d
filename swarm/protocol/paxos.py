"""Single-decree Paxos for one round: at most one next head is chosen, even if members crash, freeze or are slow.

An *attempt* is a ballot. Its leader first collects promises from a majority of the last head's members (phase 1). Then
the group exchanges updates, and every member with the complete result votes for the head that follows from it (phase
2). A head with a majority of the votes of one attempt is committed. A promise to a later attempt reports the head voted
for before; the later leader must then finish that head instead of starting another exchange (Lamport, "Paxos Made
Simple", 2001). Votes are kept in memory only. A restarted process takes part under a new session, so it is another
member, and losing its votes is harmless.

Pure: no clock, no sockets. Attempts are numbered from 0; -1 means none.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Final

import msgspec

from peer.bounds import Count, Hash
from swarm.protocol.head import Head, Member


class Accepted(msgspec.Struct, frozen=True):
    """A member's vote."""

    attempt: Count
    head: Head
    roster: Hash
    """The hash of the roster whose exchange led to `head`."""


ATTEMPTS_KEPT: Final = 16  # per voter; a round seldom takes more than two or three


class Acceptor:
    """One member's promises and votes for the round after one head."""

    def __init__(self) -> None:
        self.promised = -1
        self.accepted: Accepted | None = None

    def promise(self, attempt: int) -> bool:
        """Promise to refuse every attempt below this one. Return False if a later attempt was already promised."""
        if attempt < self.promised:
            return False
        self.promised = attempt
        return True

    def accept(self, attempt: int, head: Head, roster: bytes) -> bool:
        """Vote, and return True, unless a later attempt was promised or this attempt already got another vote."""
        if attempt < self.promised:
            return False
        if self.accepted is not None and self.accepted.attempt == attempt and self.accepted.head != head:
            return False
        self.promised = attempt
        self.accepted = Accepted(attempt, head, roster)
        return True


class VoteCount:
    """The votes one peer has seen for the round after `head`."""

    def __init__(self, head: Head) -> None:
        self._head = head
        self._votes: dict[Member, dict[int, bytes]] = {}

    def record(self, voter: Member, attempt: int, choice: bytes) -> None:
        """Record a vote for the head with hash `choice`. Votes of non-members and second votes in an attempt do not
        count. Only the latest few votes of each voter are kept."""
        if not self._head.has(voter):
            return
        cast = self._votes.setdefault(voter, {})
        cast.setdefault(attempt, choice)
        if len(cast) > ATTEMPTS_KEPT:
            del cast[min(cast)]

    @property
    def chosen(self) -> bytes | None:
        """The hash of the committed head, once one attempt has a majority for it."""
        tally = Counter(vote for cast in self._votes.values() for vote in cast.items())
        return next((choice for (_, choice), votes in tally.items() if votes >= self._head.quorum), None)


def value_to_finish(reports: Sequence[Accepted | None], members: int) -> Accepted | None:
    """Return the vote that a leader must finish: the latest one that may be part of a majority; None if there is none.

    `reports` holds the votes (None: no vote) of the members that promised, a majority of the `members`.

    A vote of attempt a may be shared by members that have not reported, and by members that voted in a later attempt,
    since their report hides the earlier vote. All others can no longer vote in a. An invented vote can therefore hold
    up the round only if enough members are silent to make a majority with it.
    """
    cast = sorted((report for report in reports if report is not None), key=lambda report: report.attempt, reverse=True)
    silent, quorum = members - len(reports), members // 2 + 1
    for report in cast:
        alike = sum(other.attempt == report.attempt and other.head == report.head for other in cast)
        later = sum(other.attempt > report.attempt for other in cast)
        if silent + alike + later >= quorum:
            return report
    return None
