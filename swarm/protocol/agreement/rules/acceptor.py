"""Single-decree Paxos for the round after one head: no schedule chooses two values.

An *attempt* is a ballot with one leader and one value. A voter promises, then votes for the attempt's value; the
leader of a later attempt collects the promises of a quorum and must propose the value of the highest attempt that
they report (Lamport, "Paxos Made Simple", 2001). Nothing can have been accepted below the first attempt, so its leader
needs no promises; a voter that has promised a later one refuses it all the same.

The functions are pure and independent of messages: `tests/simulation/test_exhaustive.py` drives these through all
schedules of small groups. The node persists a `Ballot` before it sends a promise or vote.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol, TypeVar

import msgspec

from peer.bounds import Count, Hash


class HasAttempt(Protocol):
    """Something accepted in an attempt."""

    @property
    def attempt(self) -> int: ...


Value = TypeVar("Value", bound=HasAttempt)


class Ballot(msgspec.Struct, frozen=True):
    """One voter's promise and votes for the round after one head. Attempts count from 0; -1: none."""

    promised: Count = -1
    voted_attempt: Count = -1
    """The attempt of the latest vote."""
    voted: Hash = b""
    """Its value."""

    @property
    def attempt(self) -> int:
        """The lowest attempt that may be under way: the one promised, or the first, which needs no promise."""
        return max(self.promised, 0)

    def promise(self, attempt: int) -> Ballot | None:
        """Promise to take part in no attempt below this one; None if a later one was promised or this one voted in."""
        if attempt < self.promised or attempt <= self.voted_attempt:
            return None
        return msgspec.structs.replace(self, promised=attempt)

    def vote(self, attempt: int, value: bytes) -> Ballot | None:
        """Vote for the value of an attempt: one an attempt, none below the promise. None if that is refused."""
        if attempt < self.promised or attempt < self.voted_attempt:
            return None
        if attempt == self.voted_attempt and value != self.voted:
            return None
        return msgspec.structs.replace(self, promised=attempt, voted_attempt=attempt, voted=value)


def needs_promises(attempt: int) -> bool:
    """Return whether a leader must ask what was accepted before: in the first attempt that is nothing."""
    return attempt > 0


def forced_value(accepted: Iterable[Value | None]) -> Value | None:
    """Return what a leader must propose, given what the promises of a quorum report as accepted (with evidence): the
    value of the highest attempt. None: it may propose a value of its own."""
    return max((value for value in accepted if value is not None), key=lambda value: value.attempt, default=None)
