"""Idle traffic: each node sends a few others its position, and asks those that are higher for their chain.

A status is some hundred bytes, so the traffic of one member does not grow with the group.
"""

from __future__ import annotations

from typing import Final

from peer.errors import ProtocolViolation
from swarm.protocol.agreement import messages as msg
from swarm.protocol.agreement.chain import Chain, position_of
from swarm.protocol.agreement.context import AgreementContext
from swarm.protocol.agreement.round.instance import Instance
from swarm.protocol.head import Member

TOLD_MAX: Final = 3  # peers at each poll, besides the coordinator
OUTSIDE_EVERY: Final = 4  # polls; one in turn
ASKED_MAX: Final = 4096


class HeadGossip:
    """Status messages and the transfer of chains."""

    def __init__(self, context: AgreementContext, chain: Chain) -> None:
        self._context, self._chain = context, chain
        self._polls = 0
        self._asked: dict[str, float] = {}

    def poll(self, me: Member, attempt: int, instance: Instance) -> None:
        """Send this node's head, awaited attempt, plan and roster to the coordinator and the next few peers in turn;
        now and then also to one outside the group: members that an operator's start has left out may have continued by
        themselves, and without the coordinator no other message passes between the two branches."""
        config, head = self._context.config, self._chain.head
        members = [m.peer for m in (*head.members, *(learner.member for learner in head.learners))]
        if me not in head.members or len(members) < 2:
            members += list(self._context.known)
        others = [peer for peer in dict.fromkeys(members) if peer not in (config.peer, config.coordinator)]
        told = [config.coordinator] if not config.is_coordinator else []
        if others:
            start = (self._polls * TOLD_MAX + self._context.pick(b"poll")) % len(others)
            told += [others[(start + i) % len(others)] for i in range(min(TOLD_MAX, len(others)))]
        inside = {*others, config.peer, config.coordinator}
        outside = [peer for peer in self._context.known if peer not in inside]
        turn, now = divmod(self._polls, OUTSIDE_EVERY)
        if outside and now == 0:
            told.append(outside[turn % len(outside)])
        self._polls += 1
        plan, roster = instance.plan_hash, instance.roster_hash
        status = msg.StatusMessage(position_of(head), self._chain.hash, me, False, attempt, plan, roster, True)
        for peer in told:
            self._context.out.send(peer, status)

    def tell(self, peer: str, me: Member) -> None:
        """Send this node's head to a peer that is behind."""
        if peer != self._context.config.peer:
            mine = position_of(self._chain.head)
            status = msg.StatusMessage(mine, self._chain.hash, me, answer=True, roster=b"", unpacks=True)
            self._context.out.send(peer, status)

    def status(self, peer: str, message: msg.StatusMessage, me: Member) -> None:
        """Ask a peer with a higher head for its chain, and as the coordinator one whose term has the same number and
        another start; send this node's head to one with a lower head."""
        mine, theirs = position_of(self._chain.head), message.position
        if theirs > mine or (self._context.config.is_coordinator and theirs[0] == mine[0] and theirs[1] != mine[1]):
            self.ask(peer)
        elif message.position < mine and not message.answer:
            self.tell(peer, me)

    def ask(self, peer: str) -> None:
        """Ask a peer for its chain beyond this node's head, at most once in half a poll."""
        now = self._context.now
        if peer == self._context.config.peer or now - self._asked.get(peer, -1e9) < self._context.config.poll_s / 2:
            return
        if len(self._asked) >= ASKED_MAX:
            self._asked.clear()
        self._asked[peer] = now
        self._context.out.send(peer, msg.AskChainMessage(self._chain.known))

    def answer(self, peer: str, ask: msg.AskMessage, me: Member, instance: Instance) -> None:
        """Report this node's head, and the value that it has accepted after it, to the coordinator."""
        if peer != self._context.config.coordinator:
            raise ProtocolViolation("a peer that is not the coordinator asked where this one stands")
        chain = self._chain
        told = msg.ReportMessage(
            nonce=ask.nonce,
            voter=me,
            position=position_of(chain.head),
            head=chain.hash,
            holds=tuple(sorted(chain.holds)),
            accepted=instance.accepted,
            support=instance.support if instance.accepted is not None else None,
            links=chain.after((ask.head,)) if ask.head != chain.hash else (),
            credential=self._context.config.credential,
        )
        self._context.out.send(peer, told)

    def ask_chain(self, peer: str, message: msg.AskChainMessage) -> None:
        """Send the links after the last head that the peer has named."""
        links = self._chain.after(message.known)
        if links:
            self._context.out.send(peer, msg.ChainMessage(links))

    def chain(self, peer: str, message: msg.ChainMessage) -> None:
        """Take a page of a chain; ask for the next one if there may be one."""
        known = self._chain.known
        self._chain.learn(message.links, peer)
        if len(message.links) > 1 and self._chain.known != known:
            self._context.out.send(peer, msg.AskChainMessage(self._chain.known))
