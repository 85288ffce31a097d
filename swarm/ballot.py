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

import msgspec

from swarm.chain import Head, Member


class Accepted(msgspec.Struct, frozen=True):
    """A vote cast: in `attempt`, for `head`, whose updates were merged by the exchange named `roster`."""

    attempt: int
    head: Head
    roster: bytes


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


class VoteBox:
    """The votes one peer has seen for the round after `head`."""

    def __init__(self, head: Head) -> None:
        self._head = head
        self._votes: dict[tuple[int, bytes], set[Member]] = {}

    def record(self, voter: Member, attempt: int, choice: bytes) -> None:
        """Count a vote for the head named by hash `choice`; votes of non-members do not count."""
        if self._head.has(voter):
            self._votes.setdefault((attempt, choice), set()).add(voter)

    @property
    def chosen(self) -> bytes | None:
        """Hash of the committed head, once one attempt has a majority for it."""
        for (_, choice), voters in self._votes.items():
            if len(voters) >= self._head.quorum:
                return choice
        return None


def value_to_finish(reports: list[Accepted | None]) -> Accepted | None:
    """What a leader must finish, given the promises of a majority: the vote of the highest attempt, if any was cast."""
    cast = [report for report in reports if report is not None]
    return max(cast, key=lambda accepted: accepted.attempt, default=None)
