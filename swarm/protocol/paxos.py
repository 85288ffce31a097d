"""Single-decree Paxos for one round: at most one next head is ever chosen, whoever crashes, freezes or is slow.

An *attempt* is a ballot. Its leader first collects promises from a majority of the last head's members (phase 1),
then has the group exchange updates, and every member that obtained the complete result votes for the head it leads to
(phase 2). A head with a majority of votes of one attempt is committed. A promise to a later attempt reports the head
voted for earlier; the later leader must then finish that head instead of starting another exchange. (Lamport, "Paxos
Made Simple", 2001.) Votes are kept in memory only: a restarted process takes part under a new session and is no
longer the member that voted, so that forgetting is harmless.

Pure: no clock, no sockets. Attempts are numbered from 0; -1 means none.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Final

import msgspec

from swarm.protocol.head import Count, Hash, Head, Member


class Accepted(msgspec.Struct, frozen=True):
    """A vote cast: in `attempt`, for `head`, whose updates were merged by the exchange named `roster`."""

    attempt: Count
    head: Head
    roster: Hash


ATTEMPTS_KEPT: Final = 16  # of each voter: a round seldom takes more than two or three


class Acceptor:
    """One member's promises and votes for the round after one head."""

    def __init__(self) -> None:
        self.promised = -1
        self.accepted: Accepted | None = None

    def promise(self, attempt: int) -> bool:
        """Promise to refuse every attempt below this one; False if a later one was already promised."""
        if attempt < self.promised:
            return False
        self.promised = attempt
        return True

    def accept(self, attempt: int, head: Head, roster: bytes) -> bool:
        """Vote, unless a later attempt was promised or this attempt already got another vote."""
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
        """Count a vote for the head named by hash `choice`. Votes of non-members do not count, nor does a second one in
        the same attempt; of a voter's earlier attempts the last few are kept."""
        if not self._head.has(voter):
            return
        cast = self._votes.setdefault(voter, {})
        cast.setdefault(attempt, choice)
        if len(cast) > ATTEMPTS_KEPT:
            del cast[min(cast)]

    @property
    def chosen(self) -> bytes | None:
        """Hash of the committed head, once one attempt has a majority for it."""
        tally = Counter(vote for cast in self._votes.values() for vote in cast.items())
        return next((choice for (_, choice), votes in tally.items() if votes >= self._head.quorum), None)


def value_to_finish(reports: Sequence[Accepted | None], members: int) -> Accepted | None:
    """What a leader must finish, given what those that promised have voted for (None: nothing), a majority of
    `members`: the latest vote that may have been part of a majority.

    A vote of attempt a may be joined by whoever has not reported, and by whoever voted in a later attempt, for its
    report hides what it voted before; all others can no longer vote in a. So nobody who invents a vote of its own holds
    up the round, unless as many are silent as make a majority with it.
    """
    cast = sorted((report for report in reports if report is not None), key=lambda report: report.attempt, reverse=True)
    silent, quorum = members - len(reports), members // 2 + 1
    for report in cast:
        alike = sum(other.attempt == report.attempt and other.head == report.head for other in cast)
        later = sum(other.attempt > report.attempt for other in cast)
        if silent + alike + later >= quorum:
            return report
    return None
