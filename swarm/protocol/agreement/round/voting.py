"""A voter's second half of an attempt: check the proposal, vote, and count votes.

A voter derives the value from the roster itself and votes only once its own state hashes to it. The coordinator has no
weights: it checks all but the state, and votes last, when its vote completes the certificate. Votes go to few: they
are as many as there are voters, not their square.
"""

from __future__ import annotations

import msgspec

from peer.errors import ProtocolViolation
from peer.identity import Signed
from swarm.protocol.agreement import messages as msg
from swarm.protocol.agreement.round.exchanges import Exchanges
from swarm.protocol.agreement.round.instance import Proposed, record_once
from swarm.protocol.agreement.round.participant import Participant
from swarm.protocol.agreement.round.parts import RoundParts
from swarm.protocol.agreement.rules import evidence
from swarm.protocol.agreement.rules.electorate import leader_of
from swarm.protocol.agreement.rules.succession import Succession
from swarm.protocol.head import Head


class Voter:
    """Proposals and votes of one node for the round after one head."""

    def __init__(self, parts: RoundParts, participant: Participant, exchanges: Exchanges) -> None:
        self._context, self._chain, self._instance = parts.context, parts.chain, parts.instance
        self._timeouts, self._applicants = parts.timeouts, parts.applicants
        self._participant, self._exchanges = participant, exchanges
        self._succession = Succession(parts.context)
        self._voted_at = 0.0

    # -- proposals -----------------------------------------------------------------------------------------------------

    def propose(self, message: msg.ProposalMessage) -> None:
        """Check the proposal of an attempt, from any peer, and vote for it if this node can."""
        instance, context = self._instance, self._context
        body = context.evidence.proposal(message.proposal, instance.head, instance.hash)
        if body.value != message.value.hash:
            raise ProtocolViolation("a proposal comes with another value than it names")
        known = instance.proposed.get(body.attempt)
        if known is not None:
            if known.hash != body.value:
                self._applicants.convict(evidence.PROPOSAL, known.signed, message.proposal)
            self.consider(body.attempt)
            return
        if body.attempt < instance.ballot.promised:
            return
        self._check(body.attempt, message)
        leader = leader_of(instance.head, instance.hash, body.attempt)
        self._timeouts.extend(leader, body.attempt, "proposal", context.work.exchange_s(instance.head))
        self.consider(body.attempt)

    def propose_short(self, message: msg.ShortProposalMessage) -> bool:
        """Do as `propose`, with this node's roster. Return False if it has none: the leader then sends it."""
        exchange = self._instance.exchanges.get(message.roster)
        if exchange is None:
            return False
        opened = exchange.opened
        value = msgspec.structs.replace(opened.next, state_hash=message.state)
        support = msg.Support(opened.signed_plan, opened.signed, message.results)
        self.propose(msg.ProposalMessage(message.proposal, value, message.promises, support))
        return True

    def _check(self, attempt: int, message: msg.ProposalMessage) -> None:
        """Raise unless the promises force this value, or leave it free and it follows from this attempt's roster.
        Remember it."""
        instance, context = self._instance, self._context
        justified = context.evidence.justified(message.promises, instance.head, instance.hash, attempt)
        forced = justified.accepted
        known = next((e.opened for e in instance.exchanges.values() if e.opened.signed == message.support.roster), None)
        opened, results = self._succession.support(message.support, instance.head, instance.hash, known)
        value = message.value
        if forced is not None and forced.value.hash != value.hash:
            raise ProtocolViolation("a proposal has another value than the promises force")
        if forced is None and opened.attempt != attempt:
            raise ProtocolViolation("a proposal was made from the roster of another attempt")
        if not opened.leads_to(value):
            raise ProtocolViolation("a proposal's members, learners or ledger do not follow from its roster")
        exchange = self._exchanges.open(opened)
        self._exchanges.note_results(exchange, results)
        exchange.voters.update(voter.peer for voter in justified.voters if self._chain.is_voter(voter))
        exchange.results.update(results)  # what is voted on is built from what the proposal names
        instance.set_proposed(attempt, Proposed(message.proposal, value, value.hash, message.support, exchange))

    def consider(self, attempt: int) -> None:
        """Vote for the value of an attempt, if this node may and its own state hashes to it."""
        instance, proposed = self._instance, self._instance.proposed.get(attempt)
        if proposed is None or not self._participant.votes or attempt < instance.ballot.promised:
            return
        if self._context.config.is_coordinator:
            self._witness(attempt, proposed)
            return
        if proposed.value.state_hash not in self._chain.holds:
            built = self._exchanges.state_of(proposed.exchange)
            if built is not None and built != proposed.value.state_hash:
                self._context.out.emit("state_differs", round=proposed.value.round, attempt=attempt)
            else:
                votes = self._instance.votes_for(attempt, proposed.hash)
                proposed.exchange.voters.update(voter.peer for voter in votes)
                self._exchanges.rebuild(proposed.exchange)
            return
        self._vote(attempt, proposed)

    def _witness(self, attempt: int, proposed: Proposed) -> None:
        """Vote last, without weights: only where the vote completes the certificate."""
        votes = self._instance.votes_for(attempt, proposed.hash)
        if not self._context.mute and self._context.electorate.completes(self._instance.head, set(votes)):
            self._vote(attempt, proposed)

    # -- votes ---------------------------------------------------------------------------------------------------------

    def _vote(self, attempt: int, proposed: Proposed) -> None:
        """Vote. The vote is sent once it is on disk with the value and its state."""
        instance = self._instance
        ballot = instance.ballot.vote(attempt, proposed.hash)
        if ballot is None:
            return
        if ballot != instance.ballot:
            instance.accepted = msg.AcceptedValue(attempt, proposed.value, proposed.signed)
            instance.support = proposed.support
            self._chain.keep(proposed.value.state_hash)
            if self._is_required:
                self._decide(attempt, proposed)
                return
            self._participant.set_ballot(ballot)
        self._send_vote(attempt, proposed.value, proposed.hash)

    def _send_vote(self, attempt: int, value: Head, value_hash: bytes, again: bool = False) -> None:
        """Send this node's vote to the leader, to the next leader, which learns so who takes part and sends the
        certificate to all, and to the witness; `again`: to all voters and the next members, as those may be dead."""
        measured = self._applicants.measured(value)
        message = msg.VoteMessage(self._sign_vote(attempt, value_hash), measured.speed, measured.rates or msgspec.UNSET)
        head, electorate = self._instance.head, self._context.electorate
        if again:
            told = {*electorate.voters(head), *value.members}
        else:
            witness, me = electorate.witness(head), self._context.me
            leaders = leader_of(head, self._instance.hash, attempt), leader_of(value, value_hash, 0)
            told = {me, *leaders, *([witness] if witness is not None else [])}
            self._voted_at = self._context.now
        for peer in sorted({member.peer for member in told}):
            self._context.out.send(peer, message)

    def _sign_vote(self, attempt: int, value_hash: bytes) -> Signed:
        body = msg.VoteBody(self._instance.hash, attempt, value_hash, self._context.me)
        return self._context.signer.sign(evidence.VOTE, body)

    @property
    def _is_required(self) -> bool:
        return self._context.config.is_coordinator and self._context.electorate.mode == "required"

    def _decide(self, attempt: int, proposed: Proposed) -> None:
        """Complete the certificate as the required voter. The node commits it to disk before it sends its vote to any
        peer, so it votes once after each head, and has every certificate."""
        votes = self._instance.votes_for(attempt, proposed.hash)
        votes[self._context.me] = self._sign_vote(attempt, proposed.hash)
        self._chain.learn([msg.ChainLink(proposed.value, votes=tuple(votes[voter] for voter in sorted(votes)))])

    def vote(self, message: msg.VoteMessage) -> None:
        """Count a vote; with those of a quorum the value is certified."""
        body = self._context.evidence.vote(message.vote)
        if not self._note(body, message.vote):
            return
        self._instance.told[body.voter] = message.measured
        if self._context.config.is_coordinator:
            self.consider(body.attempt)
        self._count(body.attempt, body.value)

    def _note(self, body: msg.VoteBody, signed: Signed) -> bool:
        """Record the vote of a voter. Return whether it counts."""
        if not self._chain.is_voter(body.voter):
            return False
        other = record_once(self._instance.votes.setdefault(body.voter, {}), body.attempt, body.value, signed)
        if other is not None:
            self._applicants.convict(evidence.VOTE, other, signed)
        return other is None

    def _count(self, attempt: int, value: bytes) -> None:
        instance = self._instance
        votes = instance.votes_for(attempt, value)
        if not self._context.electorate.enough(instance.head, set(votes)) or self._chain.link(value) is not None:
            return
        head = next((p.value for p in instance.proposed.values() if p.hash == value), None)
        if head is None and instance.accepted is not None and instance.accepted.value.hash == value:
            head = instance.accepted.value
        if head is not None:  # else a peer that has committed it sends its link soon
            link = msg.ChainLink(head, votes=tuple(votes.values()))
            if self._shows(attempt, head, value):
                self._show(link)
            self._chain.learn([link])

    def _shows(self, attempt: int, value: Head, value_hash: bytes) -> bool:
        """Return whether this node sends a certificate to all: as the next leader, whose plan comes right after; as the
        present one where that has no vote here, or is down."""
        head, following = self._instance.head, leader_of(value, value_hash, 0)
        able = head.has(following) and following.peer not in self._context.down
        return self._context.me == (following if able else leader_of(head, self._instance.hash, attempt))

    def _show(self, link: msg.ChainLink) -> None:
        """Send a certificate to all whom it concerns. It counts by itself, whatever becomes of this node."""
        told = {*self._instance.head.members, *link.head.members, *(learner.member for learner in link.head.learners)}
        peers = {member.peer for member in told} | {self._context.config.coordinator, *self._applicants.asking()}
        certificate = msg.ChainMessage((link,))
        for peer in sorted(peers - {self._context.config.peer}):
            self._context.out.send(peer, certificate)

    def repeat(self) -> None:
        """Send again what may have been lost: this node's latest vote, while the attempt is not given up."""
        instance = self._instance
        attempt = instance.ballot.attempt
        self.consider(attempt)
        if instance.accepted is not None and instance.accepted.attempt == attempt == instance.ballot.voted_attempt:
            value, config = instance.accepted.value, self._context.config
            if not self._is_required and self._context.now - self._voted_at >= config.poll_s / 2:
                self._send_vote(attempt, value, value.hash, again=True)
