"""One node's knowledge and promises for the round after one head. Dropped when it leaves the head."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, TypeVar

import msgspec
from blake3 import blake3

from peer.bounds import Latest
from peer.decoding import MALFORMED
from peer.identity import Signed
from swarm.protocol.agreement import messages as msg
from swarm.protocol.agreement.records import BallotRecord
from swarm.protocol.agreement.rules.acceptor import Ballot
from swarm.protocol.agreement.rules.opened_roster import OpenedRoster
from swarm.protocol.head import Head, Member
from swarm.protocol.plan import WorkPlan

ATTEMPTS_KEPT: Final = 16  # of votes, rosters and proposals; a round seldom takes more than two or three
EXCHANGES_KEPT: Final = 3


Kept = TypeVar("Kept")


@dataclass
class Exchange:
    """One exchange: its roster, the owners' results, and what was built of them."""

    opened: OpenedRoster
    results: dict[Member, tuple[Signed, msg.ResultsBody]] = field(default_factory=dict)
    merged: dict[int, bytes] = field(default_factory=dict)
    """Hashes of the slices that this node has merged as an owner."""
    my_results: Signed | None = None
    voters: set[str] = field(default_factory=set)
    """Peers that have voted for what this leads to."""
    building: dict[bytes, bytes | None] = field(default_factory=dict)
    """State hashes by what was built from (see `name_build`); None while it is being built as `Build` asks."""
    building_at: float = 0.0
    """When the exchange or the last build began."""
    failed: bool = False
    """Whether a build of it has failed here: what its owners sent did not come, or did not decode."""

    @property
    def support(self) -> msg.Support:
        """The inputs of the next head. All results must be known."""
        results = tuple(self.results[owner][0] for owner in self.opened.parts)
        return msg.Support(self.opened.signed_plan, self.opened.signed, results)

    @property
    def hashes(self) -> tuple[bytes, ...] | None:
        """The hash of each slice's result; None while an owner's are missing."""
        return self.opened.hashes({owner: body for owner, (_, body) in self.results.items()})


@dataclass(frozen=True)
class Proposed:
    """A checked proposal: the one value of an attempt."""

    signed: Signed
    value: Head
    hash: bytes
    support: msg.Support
    exchange: Exchange
    """With the results that the proposal names."""


@dataclass
class Instance:
    """The decree for what follows `head`, as one node sees it."""

    head: Head
    hash: bytes
    ballot: Ballot = field(default_factory=Ballot)
    accepted: msg.AcceptedValue | None = None
    support: msg.Support | None = None
    """Of the accepted value."""
    plan: WorkPlan | None = None
    signed_plan: Signed | None = None
    planned_at: float = 0.0
    contribution: Signed | None = None
    missing: tuple[tuple[str, ...], tuple[str, ...]] | None = None
    exchanges: Latest[bytes, Exchange] = field(default_factory=lambda: Latest(EXCHANGES_KEPT))
    rosters: dict[int, Signed] = field(default_factory=dict)
    """The one roster of each attempt."""
    proposed: dict[int, Proposed] = field(default_factory=dict)
    votes: dict[Member, dict[int, tuple[bytes, Signed]]] = field(default_factory=dict)
    """Value and signed body, by voter and attempt."""
    told: dict[Member, msg.Measurements] = field(default_factory=dict)
    """Measurements that voters reported with their votes."""
    here: dict[Member, msg.Measurements] | None = None
    """Voters for this head, which hold its state, with their measurements. None: the head was found on disk, so an
    earlier process may have led the first attempt."""

    @classmethod
    def load(cls, head: Head, head_hash: bytes, record: bytes | None) -> Instance:
        """Return the instance after a head that was found on disk, with the promises and votes there."""
        instance = cls(head, head_hash)
        if record is not None:
            try:
                stored = msgspec.msgpack.decode(record, type=BallotRecord)
            except MALFORMED:
                return instance
            if stored.head == head_hash:
                instance.ballot, instance.accepted, instance.support = stored.ballot, stored.accepted, stored.support
        return instance

    @property
    def plan_hash(self) -> bytes | None:
        return self.plan.hash if self.plan is not None else None

    @property
    def roster_hash(self) -> bytes:
        """The hash of the last roster; empty without one."""
        return next(reversed(self.exchanges), b"")

    @property
    def record(self) -> BallotRecord:
        return BallotRecord(self.hash, self.ballot, self.accepted, self.support)

    def exchange_of(self, value: Head) -> bytes:
        """Return the name of the exchange that leads to a value; empty if it is not known here."""
        if self.accepted is not None and self.accepted.value == value and self.support is not None:
            return blake3(self.support.roster.body).digest()
        return next((known.exchange.opened.key for known in self.proposed.values() if known.value == value), b"")

    def set_roster(self, attempt: int, signed: Signed) -> None:
        """Remember the one roster of an attempt, of a bounded number of attempts."""
        self.rosters.setdefault(attempt, signed)
        _prune(self.rosters)

    def set_proposed(self, attempt: int, proposed: Proposed) -> None:
        """Remember the one proposal of an attempt, of a bounded number of attempts."""
        self.proposed[attempt] = proposed
        _prune(self.proposed)

    def voters_of(self, value: bytes) -> dict[Member, msg.Measurements]:
        """Return the voters for that value in any attempt, with their measurements."""
        found = (voter for voter, cast in sorted(self.votes.items()) if any(name == value for name, _ in cast.values()))
        return {voter: self.told.get(voter, msg.Measurements()) for voter in found}

    def votes_for(self, attempt: int, value: bytes) -> dict[Member, Signed]:
        """Return the votes for that value in that attempt, by voter."""
        found = {}
        for voter in sorted(self.votes):
            vote = self.votes[voter].get(attempt)
            if vote is not None and vote[0] == value:
                found[voter] = vote[1]
        return found


def _prune(by_attempt: dict[int, Kept]) -> None:
    while len(by_attempt) > ATTEMPTS_KEPT:
        del by_attempt[min(by_attempt)]


def record_once(cast: dict[int, tuple[bytes, Signed]], attempt: int, value: bytes, signed: Signed) -> Signed | None:
    """Record one voter's vote of an attempt. Return the other vote if it voted otherwise in that attempt.

    Attempts below the kept window are refused, so that dropping old ones lets no second vote in."""
    if attempt in cast:
        return cast[attempt][1] if cast[attempt][0] != value else None
    if len(cast) >= ATTEMPTS_KEPT:
        if attempt < min(cast):
            return None
        del cast[min(cast)]
    cast[attempt] = (value, signed)
    return None


def name_build(key: bytes, hashes: tuple[bytes, ...]) -> bytes:
    """Return the name of the state that an exchange's results lead to, before its hash is known."""
    return blake3(key + b"".join(hashes)).digest()
