"""The messages of the agreement, and the bodies that are signed inside them.

A body is signed for its kind and names the head that it follows (`head`, a hash that covers the run and the group), so
no body counts for another run, head or purpose. An *attempt* is a ballot of Paxos; a head is its value.

Receivers are idempotent: any message may be lost, late, doubled or out of order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Final

import msgspec

from peer.bounds import MEMBERS_MAX, SLICES_MAX, Count, Hash, Name, Names, Rate
from peer.identity import Signed
from swarm.protocol.head import Head, Member
from swarm.protocol.shares import CODES_EACH

CREDENTIAL_BYTES_MAX: Final = 1024
UNPACKED_MAX: Final = 1 << 20  # bytes of a packed message, deflated or not: as one call holds
LINKS_MAX: Final = 64  # in one message
SIGNED_MAX: Final = MEMBERS_MAX

Rates = Annotated[bytes, msgspec.Meta(max_length=CODES_EACH * MEMBERS_MAX)] | msgspec.UnsetType
"""A voter's measurements of the links of the members of a head, in order (`swarm.protocol.shares.links_of`)."""
SignedBodies = Annotated[tuple[Signed, ...], msgspec.Meta(max_length=SIGNED_MAX)]
Position = tuple[Count, Count, Count]
"""(term, boot, round) of a head: the higher one supersedes the lower one."""

# -- signed bodies -----------------------------------------------------------------------------------------------------


class ProposalBody(msgspec.Struct, frozen=True):
    """The one value of an attempt, signed by its leader. Two different ones are a proof against it."""

    head: Hash
    attempt: Count
    value: Hash
    """The hash of the proposed head."""


class Contradiction(msgspec.Struct, frozen=True):
    """A transferable proof: two bodies of one signer and kind that differ where only one may be."""

    kind: Name
    first: Signed
    second: Signed


class RosterBody(msgspec.Struct, frozen=True):
    """The inputs that an attempt merges, signed by its leader: owners, members, learners and ledger of the next head
    follow from it. Two different ones of one attempt are a proof against the leader."""

    head: Hash
    attempt: Count
    plan: Hash
    contributions: SignedBodies
    """Signed `Contribution`s, in order of member."""
    joins: SignedBodies = ()
    """The signed `JoinBody` of each contributor that is neither member nor learner."""
    proofs: Annotated[tuple[Contradiction, ...], msgspec.Meta(max_length=MEMBERS_MAX)] = ()
    """Proofs against members or learners, which the next head leaves out."""
    witness: Signed | None = None
    """A `WitnessBody`, if the coordinator has another identity as witness than the head names."""


class ResultsBody(msgspec.Struct, frozen=True):
    """The results of one owner, signed by it: the hash of each slice that it owns, in order of index. Two different
    ones of one exchange are a proof against it."""

    head: Hash
    attempt: Count
    key: Hash
    """The exchange: the hash of the signed roster."""
    hashes: Annotated[tuple[Hash, ...], msgspec.Meta(max_length=SLICES_MAX)]


class Support(msgspec.Struct, frozen=True):
    """The inputs of a value. Every voter derives the value from it, and builds the state from it."""

    plan: Signed
    roster: Signed
    results: SignedBodies
    """A `ResultsBody` of each owner, in order of first slice."""


class AcceptedValue(msgspec.Struct, frozen=True):
    """The last value that a voter has voted for, with the proof that its attempt had that value."""

    attempt: Count
    value: Head
    proposal: Signed
    """The leader's signed `ProposalBody`."""


class PromiseBody(msgspec.Struct, frozen=True):
    """A voter's promise to take part in no attempt below this one."""

    head: Hash
    attempt: Count
    voter: Member
    accepted: AcceptedValue | None = None


class VoteBody(msgspec.Struct, frozen=True):
    """A vote for the head with hash `value`. A quorum of one attempt's votes for one value is its certificate."""

    head: Hash
    attempt: Count
    value: Hash
    voter: Member


class StartBody(msgspec.Struct, frozen=True):
    """The first head of a term, signed by the coordinator. A term has one start."""

    head: Head
    undoes: Annotated[tuple[Hash, ...], msgspec.Meta(max_length=LINKS_MAX)] = ()
    """Certified heads that this start undoes, because no peer could bring their state."""


class EndorsementBody(msgspec.Struct, frozen=True):
    """The coordinator has checked the chain up to the head with this hash, so that newcomers need no longer chain."""

    head: Hash


class JoinBody(msgspec.Struct, frozen=True):
    """A peer's own request to be taken in: it holds the state of the head with hash `head`."""

    head: Hash
    member: Member
    credential: Annotated[bytes, msgspec.Meta(max_length=CREDENTIAL_BYTES_MAX)] = b""
    """The peer's credential, checked by the run's rules (`work.Work.sponsors`). Empty in an open run."""


class WitnessBody(msgspec.Struct, frozen=True):
    """The coordinator's present identity as a witness. It is new with each process, since promises are not on its
    disk."""

    run_id: Name
    witness: Member


class ChainLink(msgspec.Struct, frozen=True):
    """A head with what makes it count. Exactly one of the three is given."""

    head: Head
    votes: SignedBodies = ()
    """`VoteBody`s of a quorum of the head before it."""
    start: Signed | None = None
    """The coordinator's `StartBody`."""
    endorsement: Signed | None = None
    """The coordinator's `EndorsementBody`."""


# -- messages ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Measurements:
    """A voter's measurements, reported to a leader."""

    speed: float = 0.0
    """Its own inner steps a second; 0 while unknown."""
    rates: bytes = b""
    """Of the links of a head's members (`Rates`); empty while unknown."""


class PrepareMessage(msgspec.Struct, frozen=True, tag="prepare"):
    """Phase 1a: the leader of `attempt` asks for promises."""

    head: Hash
    attempt: Count
    position: Position
    """The position of `head`."""


class PromiseMessage(msgspec.Struct, frozen=True, tag="promise"):
    """Phase 1b: a signed `PromiseBody`, and what the leader needs to continue. Newcomers answer too; theirs does not
    count."""

    promise: Signed
    support: Support | None = None
    """Of the accepted value."""
    speed: Rate = 0.0
    """Measurements inner steps a second; 0 while unknown."""
    plan: Signed | None = None
    """The plan that the sender works under."""
    contribution: Signed | None = None
    """Its contribution under that plan, if it is ready."""
    join: Signed | None = None
    """Its `JoinBody`, if it is neither member nor learner."""
    missing: tuple[Names, Names] | None = None
    """As `events.Missing`: contributors of all of the round's exchanges, owners of the last."""
    rates: Rates = msgspec.UNSET
    """Of the links of the members of the promise's head."""

    @property
    def measured(self) -> Measurements:
        return _measured(self.speed, self.rates)


class PlanMessage(msgspec.Struct, frozen=True, tag="plan"):
    """Work under this plan: a signed `WorkPlan` of this or an earlier attempt."""

    head: Hash
    attempt: Count
    plan: Signed
    finish_early: bool = False


class SubmitMessage(msgspec.Struct, frozen=True, tag="submit"):
    """A contribution to the plan, signed."""

    head: Hash
    contribution: Signed
    join: Signed | None = None


class RosterMessage(msgspec.Struct, frozen=True, tag="roster"):
    """Begin the exchange of this signed `RosterBody`."""

    head: Hash
    attempt: Count
    plan: Signed
    roster: Signed
    pass_on: Names = ()
    """Peers to which the receiver sends this on, if its leader asks it. Only those are named whose `status` has
    `roster`."""


class ResultsMessage(msgspec.Struct, frozen=True, tag="results"):
    """An owner's signed `ResultsBody`."""

    head: Hash
    results: Signed


class ProposalMessage(msgspec.Struct, frozen=True, tag="proposal"):
    """Phase 2a: the signed `ProposalBody`, its value, the promises that justify it (none in the first attempt) and what
    the value was made from."""

    proposal: Signed
    value: Head
    promises: SignedBodies
    support: Support


class ShortProposalMessage(msgspec.Struct, frozen=True, tag="short_proposal"):
    """A `ProposalMessage` to a voter whose `status` names the attempt's roster: the value follows from that."""

    proposal: Signed
    state: Hash
    """The hash of the value's state."""
    promises: SignedBodies
    roster: Hash
    results: SignedBodies
    """As in `Support`."""


class VoteMessage(msgspec.Struct, frozen=True, tag="vote"):
    """Phase 2b: a signed `VoteBody`. It also shows the next leader that its sender holds the state of the value."""

    vote: Signed
    speed: Rate = 0.0
    """As in a promise."""
    rates: Rates = msgspec.UNSET
    """Of the links of the members of the head that it votes for."""

    @property
    def measured(self) -> Measurements:
        return _measured(self.speed, self.rates)


class StatusMessage(msgspec.Struct, frozen=True, tag="status"):
    """The sender's head: all of the idle traffic. A peer asks for the chain only if the head is higher than its own."""

    position: Position
    head: Hash
    voter: Member
    answer: bool = False
    """An answer is not answered."""
    attempt: Count = 0
    """The attempt whose leader the sender waits for; a peer that waits for a lower one in vain follows."""
    plan: Hash | None = None
    """The hash of the plan that the sender has, so that its leader sends that once."""
    roster: Hash | None = None
    """As `plan`, of the last roster; empty without one. A sender of it passes rosters on and takes short proposals."""
    unpacks: bool = False
    """Whether the sender takes packed messages."""


class AskChainMessage(msgspec.Struct, frozen=True, tag="ask_chain"):
    """Asks for the chain of heads after the last of these that the receiver has."""

    known: Annotated[tuple[Hash, ...], msgspec.Meta(max_length=LINKS_MAX)]


class ChainMessage(msgspec.Struct, frozen=True, tag="chain"):
    """Consecutive heads, oldest first. The first one follows a head that the receiver knows, or counts by itself."""

    links: Annotated[tuple[ChainLink, ...], msgspec.Meta(max_length=LINKS_MAX)]


class JoinMessage(msgspec.Struct, frozen=True, tag="join"):
    """A signed `JoinBody`."""

    join: Signed


class WitnessMessage(msgspec.Struct, frozen=True, tag="witness"):
    """A signed `WitnessBody`."""

    witness: Signed


class EndorsementMessage(msgspec.Struct, frozen=True, tag="endorsement"):
    """A signed `EndorsementBody`."""

    endorsement: Signed


class AskMessage(msgspec.Struct, frozen=True, tag="ask"):
    """The coordinator asks a peer for its head and states before it starts a term."""

    nonce: Name
    head: Hash
    """The coordinator's head."""


class ReportMessage(msgspec.Struct, frozen=True, tag="told"):
    """The answer to `AskMessage`."""

    nonce: Name
    voter: Member
    position: Position
    head: Hash
    holds: Annotated[tuple[Hash, ...], msgspec.Meta(max_length=LINKS_MAX)]
    """Hashes of the states that the sender holds."""
    accepted: AcceptedValue | None = None
    support: Support | None = None
    links: Annotated[tuple[ChainLink, ...], msgspec.Meta(max_length=LINKS_MAX)] = ()
    """The chain from the coordinator's head to the sender's, which proves a higher position."""
    credential: Annotated[bytes, msgspec.Meta(max_length=CREDENTIAL_BYTES_MAX)] = b""
    """The sender's credential (`JoinBody`), should a term begin with newcomers."""


class ProofMessage(msgspec.Struct, frozen=True, tag="proof"):
    """A peer has signed two bodies where one is allowed: it is excluded from the group."""

    proof: Contradiction


class PackedMessage(msgspec.Struct, frozen=True, tag="packed"):
    """A long message, deflated (`packing.py`): to those whose `status` has `unpacks`."""

    deflated: Annotated[bytes, msgspec.Meta(max_length=UNPACKED_MAX)]


Message = (
    PrepareMessage
    | PromiseMessage
    | PlanMessage
    | SubmitMessage
    | RosterMessage
    | ResultsMessage
    | ProposalMessage
    | ShortProposalMessage
    | VoteMessage
    | StatusMessage
    | AskChainMessage
    | ChainMessage
    | JoinMessage
    | WitnessMessage
    | EndorsementMessage
    | AskMessage
    | ReportMessage
    | ProofMessage
    | PackedMessage
)


def _measured(speed: float, rates: Rates) -> Measurements:
    return Measurements(speed, rates if isinstance(rates, bytes) else b"")
