"""A member's answers to the coordinator: where it stands, the seal, and the acknowledgement of a start of term.

A seal is a promise in the present instance, so a quorum that was sealed can still go on by itself. An acknowledgement
is for good: the voter takes part in no attempt of a lower term any more. A start binds with the acknowledgements of a
quorum of its own voters, one of them a member that holds the state; no peer follows an unbound one.
"""

from __future__ import annotations

from typing import Final

import msgspec

from peer.decoding import MALFORMED
from peer.errors import ProtocolViolation
from peer.identity import Signed
from swarm.protocol.agreement import messages as say
from swarm.protocol.agreement.actions import Fetch
from swarm.protocol.agreement.chain import Chain, position_of
from swarm.protocol.agreement.context import AgreementContext
from swarm.protocol.agreement.output import encode
from swarm.protocol.agreement.records import FENCE_KEY, FenceRecord
from swarm.protocol.agreement.round.instance import Instance
from swarm.protocol.agreement.round.participant import Participant
from swarm.protocol.agreement.rules import evidence
from swarm.protocol.agreement.rules.acceptor import NEVER
from swarm.protocol.head import Member

STARTS_MAX: Final = 4


class Starts:
    """The starts of higher terms that one node was told of."""

    def __init__(self, context: AgreementContext, chain: Chain) -> None:
        self._context, self._chain = context, chain
        self._fence = FenceRecord(-1)
        self._open: dict[bytes, tuple[Signed, say.StartBody]] = {}
        self._acks: dict[bytes, dict[Member, Signed]] = {}
        self._fetching = b""

    def load(self, records: dict[str, bytes]) -> None:
        """Take over what the disk holds."""
        try:
            self._fence = msgspec.msgpack.decode(records.get(FENCE_KEY, b""), type=FenceRecord)
        except MALFORMED:
            self._fence = FenceRecord(-1)
        self._context.left = self._fence.left

    def ask(self, peer: str, ask: say.AskMessage, instance: Instance, participant: Participant) -> None:
        """Tell the coordinator where this node stands; with a seal, promise more attempts than any that is under
        way."""
        context, head = self._context, self._chain.head
        if peer != context.config.coordinator:
            raise ProtocolViolation("a peer that is not the coordinator asked where this one stands")
        if ask.seal:
            if ask.term <= max(self._fence.term, head.term):
                return
            self._set_fence(FenceRecord(ask.term, left=self._fence.left))
            if participant.votes and instance.ballot.promised < NEVER:
                ballot = instance.ballot.promise(instance.ballot.promised + 1 + 2 * len(head.members))
                if ballot is not None:
                    participant.set_ballot(ballot)
        told = say.ToldMessage(
            nonce=ask.nonce,
            voter=context.me,
            position=position_of(head),
            head=self._chain.hash,
            previous=head.previous,
            promised=instance.ballot.promised,
            holds=tuple(sorted(self._chain.holds)),
            accepted=instance.accepted,
            support=instance.support if instance.accepted is not None else None,
            links=self._chain.after((ask.head,)) if ask.head != self._chain.hash else (),
        )
        context.out.send(peer, told)

    def start(self, message: say.StartMessage, instance: Instance, participant: Participant) -> None:
        """Acknowledge a start of a higher term, if this node is one of its voters and holds its state."""
        body = self._context.evidence.start(message.start)
        name = body.head.hash
        if position_of(body.head) <= position_of(self._chain.head) or body.head.term < self._fence.term:
            return
        self._open[name] = (message.start, body)
        while len(self._open) > STARTS_MAX:
            del self._open[next(iter(self._open))]
        self._acknowledge(name, instance, participant)
        self._bind(name)

    def _acknowledge(self, name: bytes, instance: Instance, participant: Participant) -> None:
        context, (_, body) = self._context, self._open[name]
        voters = context.electorate.voters(body.head)
        if context.me not in voters or body.head.term < self._fence.term:
            return
        if self._fence.term == body.head.term and self._fence.acked not in (b"", name):
            return  # a second start of a term
        if self._fence.acked != name and self._chain.takes_back(body):
            return
        if not context.config.is_coordinator and body.head.state_hash not in self._chain.holds:
            self._fetch(body)
            return
        self._set_fence(FenceRecord(body.head.term, name, body.head.term))
        self._chain.leave()
        instance.leave()
        message = say.AckMessage(context.signer.sign(evidence.ACK, say.AckBody(name, context.me)))
        for peer in sorted({*(voter.peer for voter in voters), context.config.coordinator}):
            context.out.send(peer, message)

    def _fetch(self, body: say.StartBody) -> None:
        if self._fetching == body.head.state_hash:
            return
        self._fetching = body.head.state_hash
        holders = tuple(m.peer for m in body.head.members if m.peer != self._context.config.peer)
        self._context.out.add(Fetch(body.head.state_hash, body.head, holders))

    def fetched(self, state_hash: bytes) -> None:
        """Note the end of a `Fetch`; `repeat` goes on."""
        if state_hash == self._fetching:
            self._fetching = b""

    def ack(self, message: say.AckMessage) -> None:
        """Count an acknowledgement."""
        body = self._context.evidence.ack(message.ack)
        if body.head not in self._acks and len(self._acks) >= STARTS_MAX:
            del self._acks[next(iter(self._acks))]
        acks = self._acks.setdefault(body.head, {})
        known = self._open.get(body.head)
        if known is None:
            if len(acks) < len(self._chain.head.members) + STARTS_MAX:  # it has come before its start
                acks[body.voter] = message.ack
        elif body.voter in self._context.electorate.voters(known[1].head):
            acks[body.voter] = message.ack
            self._bind(body.head)

    def _bind(self, name: bytes) -> None:
        signed, body = self._open[name]
        voters = set(self._context.electorate.voters(body.head))
        acks = {voter: ack for voter, ack in sorted(self._acks.get(name, {}).items()) if voter in voters}
        if self._context.electorate.enough(body.head, set(acks)) and any(m in acks for m in body.head.members):
            self._chain.learn([say.ChainLink(body.head, start=signed, acks=tuple(acks.values()))])

    def repeat(self, instance: Instance, participant: Participant) -> None:
        """Acknowledge again what is not bound yet, and go on after a fetch."""
        for name, (_, body) in list(self._open.items()):
            if position_of(body.head) <= position_of(self._chain.head):
                del self._open[name]
            else:
                self._acknowledge(name, instance, participant)

    def _set_fence(self, fence: FenceRecord) -> None:
        if fence != self._fence:
            self._fence = fence
            self._context.left = max(self._context.left, fence.left)
            self._context.out.persist(FENCE_KEY, encode(fence), b"")
