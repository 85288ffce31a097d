"""The leader of attempts: assemble or prepare -> (finish what may be chosen | plan -> collect -> exchange) -> propose.

A leader decides nothing that the voters cannot check. It repeats what it sends, so losses cost only time, and its death
a turn.
"""

from __future__ import annotations

from typing import Final

import msgspec

from peer.catalogue.rounds import AttemptBegun, AttemptFailed
from peer.errors import ProtocolViolation, RoundDiscarded
from swarm.protocol.agreement import events
from swarm.protocol.agreement import messages as msg
from swarm.protocol.agreement.chain import position_of
from swarm.protocol.agreement.round.attempt import DIRECT_MAX, TIMER, Attempt, Phase, answers_s, spread
from swarm.protocol.agreement.round.collector import Collector
from swarm.protocol.agreement.round.exchanges import Exchanges
from swarm.protocol.agreement.round.instance import Exchange
from swarm.protocol.agreement.round.parts import RoundParts
from swarm.protocol.agreement.rules import evidence
from swarm.protocol.agreement.rules.acceptor import forced_value, needs_promises
from swarm.protocol.agreement.rules.succession import Succession
from swarm.protocol.head import Head, Member

TRIES_MAX: Final = 8  # attempts of one leader in one turn, after failures that a new attempt can mend


class AttemptLeader:
    """Leads this node's attempts of the round after one head, one at a time."""

    def __init__(self, parts: RoundParts, exchanges: Exchanges) -> None:
        self._context, self._chain, self._instance = parts.context, parts.chain, parts.instance
        self._timeouts, self._applicants, self._exchanges = parts.timeouts, parts.applicants, exchanges
        self._succession = Succession(parts.context)
        self._attempt: Attempt | None = None
        self._tries = 0
        self._collector = Collector(parts, exchanges)

    @property
    def planned(self) -> tuple[Member, ...]:
        """The members and newcomers that the present plan names."""
        plan = self._attempt.plan if self._attempt is not None else None
        return tuple(a.member for a in plan.assignments) if plan is not None else ()

    @property
    def doubted(self) -> frozenset[str]:
        """Peers whose claims do not count any more in this round."""
        return self._collector.doubted

    @property
    def phase(self) -> Phase | None:
        """The phase of the present attempt; None while this node does not lead, or a later attempt has begun."""
        attempt = self._attempt
        return attempt.phase if attempt is not None and attempt.number >= self._instance.ballot.promised else None

    def begin(self) -> None:
        """Begin this node's turn with a new attempt."""
        self._tries = 0
        self._begin()

    def _begin(self) -> None:
        head, context = self._instance.head, self._context
        attempt = self._attempt = Attempt(self._timeouts.next_attempt())
        attempt.joins = self._applicants.joins(head)
        learners = [learner.member for learner in head.learners]
        asked = (*context.electorate.voters(head), *learners, *attempt.joins)
        attempt.asked = tuple(dict.fromkeys(member.peer for member in asked))
        context.out.emit(AttemptBegun(round=head.round + 1, attempt=attempt.number))
        if self._goes_without_promises(attempt):
            here = {**(self._instance.here or {}), context.me: self._applicants.measured(head)}
            attempt.phase, attempt.present = Phase.ASSEMBLE, {m: here[m] for m in head.members if m in here}
            self.assemble()
        else:
            self.repeat()

    # -- the first attempt ---------------------------------------------------------------------------------------------

    def _goes_without_promises(self, attempt: Attempt) -> bool:
        """Return whether this attempt needs no promises and most members have voted for this head. With newcomers it
        asks for promises all the same, to see whether they take part."""
        head, here = self._instance.head, self._instance.here or {}
        most = 2 * sum(member in here or member == self._context.me for member in head.members) > len(head.members)
        return most and not needs_promises(attempt.number) and not attempt.joins and not head.learners

    def here(self, member: Member, measured: msg.Measurements) -> None:
        """Note that a member has voted for this head, so that it takes part."""
        attempt = self._attempt
        if attempt is not None and attempt.phase is not Phase.PREPARE and self._instance.head.has(member):
            attempt.present.setdefault(member, measured)
            self.assemble()

    def assemble(self) -> None:
        """Plan once all live members take part, or after a moment."""
        attempt, context = self._attempt, self._context
        if attempt is None or attempt.phase is not Phase.ASSEMBLE:
            return
        missing = [m for m in self._instance.head.members if m.peer not in context.down and m not in attempt.present]
        if not missing or (attempt.end_at and context.now >= attempt.end_at):
            self._plan(attempt)
        elif not attempt.end_at:
            attempt.end_at = context.now + context.config.grace_s
            context.out.timer(TIMER, attempt.end_at)

    def repeat(self) -> None:
        """Send the orders of the present phase again to those that have not answered."""
        attempt, context = self._attempt, self._context
        if attempt is None or attempt.number < self._instance.ballot.promised:
            return
        heard = {member.peer for member in attempt.present}
        if attempt.phase is Phase.PREPARE or (attempt.phase is Phase.COLLECT and attempt.promises):
            prepare = msg.PrepareMessage(self._instance.hash, attempt.number, position_of(self._instance.head))
            for peer in attempt.asked:
                if peer not in heard:
                    context.out.send(peer, prepare)
        if attempt.phase is Phase.COLLECT and attempt.signed_plan is not None:
            self._collector.repeat_plan(attempt)
        elif context.now < attempt.answers_at:
            return  # the answers are on their way
        elif attempt.phase is Phase.EXCHANGE:
            self._send_roster(attempt)
        elif attempt.phase is Phase.PROPOSE and attempt.proposal is not None:
            self._send_proposal(attempt, attempt.proposal)

    # -- phase 1 -------------------------------------------------------------------------------------------------------

    def promise(self, peer: str, message: msg.PromiseMessage) -> None:
        """Take a promise; continue once a quorum has promised and the others have had a moment."""
        attempt, instance = self._attempt, self._instance
        body = self._context.evidence.promise(message.promise)
        if attempt is None or body.head != instance.hash or body.attempt != attempt.number:
            return
        if body.voter.peer != peer:
            raise ProtocolViolation("a promise came from another peer than it names")
        if attempt.phase is not Phase.PREPARE:
            self._late_promise(attempt, peer, body.voter, message)
            return
        votes = self._chain.is_voter(body.voter)
        if votes and body.accepted is not None:
            if not self._context.evidence.counts(body.accepted, instance.head, instance.hash, attempt.number):
                raise ProtocolViolation("a promise reports an accepted value without evidence")
            self._require_support(body.accepted.value, message.support)
        if not votes and not self._may_join(body.voter, message, attempt):
            return
        attempt.promises[body.voter], attempt.present[body.voter] = message, message.measured
        if votes:
            attempt.accepted[body.voter] = body.accepted
        if not self._context.electorate.enough(instance.head, attempt.accepted):
            return
        waited_for = {voter.peer for voter in self._context.electorate.voters(instance.head)}
        if self._context.work.divides_batch():  # a newcomer must have promised before it gets a part
            waited_for = set(attempt.asked)
        waiting = waited_for - {m.peer for m in attempt.present} - self._context.down
        if not waiting:
            self._decide_value(attempt)
        elif not attempt.end_at:
            attempt.end_at = self._context.now + self._context.config.grace_s
            self._context.out.timer(TIMER, attempt.end_at)

    def _require_support(self, value: Head, support: msg.Support | None) -> None:
        """Raise unless a promise brings what the value that it reports was made from: a leader that proposed it without
        would count as the liar."""
        if support is None:
            raise ProtocolViolation("a promise reports an accepted value without what it was made from")
        opened, _ = self._succession.support(support, self._instance.head, self._instance.hash)
        if not opened.leads_to(value):
            raise ProtocolViolation("a promise reports an accepted value that does not follow from its roster")

    def _may_join(self, member: Member, message: msg.PromiseMessage, attempt: Attempt) -> bool:
        """Return whether a peer that has no vote may be planned for."""
        if member in {learner.member for learner in self._instance.head.learners}:
            return True
        if member not in attempt.joins or message.join is None:
            return False
        self._succession.join(message.join, self._instance.head, self._instance.hash)
        attempt.joins[member] = message.join
        return True

    def _late_promise(self, attempt: Attempt, peer: str, voter: Member, message: msg.PromiseMessage) -> None:
        """Take in the ready contribution of a peer whose promise has come late; a member may vote in any case."""
        if self._chain.is_voter(voter) or self._may_join(voter, message, attempt):
            attempt.promises.setdefault(voter, message)
            attempt.present.setdefault(voter, message.measured)
        if message.contribution is not None and attempt.phase is Phase.COLLECT:
            self.submit(peer, msg.SubmitMessage(self._instance.hash, message.contribution, message.join))

    def _decide_value(self, attempt: Attempt) -> None:
        """Propose what may have been chosen in an earlier attempt; else plan."""
        self._leave_out_refuted(attempt)
        forced = forced_value(attempt.accepted[voter] for voter in sorted(attempt.accepted))  # as the voters check it
        if forced is None:
            self._plan(attempt)
            return
        for member in sorted(attempt.accepted):
            accepted, support = attempt.accepted[member], attempt.promises[member].support
            if accepted is not None and support is not None and accepted.value == forced.value:
                self._propose(attempt, forced.value, support)
                return

    def _leave_out_refuted(self, attempt: Attempt) -> None:
        """Leave out promises that report a value for which this node built another state, if the rest is a quorum: then
        that value was not chosen. Otherwise one voter with another build, or a liar, would block the group permanently
        with a value that it alone has accepted."""
        rest = {m: found for m, found in attempt.accepted.items() if found is None or not self._is_refuted(found.value)}
        if self._context.electorate.enough(self._instance.head, rest):
            attempt.accepted = rest

    def _is_refuted(self, value: Head) -> bool:
        name = value.hash
        built = (self._exchanges.state_of(p.exchange) for p in self._instance.proposed.values() if p.hash == name)
        return any(state is not None and state != value.state_hash for state in built)

    # -- work ----------------------------------------------------------------------------------------------------------

    def _plan(self, attempt: Attempt) -> None:
        """Send a plan to all that are present, and take their contributions to it that came with promises."""
        attempt.phase = Phase.COLLECT
        if not self._collector.plan(attempt):
            self._fail("no peer that may work is present", again=False)
            return
        for member, message in sorted(attempt.promises.items()):
            if message.plan == attempt.signed_plan and message.contribution is not None:
                try:
                    self.submit(member.peer, msg.SubmitMessage(self._instance.hash, message.contribution, message.join))
                except ProtocolViolation as error:  # not the fault of the peer whose promise came last
                    self._context.blame(member.peer, error)
        if attempt is self._attempt and attempt.phase is Phase.COLLECT:
            # Also to this node and others that have submitted: receiving it extends the leader's turn.
            self._collector.send_plan(attempt, done=())

    def submit(self, peer: str, message: msg.SubmitMessage) -> None:
        """Take a contribution to the present plan."""
        attempt = self._attempt
        if attempt is not None and attempt.phase is Phase.COLLECT and self._collector.take(attempt, message):
            self.collect()

    def informed(self, peer: Member, plan: bytes | None, roster: bytes | None) -> None:
        """Note whether a peer has the present plan and roster. One that has lost them with its process says so, too."""
        attempt = self._attempt
        if attempt is None or attempt.plan is None or not (self._instance.head.has(peer) or attempt.plan.of(peer)):
            return  # what other peers say is not kept: there may be any number of them
        (attempt.informed.add if plan == attempt.plan.hash else attempt.informed.discard)(peer)
        if roster is not None:
            here = attempt.exchange is not None and roster == attempt.exchange.opened.key
            (attempt.exchanging.add if here else attempt.exchanging.discard)(peer.peer)

    def gathered(self, event: events.Gathered) -> None:
        """The method says that all of the work is done: ask for what is ready."""
        self._collector.note_claims(event.claims)
        if self._attempt is not None and self._attempt.phase is Phase.COLLECT:
            self._collector.finish_gathered(self._attempt)

    def collect(self) -> None:
        """Go on to the exchange once the collector waits for no peer any more."""
        attempt = self._attempt
        if attempt is None or attempt.phase is not Phase.COLLECT or not self._collector.is_complete(attempt):
            return
        members = self._collector.members(attempt)
        if not any(self._instance.head.has(member) for member in members):
            self._fail("no member has submitted a contribution", again=False)
            return
        try:
            opened = self._collector.roster(attempt, members)
        except (ProtocolViolation, RoundDiscarded) as error:
            self._fail(str(error), again=True)
            return
        attempt.phase, attempt.signed_roster = Phase.EXCHANGE, opened.signed
        self._context.out.timer(TIMER, self._context.now + self._context.work.exchange_s(self._instance.head))
        attempt.exchange = self._exchanges.open(opened)
        self.give_up_exchange()
        if self._attempt is attempt:
            self._send_roster(attempt)

    # -- exchange ------------------------------------------------------------------------------------------------------

    def _send_roster(self, attempt: Attempt) -> None:
        """Send the roster to those that have not said that they have it: at first through others that pass it on, later
        directly, as one of those may be dead."""
        assert attempt.signed_plan is not None and attempt.signed_roster is not None
        context, first = self._context, attempt.answers_at < 0.0
        order = msg.RosterMessage(self._instance.hash, attempt.number, attempt.signed_plan, attempt.signed_roster)
        members = (*attempt.present, *attempt.contributions, *self._instance.head.members)
        peers = {member.peer for member in members} - {context.config.peer, context.config.coordinator}
        able = (peers & context.out.able) - context.down if first else set[str]()
        ways = spread(able, self._instance.hash)
        whole = sorted(peers - attempt.exchanging - able)
        in_turn = len(whole) + len(ways) + max(map(len, ways.values()), default=0)  # by this node, then by another one
        size = in_turn * (len(order.plan.body) + len(order.roster.body))
        attempt.answers_at = context.now + answers_s(size, context.config.poll_s)
        for peer in whole:
            context.out.send(peer, order)
        for peer, pass_on in sorted(ways.items()):
            context.out.send(peer, msgspec.structs.replace(order, pass_on=pass_on))

    def _send_proposal(self, attempt: Attempt, proposal: msg.ProposalMessage) -> None:
        """Send the proposal to the voters that have not voted for it. In a group that is not small those that have the
        roster get it without that."""
        support, context = proposal.support, self._context
        short: msg.ShortProposalMessage | None = None
        many = len(self._instance.head.members) > DIRECT_MAX
        if many and attempt.exchange is not None and support.roster == attempt.signed_roster:
            key, state = attempt.exchange.opened.key, proposal.value.state_hash
            short = msg.ShortProposalMessage(proposal.proposal, state, proposal.promises, key, support.results)
        votes = self._instance.votes_for(attempt.number, proposal.value.hash)
        voters = [voter.peer for voter in context.electorate.voters(self._instance.head) if voter not in votes]
        brief = attempt.exchanging if short is not None else set[str]()
        size = sum(len(support.plan.body) + len(support.roster.body) for peer in voters if peer not in brief)
        attempt.answers_at = context.now + answers_s(size, context.config.poll_s)
        for peer in voters:
            context.out.send(peer, short if short is not None and peer in brief else proposal)

    def give_up_exchange(self) -> None:
        """Give up an exchange that cannot end, since an owner is down whose results this node has not, or could not be
        had by any peer when it built: another attempt leaves it out."""
        attempt = self._attempt
        if attempt is None or attempt.phase is not Phase.EXCHANGE or attempt.exchange is None:
            return
        exchange = attempt.exchange
        results = () if exchange.failed else exchange.results
        if any(owner.peer in self._context.down and owner not in results for owner in exchange.opened.parts):
            self._fail("an owner of slices is down", again=self._may_mend(attempt))

    def built(self, exchange: Exchange) -> None:
        """Propose what this node has built from the present exchange."""
        attempt = self._attempt
        if attempt is None or attempt.phase is not Phase.EXCHANGE or attempt.exchange is not exchange:
            return
        state = self._exchanges.state_of(exchange)
        if state is not None and attempt.number >= self._instance.ballot.promised:
            value = msgspec.structs.replace(exchange.opened.next, state_hash=state)
            self._propose(attempt, value, exchange.support)

    def _propose(self, attempt: Attempt, value: Head, support: msg.Support) -> None:
        """Sign the one value of this attempt."""
        attempt.phase = Phase.PROPOSE
        context = self._context
        body = msg.ProposalBody(self._instance.hash, attempt.number, value.hash)
        signed = context.signer.sign(evidence.PROPOSAL, body)
        voters = sorted(attempt.accepted) if needs_promises(attempt.number) else ()
        promises = tuple(attempt.promises[voter].promise for voter in voters)
        attempt.proposal = msg.ProposalMessage(signed, value, promises, support)
        context.out.timer(TIMER, context.now + context.work.exchange_s(self._instance.head))
        self._send_proposal(attempt, attempt.proposal)

    # -- time ----------------------------------------------------------------------------------------------------------

    def time(self) -> None:
        """Go on when the present phase has lasted long enough."""
        attempt = self._attempt
        if attempt is None or attempt.number < self._instance.ballot.promised:
            return
        if attempt.phase is Phase.PREPARE:
            if self._context.electorate.enough(self._instance.head, attempt.accepted):
                self._decide_value(attempt)
        elif attempt.phase is Phase.ASSEMBLE:
            self.assemble()
        elif attempt.phase is Phase.COLLECT:
            self.collect()
        else:
            self._fail(f"waited too long for {attempt.phase.value}", again=self._may_mend(attempt))

    def _may_mend(self, attempt: Attempt) -> bool:
        """Return whether another attempt of this node can succeed: it may leave an owner out. If nothing is merged, the
        others wait for work, and the next leader's plan must name what is missing."""
        exchange = attempt.exchange
        return attempt.phase is Phase.EXCHANGE and exchange is not None and any(w > 0 for w in exchange.opened.weights)

    def _fail(self, reason: str, again: bool) -> None:
        """Give the attempt up. Try again at once where another attempt can do better and the turn is not over."""
        attempt = self._attempt
        assert attempt is not None
        self._context.out.emit(
            AttemptFailed(round=self._instance.head.round + 1, attempt=attempt.number, reason=reason)
        )
        self._attempt = None
        self._tries += 1
        if again and self._tries < TRIES_MAX and attempt.number >= self._instance.ballot.promised:
            self._begin()
        else:
            self._timeouts.resign()
