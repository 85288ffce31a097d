"""State that a node keeps across heads: its join request, those of others, its measurements, and proofs against
liars."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from peer.catalogue.groups import GroupFull
from peer.errors import ProtocolViolation
from peer.identity import Signed
from swarm.protocol.agreement import messages as msg
from swarm.protocol.agreement.chain import Chain
from swarm.protocol.agreement.context import AgreementContext
from swarm.protocol.agreement.rules import evidence
from swarm.protocol.agreement.rules.electorate import room_for_newcomers
from swarm.protocol.agreement.rules.sponsors import Sponsors
from swarm.protocol.agreement.rules.succession import Succession
from swarm.protocol.head import Head, Member
from swarm.protocol.shares import UNKNOWN

JOINS_MAX: Final = 1024
JOIN_LASTS_S: Final = 10.0
BACK_OFF_S: Final = 5.0  # doubled with every further round missed
BACK_OFF_MAX_S: Final = 600.0
SHOWN_MAX: Final = 16
PROOFS_MAX: Final = 64


class Applicants:
    """Join requests, with a back-off for peers that were planned for and missed the commit twice or more."""

    def __init__(self, context: AgreementContext, chain: Chain) -> None:
        self._context, self._chain = context, chain
        self._succession = Succession(context)
        self._joins: dict[Member, tuple[Signed, float, bytes]] = {}  # (request, until, head)
        self._asking: dict[str, float] = {}  # until when
        self._missed: dict[str, tuple[int, float]] = {}  # (rounds missed in a row, earliest time)
        self._mine: tuple[bytes, Signed] | None = None  # (head, request)
        self._waits = False  # for a place in a full group
        self.proofs: dict[str, msg.Contradiction] = {}
        """Proofs of lies, by culprit."""
        self.witness: Signed | None = None
        """The coordinator's latest declared identity as a witness."""
        self.paused = False
        """Whether this machine's owner has paused the peer's work (`events.Paused`)."""
        self.speed = 0.0
        """This node's own measured inner steps a second; 0 while unknown."""
        self.rates: Mapping[str, bytes] = {}
        """This node's measurements of the links of others (`events.LinksMeasured`)."""

    # -- this node -----------------------------------------------------------------------------------------------------

    def measured(self, head: Head) -> msg.Measurements:
        """Return this node's measurements, as it reports them to a leader after `head`."""
        codes = b"".join(self.rates.get(member.peer, UNKNOWN) for member in head.members) if self.rates else b""
        return msg.Measurements(self.speed, codes)

    def request(self) -> Signed | None:
        """Return this node's request to join, if it is in no group, holds the head's state and may work."""
        context, head = self._context, self._chain.head
        inside = head.has(context.me) or any(learner.member == context.me for learner in head.learners)
        if inside or self.paused or context.config.is_coordinator or not self._chain.has_state:
            return None
        self._tell_full(head)
        if self._mine is None or self._mine[0] != self._chain.hash:
            body = msg.JoinBody(self._chain.hash, context.me, context.config.credential)
            self._mine = (self._chain.hash, context.signer.sign(evidence.JOIN, body))
        return self._mine[1]

    def _tell_full(self, head: Head) -> None:
        """Tell once that this node waits for a place in a group that has none."""
        most, was = self._context.config.max_peers, self._waits
        self._waits = len(head.members) + len(head.learners) >= most
        if self._waits and not was:
            self._context.out.emit(GroupFull(round=head.round, most=most))

    # -- others --------------------------------------------------------------------------------------------------------

    def add(self, peer: str, signed: Signed) -> None:
        """Note a request of `peer`."""
        body = self._context.evidence.join(signed)
        if body.member.peer != peer:
            raise ProtocolViolation("a join request came from another peer than it names")
        if len(self._asking) < JOINS_MAX or peer in self._asking:
            self._asking[peer] = self._context.now + JOIN_LASTS_S
        if body.head not in (self._chain.hash, self._chain.head.previous):
            links = self._chain.after((body.head,)) if self._chain.is_past(body.head) else ()
            if links:  # it is behind
                self._context.out.send(peer, msg.ChainMessage(links))
            return
        self._succession.join(signed, self._chain.head, self._chain.hash)
        self._joins = {member: entry for member, entry in self._joins.items() if member.peer != peer}
        if len(self._joins) >= JOINS_MAX:
            self._expire()
        if len(self._joins) < JOINS_MAX:
            self._joins[body.member] = (signed, self._context.now + JOIN_LASTS_S, body.head)

    def asking(self) -> list[str]:
        """Return some of the peers that recently asked to join, at any head: each commit is sent to them at once."""
        self._asking = {peer: until for peer, until in self._asking.items() if until > self._context.now}
        return list(self._asking)[:SHOWN_MAX]

    def joins(self, head: Head) -> dict[Member, Signed]:
        """Return the requests that the next round may take in: twice as many as it has room for, as some may not
        answer."""
        self._expire()
        room = self._context.config.max_peers - len(head.members) - len(head.learners)
        most = min(2 * room_for_newcomers(len(head.members)), max(room, 0))
        learning = {learner.member for learner in head.learners}
        found: dict[Member, Signed] = {}
        for member, (signed, _, _) in self._joins.items():
            ready = self._context.now >= self._missed.get(member.peer, (0, 0.0))[1]
            if ready and not head.has(member) and member not in learning and member.peer not in self.proofs:
                found[member] = signed
        return dict(list(found.items())[:most])

    def waiting(self) -> dict[Member, Signed]:
        """Return all requests that still count."""
        self._expire()
        return {member: signed for member, (signed, _, _) in self._joins.items()}

    def first(self) -> tuple[tuple[Member, ...], Sponsors]:
        """Return the peers with which the group may begin, no more of a sponsor than it may bring in."""
        found, sponsors = dict[str, Member](), Sponsors()
        for member, signed in sorted(self.waiting().items()):
            mine = self._context.work.sponsors(self._context.evidence.join(signed), member.peer) or ()
            if sponsors.bring_in(member.peer, mine, found):
                found[member.peer] = member
        return tuple(found.values()), sponsors

    def settle(self, head: Head, planned: tuple[Member, ...]) -> None:
        """Note the commit of a round for which these were planned."""
        inside = {*head.members, *(learner.member for learner in head.learners)}
        for member in sorted(inside):
            self._joins.pop(member, None)
            self._missed.pop(member.peer, None)
        for member in planned:
            if member not in inside and (len(self._missed) < JOINS_MAX or member.peer in self._missed):
                missed = self._missed.get(member.peer, (0, 0.0))[0] + 1
                wait_s = min(BACK_OFF_S * 2.0 ** (missed - 2), BACK_OFF_MAX_S) if missed > 1 else 0.0
                self._missed[member.peer] = (missed, self._context.now + wait_s)

    def _expire(self) -> None:
        now = self._context.now
        here = (self._chain.hash, self._chain.head.previous)
        self._joins = {member: entry for member, entry in self._joins.items() if entry[1] > now and entry[2] in here}

    # -- liars ---------------------------------------------------------------------------------------------------------

    def convict(self, kind: str, first: Signed, second: Signed) -> None:
        """Accuse the signer of two bodies where one is allowed, once, and send the proof to all members."""
        proof = msg.Contradiction(kind, first, second)
        if self.take_proof(proof):
            self._context.out.accuse(first.signer, f"signed two different bodies of kind {kind}", proof)
            for member in self._chain.head.members:
                self._context.out.send(member.peer, msg.ProofMessage(proof))

    def take_proof(self, proof: msg.Contradiction) -> bool:
        """Keep a proof for the next roster that this node makes. Return whether it is new."""
        culprit = self._context.evidence.culprit(proof)
        if culprit in self.proofs or (len(self.proofs) >= PROOFS_MAX and not self._make_room()):
            return False
        self.proofs[culprit] = proof
        return True

    def _make_room(self) -> bool:
        """Forget the oldest proof against a peer outside the group: proofs against keys that were made for that must
        not crowd out the proofs that matter."""
        head = self._chain.head
        inside = {m.peer for m in head.members} | {learner.member.peer for learner in head.learners}
        stranger = next((peer for peer in self.proofs if peer not in inside), None)
        if stranger is not None:
            del self.proofs[stranger]
        return stranger is not None

    def proofs_against(self, head: Head) -> tuple[msg.Contradiction, ...]:
        """Return the proofs against members and learners of this head."""
        inside = {m.peer for m in head.members} | {learner.member.peer for learner in head.learners}
        return tuple(self.proofs[peer] for peer in sorted(inside & set(self.proofs)))
