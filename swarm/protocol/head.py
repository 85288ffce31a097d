"""The chain of commits: the committed state and its members.

A *head* names one committed state: its round, the hash of the outer state, and the members that vote on the next one.
Heads form a hash chain through `previous`. How a group agrees on the next head, and when a new *term* begins:
`swarm.protocol.agreement`."""

from __future__ import annotations

from typing import Annotated, Final

import msgspec
from blake3 import blake3

from peer.bounds import MEMBERS_MAX, Count, Hash, Name
from swarm.protocol.ledger import Ledger

SPONSORS_MAX: Final = 4  # of one peer


class Member(msgspec.Struct, frozen=True, order=True):
    """One incarnation of a peer. A peer that has lost its promises with its disk has the same id and another session:
    it is not the same member."""

    peer: Name
    session: Name


class Learner(msgspec.Struct, frozen=True, order=True):
    """A newcomer: planned for, but without a vote, a slice to own or a turn to lead until enough of its contributions
    were merged."""

    member: Member
    merged: Count
    """Its contributions that were merged."""
    missed: Count = 0
    """Rounds in a row without one."""


class Absence(msgspec.Struct, frozen=True, order=True):
    """A member without a contribution in the last rounds."""

    member: Member
    rounds: Count
    """Such rounds in a row, each with another leader than the one before."""
    leader: Member
    """The leader of the last of them."""


class Sponsor(msgspec.Struct, frozen=True, order=True, array_like=True):
    """A key that vouches for peers: an invite, or a member that invites."""

    key: Name
    """Its name: the hash of the public key."""
    guests: Count
    """How many peers it may bring in, directly or through those."""


class Sponsorship(msgspec.Struct, frozen=True, order=True, array_like=True):
    """One key that vouches for one member or learner."""

    sponsor: Sponsor
    peer: Name


class Head(msgspec.Struct, frozen=True):
    """One committed state of a run."""

    run_id: Name
    """The id of the group: the run's, and in a pipeline the stage's."""
    term: Count
    round: Count
    previous: Hash
    state_hash: Hash
    members: Annotated[tuple[Member, ...], msgspec.Meta(max_length=MEMBERS_MAX)]
    ledger: Ledger
    inner_step: Count
    """The run's position in the learning-rate schedule."""
    tokens: Count
    """Tokens that all contributors together have trained on so far."""
    boot: Count = 0
    """The second part of the term: two starts of one number by two processes of the coordinator are two terms."""
    witness: Member | None = None
    """The coordinator as a voter without weights (see `swarm.protocol.agreement.rules.electorate`)."""
    learners: Annotated[tuple[Learner, ...], msgspec.Meta(max_length=MEMBERS_MAX)] = ()
    absent: Annotated[tuple[Absence, ...], msgspec.Meta(max_length=MEMBERS_MAX)] = ()
    sponsored: Annotated[tuple[Sponsorship, ...], msgspec.Meta(max_length=SPONSORS_MAX * MEMBERS_MAX)] = ()
    """Sponsors of the members and learners, in a closed run."""
    senders: Annotated[tuple[Name, ...], msgspec.Meta(max_length=2 * MEMBERS_MAX)] = ()
    """At a later stage of a pipeline: the peers of the stage before, as last proved, whose receipts count."""
    attempt: Count = -1
    """The attempt whose roster led here; -1 for the first head of a term."""

    @property
    def hash(self) -> bytes:
        """32 bytes that name this head and, through `previous`, all heads before it."""
        return blake3(_ENCODER.encode(self)).digest()

    @property
    def quorum(self) -> int:
        """The number of members that must agree on the next head: a strict majority."""
        return len(self.members) // 2 + 1

    def has(self, member: Member) -> bool:
        return member in self.members


def genesis(run_id: str, state_hash: bytes) -> Head:
    """Return the head of round 0: the initial state, without members."""
    return Head(
        run_id=run_id,
        term=0,
        round=0,
        previous=b"",
        state_hash=state_hash,
        members=(),
        ledger=Ledger(),
        inner_step=0,
        tokens=0,
    )


_ENCODER: Final = msgspec.msgpack.Encoder(order="deterministic")
