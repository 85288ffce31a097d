"""Proofs by signed bodies: promises, accepted values, votes, certificates, contradictions. Raises
`ProtocolViolation`."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator
from typing import Final

import msgspec

from peer.bounds import Hash
from peer.decoding import MALFORMED
from peer.errors import ProtocolViolation
from peer.identity import Signed
from swarm.protocol.agreement import messages as msg
from swarm.protocol.agreement.config import AgreementConfig
from swarm.protocol.agreement.packing import unpacked
from swarm.protocol.agreement.rules.acceptor import forced_value, needs_promises
from swarm.protocol.agreement.rules.electorate import Electorate, leader_of
from swarm.protocol.agreement.signing import Body, Signer
from swarm.protocol.head import Head, Member
from swarm.protocol.plan import PLAN_KIND, WorkPlan

PROPOSAL: Final = "agreement.proposal"
ROSTER: Final = "agreement.roster"
RESULTS: Final = "agreement.results"
PROMISE: Final = "agreement.promise"
VOTE: Final = "agreement.vote"
START: Final = "agreement.start"
ENDORSEMENT: Final = "agreement.endorsement"
JOIN: Final = "agreement.join"
WITNESS: Final = "agreement.witness"

ONE_AN_ATTEMPT: Final[dict[str, type[msgspec.Struct]]] = {
    PROPOSAL: msg.ProposalBody,
    ROSTER: msg.RosterBody,
    RESULTS: msg.ResultsBody,
    VOTE: msg.VoteBody,
    PLAN_KIND: WorkPlan,
}
"""Bodies that one signer may make only once for a (head, attempt)."""


class Evidence:
    """Opens and judges signed bodies. Stateless."""

    def __init__(self, signer: Signer, electorate: Electorate, config: AgreementConfig) -> None:
        self._signer, self._electorate, self._config = signer, electorate, config

    def promise(self, signed: Signed) -> msg.PromiseBody:
        """Open a promise that its voter has signed."""
        body = self._signer.open(signed, PROMISE, msg.PromiseBody)
        self._require_voter(signed, body.voter, "promise")
        return body

    def vote(self, signed: Signed) -> msg.VoteBody:
        """Open a vote that its voter has signed."""
        body = self._signer.open(signed, VOTE, msg.VoteBody)
        self._require_voter(signed, body.voter, "vote")
        return body

    def join(self, signed: Signed) -> msg.JoinBody:
        """Open a join request that the peer itself has signed."""
        body = self._signer.open(signed, JOIN, msg.JoinBody)
        self._require_voter(signed, body.member, "join request")
        return body

    def start(self, signed: Signed) -> msg.StartBody:
        """Open a start of term of this group that the coordinator has signed."""
        body = self._signer.open(signed, START, msg.StartBody)
        self._require_coordinator(signed, "start")
        if body.head.run_id != self._config.genesis.run_id or not body.head.members:
            raise ProtocolViolation("a start of term belongs to another group or has no members")
        return body

    def witness(self, signed: Signed) -> Member:
        """Return the coordinator's present identity as a witness, as it declares."""
        body = self._signer.open(signed, WITNESS, msg.WitnessBody)
        self._require_coordinator(signed, "witness")
        if body.run_id != self._config.genesis.run_id or body.witness.peer != self._config.coordinator:
            raise ProtocolViolation("a witness is not the coordinator of this group")
        return body.witness

    def endorsed(self, signed: Signed) -> bytes:
        """Return the hash of the head that the coordinator endorses."""
        body = self._signer.open(signed, ENDORSEMENT, msg.EndorsementBody)
        self._require_coordinator(signed, "endorsement")
        return body.head

    def proposal(self, signed: Signed, head: Head, head_hash: bytes) -> msg.ProposalBody:
        """Open the proposal of an attempt after `head`, signed by its leader."""
        body = self._signer.open(signed, PROPOSAL, msg.ProposalBody)
        if body.head != head_hash or not is_leader(head, head_hash, body.attempt, signed.signer):
            raise ProtocolViolation("a proposal is signed by another peer than the attempt's leader")
        return body

    def counts(self, accepted: msg.AcceptedValue, head: Head, head_hash: bytes, below: float = math.inf) -> bool:
        """Return whether what a peer reports as accepted is proved: its attempt, below `below`, had that value. Without
        this one voter could make up an attempt that all later leaders had to respect."""
        value = accepted.value.hash
        if not 0 <= accepted.attempt < below or accepted.value.previous != head_hash:
            return False
        try:
            body = self.proposal(accepted.proposal, head, head_hash)
        except ProtocolViolation:
            return False
        return (body.attempt, body.value) == (accepted.attempt, value)

    def justified(self, promises: Iterable[Signed], head: Head, head_hash: bytes, attempt: int) -> ForcedBy:
        """Check the promises of a proposal: those of a quorum, for this attempt; the first attempt needs none. Return
        the value they force.

        The voters do this themselves instead of trusting the leader."""
        if not needs_promises(attempt):
            return ForcedBy(None)
        accepted: dict[Member, msg.AcceptedValue | None] = {}
        for signed in self._by_voters(promises, head):
            body = self.promise(signed)
            if (body.head, body.attempt) != (head_hash, attempt):
                raise ProtocolViolation("a proposal rests on promises of another attempt")
            if body.accepted is not None and not self.counts(body.accepted, head, head_hash, attempt):
                raise ProtocolViolation("a proposal rests on an accepted value without evidence")
            accepted[body.voter] = body.accepted
        if not self._electorate.enough(head, accepted):
            raise ProtocolViolation("a proposal rests on the promises of too few voters")
        forced = forced_value(accepted.values())
        value = forced.value.hash if forced is not None else b""
        voters = {voter for voter, said in accepted.items() if said is not None and said.value.hash == value}
        return ForcedBy(forced, tuple(sorted(voters)))

    def certificate(self, link: msg.ChainLink, before: Head, before_hash: bytes) -> None:
        """Raise unless the link's votes are those of a quorum of the head before it, in one attempt."""
        head, value = link.head, link.head.hash
        if head.previous != before_hash or (head.term, head.boot) != (before.term, before.boot):
            raise ProtocolViolation("a chain of heads is broken")
        if head.run_id != before.run_id or head.round != before.round + 1:
            raise ProtocolViolation("a chain of heads skips a round")
        cast = []
        for signed in self._by_voters(link.votes, before):
            cast.append(self.vote(signed))
            if (cast[-1].head, cast[-1].value) != (before_hash, value):  # before another signature is checked
                raise ProtocolViolation("a certificate has votes for another head")
        if len({vote.attempt for vote in cast}) != 1:
            raise ProtocolViolation("a certificate mixes the votes of several attempts")
        if not self._electorate.enough(before, {vote.voter for vote in cast}):
            raise ProtocolViolation("a certificate has too few votes")

    def link_counts(self, link: msg.ChainLink, before: Head | None) -> bool:
        """Return whether the link's head counts after `before` (None: not known). Raises if nothing makes it count."""
        if self.is_signed_for(link):
            return True
        if before is None:
            return self.is_vouched_for(link)
        self.certificate(link, before, link.head.previous)
        return True

    def is_signed_for(self, link: msg.ChainLink) -> bool:
        """Return whether the coordinator says that the head counts, by a start or an endorsement."""
        if link.start is not None:
            if self.start(link.start).head != link.head:
                raise ProtocolViolation("a start of term is for another head")
            return True
        return link.endorsement is not None and self.endorsed(link.endorsement) == link.head.hash

    def require_signed_by(self, peer: str, link: msg.ChainLink) -> None:
        """Raise unless that peer has really signed the link's start or endorsement, or the votes that bear its name."""
        if (link.start or link.endorsement) is not None and not self.is_signed_for(link):
            raise ProtocolViolation("an endorsement is for another head")
        for vote in [self.vote(signed) for signed in link.votes if signed.signer == peer]:
            if (vote.head, vote.value) != (link.head.previous, link.head.hash):
                raise ProtocolViolation("a certificate has votes for another head")

    def is_vouched_for(self, link: msg.ChainLink) -> bool:
        """Return whether the coordinator itself has completed this certificate: it has checked the chain up to it."""
        signed = self._own_vote(link)
        if signed is None:
            return False
        vote = self.vote(signed)
        return (vote.head, vote.value) == (link.head.previous, link.head.hash)

    def _own_vote(self, link: msg.ChainLink) -> Signed | None:
        if self._electorate.mode != "required":
            return None
        return next((signed for signed in link.votes if signed.signer == self._config.coordinator), None)

    def anchor(self, link: msg.ChainLink) -> msg.ChainLink | None:
        """Return the link with only the coordinator's signature for it, so that it counts without the links before;
        None if it has none."""
        if self.is_signed_for(link):
            return msg.ChainLink(link.head, start=link.start, endorsement=None if link.start else link.endorsement)
        signed = self._own_vote(link)
        if signed is None or not self.is_vouched_for(link):
            return None
        return msg.ChainLink(link.head, votes=(signed,))

    def bare_certificate(self, link: msg.ChainLink, before: Head) -> msg.ChainLink:
        """Return a link that follows `before` with the votes of a bare quorum: the one received may have any others."""
        voters, chosen = self._electorate.voters(before), dict[Member, Signed]()
        for signed in self._by_voters(link.votes, before):
            voter = self.vote(signed).voter
            if voter in voters and not self._electorate.enough(before, chosen):
                chosen[voter] = signed
        return msg.ChainLink(link.head, votes=tuple(chosen.values()))

    def culprit(self, proof: msg.Contradiction) -> str:
        """Return the peer that a contradiction proves guilty, or raise `ProtocolViolation` if it proves nothing."""
        type_ = ONE_AN_ATTEMPT.get(proof.kind)
        if type_ is None or proof.first.signer != proof.second.signer or proof.first.body == proof.second.body:
            raise ProtocolViolation("a contradiction is not one of two bodies by one peer")
        first = self._signer.open(proof.first, proof.kind, type_)
        second = self._signer.open(proof.second, proof.kind, type_)
        if first == second or _slot(first) != _slot(second):
            raise ProtocolViolation("a contradiction is not one: both bodies may stand")
        return proof.first.signer

    def _by_voters(self, bodies: Iterable[Signed], head: Head) -> list[Signed]:
        """Return the bodies that voters of a head have signed, at most twice as many as voters. A message may be full
        of bodies of other keys, and checking a signature costs more than all else about it."""
        voters = {voter.peer for voter in self._electorate.voters(head)}
        return list(itertools.islice((signed for signed in bodies if signed.signer in voters), 2 * len(voters)))

    def _require_voter(self, signed: Signed, voter: Member, what: str) -> None:
        if signed.signer != voter.peer:
            raise ProtocolViolation(f"a {what} is signed by another peer than it names")

    def _require_coordinator(self, signed: Signed, what: str) -> None:
        if signed.signer != self._config.coordinator:
            raise ProtocolViolation(f"a {what} is not signed by the coordinator")


class ForcedBy(msgspec.Struct, frozen=True):
    """The value that checked promises allow a proposal: `accepted`, or any value if None."""

    accepted: msg.AcceptedValue | None
    voters: tuple[Member, ...] = ()
    """The voters that report it: they have on disk what it is built from."""


def is_leader(head: Head, head_hash: bytes, attempt: int, peer: str) -> bool:
    """Return whether that peer leads that attempt."""
    return bool(head.members) and attempt >= 0 and leader_of(head, head_hash, attempt).peer == peer


def _slot(body: msgspec.Struct) -> tuple[object, ...]:
    """Return the key of which a signer may make one body: the ballot, a voter's incarnation, an owner's exchange."""
    kind = type(body).__name__
    return (
        kind,
        getattr(body, "head", None),
        getattr(body, "attempt", None),
        getattr(body, "voter", None),
        getattr(body, "key", None),
    )


def head_named(message: msg.Message) -> bytes:
    """Return the hash of the head whose round a message names, before any signature is checked: for other rounds none
    ever is. Raises `ProtocolViolation` if a body is malformed."""
    match message:
        case msg.PrepareMessage() | msg.PlanMessage() | msg.SubmitMessage() | msg.RosterMessage():
            return message.head
        case msg.ResultsMessage():
            return message.head
        case msg.PromiseMessage():
            return _read(message.promise, _Named).head
        case msg.ProposalMessage() | msg.ShortProposalMessage():
            return _read(message.proposal, _Named).head
        case msg.VoteMessage():
            return _read(message.vote, _Named).head
        case _:
            return b""


def signed_in(message: msg.Message, head: Head) -> Iterator[tuple[str, Signed]]:
    """Yield the signed bodies in the links of a message, with their kinds: a page of links has so many that a driver
    may check them before its node, which is at `head`, does. Of votes only those that the node will check if the links
    are valid."""
    try:
        message = unpacked(message)
    except ProtocolViolation:
        return  # as its receiver finds, too
    links = message.links if isinstance(message, msg.ChainMessage | msg.ReportMessage) else ()
    for link in links:
        yield from ((VOTE, signed) for signed in _by_peers_of(head, link.votes))
        yield from ((START, signed) for signed in (link.start,) if signed is not None)
        yield from ((ENDORSEMENT, signed) for signed in (link.endorsement,) if signed is not None)
        head = link.head


def _by_peers_of(head: Head, bodies: Iterable[Signed]) -> Iterator[Signed]:
    peers = {member.peer for member in (*head.members, *((head.witness,) if head.witness else ()))}
    return itertools.islice((signed for signed in bodies if signed.signer in peers), 2 * len(peers))


def claimed_vote(message: msg.VoteMessage) -> msg.VoteBody:
    """Return the body of a vote, unchecked. Raises `ProtocolViolation` if it is malformed."""
    return _read(message.vote, msg.VoteBody)


class _Named(msgspec.Struct, frozen=True):
    head: Hash


def _read(signed: Signed, type_: type[Body]) -> Body:
    try:
        return msgspec.msgpack.decode(signed.body, type=type_)
    except MALFORMED as error:
        raise ProtocolViolation("a body is malformed") from error
