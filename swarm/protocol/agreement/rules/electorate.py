"""The voters, leader and slice owners of a head, and its quorum: functions of the head, alike for every voter."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass

from blake3 import blake3

from swarm.protocol.agreement.config import Mode
from swarm.protocol.head import Head, Member
from swarm.protocol.shares import deal


@dataclass(frozen=True)
class Electorate:
    """The certificate predicate of one run."""

    mode: Mode

    def witness(self, head: Head) -> Member | None:
        """Return the coordinator if it is a voter of this head: always where it is required; else if the number of
        members is even, so that one lost member of two or four is no lost majority."""
        if head.members and (self.mode == "required" or len(head.members) % 2 == 0):
            return head.witness
        return None

    def voters(self, head: Head) -> tuple[Member, ...]:
        """Return all voters, the witness last."""
        witness = self.witness(head)
        return head.members if witness is None else (*head.members, witness)

    @staticmethod
    def members_needed(members: int) -> int:
        """Return how many votes of `members` a certificate needs; in `witness` mode the witness's may be one."""
        return members // 2 + 1

    def enough(self, head: Head, voters: Collection[Member]) -> bool:
        """Return whether the votes (or promises) of these voters are a quorum of the head."""
        return self.is_quorum(head.members, self.witness(head), voters)

    def is_quorum(self, members: Sequence[Hashable], witness: Hashable | None, voters: Collection[Hashable]) -> bool:
        """The same, for any names of voters. Two quorums share a voter."""
        if not members:
            return False
        cast = sum(member in voters for member in members)
        if self.mode == "required":
            return cast >= self.members_needed(len(members)) and witness in voters
        if witness is not None and witness in voters:  # of an even number of members
            cast += 1
        return cast >= self.members_needed(len(members) + (witness is not None))

    def completes(self, head: Head, voters: Collection[Member]) -> bool:
        """Return whether the witness's vote would make these a certificate, and they are none without it.

        It votes last: its vote, without weights, must not replace a member's that may still come."""
        witness = self.witness(head)
        if witness is None:
            return False
        others = {voter for voter in voters if voter != witness}
        return not self.enough(head, others) and self.enough(head, {*others, witness})


def leader_of(head: Head, head_hash: bytes, attempt: int) -> Member:
    """Return the member that leads that attempt of the round after this head, which must have members."""
    return head.members[(int.from_bytes(head_hash[:8], "big") + attempt) % len(head.members)]


def attempt_of(head: Head, head_hash: bytes, member: Member, floor: int) -> int:
    """Return the lowest attempt >= `floor` that the member leads."""
    first = head.members.index(member)
    return floor + (first - int.from_bytes(head_hash[:8], "big") - floor) % len(head.members)


def owners_of(
    head_hash: bytes, contributors: Sequence[Member], slices: int, weights: Sequence[int] = ()
) -> tuple[Member, ...]:
    """Return the owner of each slice: contiguous parts in proportion to `weights`, equal ones without, in an order that
    the head fixes and no peer chooses.

    `contributors`: the members of the head that are in the roster."""
    start = int.from_bytes(blake3(head_hash).digest()[:8], "big") % len(contributors)
    order = [*contributors[start:], *contributors[:start]]
    if len(set(weights)) < 2:
        return tuple(order[index * len(order) // slices] for index in range(slices))
    counts = deal([*weights[start:], *weights[:start]], slices)
    return tuple(owner for owner, count in zip(order, counts, strict=True) for _ in range(count))


def room_for_newcomers(members: int) -> int:
    """Return how many newcomers one round may take in, and how many learners it may make members: a minority, or
    one."""
    return max(1, (members - 1) // 2)
