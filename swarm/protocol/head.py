"""The chain of commits: who holds what, since when, and who leads the next round.

A *head* names one committed state: its round, the hash of the outer state, and the members that took part. Heads form
a hash chain through `previous`. The members of a head, and nobody else, vote on the next one; a majority of them must
agree. Where a majority is gone only the run's authority can go on, by signing a head of a higher *term* over the same
state."""

from __future__ import annotations

from typing import Annotated, Final

import msgspec
from blake3 import blake3

from swarm.protocol.ledger import Ledger

MEMBERS_MAX: Final = 4096
HASH_BYTES: Final = 32
Name = Annotated[str, msgspec.Meta(max_length=64)]
Hash = Annotated[bytes, msgspec.Meta(max_length=HASH_BYTES)]
Count = Annotated[int, msgspec.Meta(ge=-1, le=1 << 53)]  # -1 stands for "before the first"

TRIES_PER_LEADER: Final = 8  # a leader whose attempt fails retries at once; only then does the next one take over


class Member(msgspec.Struct, frozen=True, order=True):
    """One life of one peer. A restarted peer has the same id and another session: it forgot what it promised,
    so it does not count as the member it was (see `swarm.protocol.paxos`)."""

    peer: Name
    session: Name


class Head(msgspec.Struct, frozen=True):
    """One committed state of a run. `inner_step` is the run's position in the learning-rate schedule,
    `tokens` the number of tokens trained on so far by all contributors together."""

    run_id: Name
    term: Count
    round: Count
    previous: Hash
    state_hash: Hash
    members: Annotated[tuple[Member, ...], msgspec.Meta(max_length=MEMBERS_MAX)]
    ledger: Ledger
    inner_step: Count
    tokens: Count

    @property
    def hash(self) -> bytes:
        """32 bytes that name this head and, through `previous`, the whole chain behind it."""
        return blake3(_ENCODER.encode(self)).digest()

    @property
    def quorum(self) -> int:
        """How many members must agree on the next head: a strict majority."""
        return len(self.members) // 2 + 1

    @property
    def position(self) -> tuple[int, int]:
        """(term, round): heads of one run compare by this; a higher one supersedes a lower one."""
        return (self.term, self.round)

    def has(self, member: Member) -> bool:
        return member in self.members

    def leader(self, attempt: int) -> Member:
        """Who may lead attempt number `attempt` of the round after this head, which has members. No fixed host: the
        order starts at a place that the head's own hash picks."""
        order = len(self.members)
        start = int.from_bytes(self.hash[:8], "big")
        return self.members[(start + attempt // TRIES_PER_LEADER) % order]

    def next_attempt(self, floor: int, suspects: frozenset[str]) -> int:
        """The lowest attempt >= `floor` whose leader is not suspected; `floor` itself if all of them are."""
        for attempt in range(floor, floor + len(self.members) * TRIES_PER_LEADER):
            if self.leader(attempt).peer not in suspects:
                return attempt
        return floor

    def regrouped(self, members: tuple[Member, ...], term: int) -> Head:
        """The same state in a later term with other members; valid only when the authority has signed it."""
        return msgspec.structs.replace(self, term=term, previous=self.hash, members=tuple(sorted(members)))


def genesis(run_id: str, state_hash: bytes) -> Head:
    """Round 0: the initial state, which nobody has joined yet."""
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
