"""The leader of attempts: prepare -> (finish what may be chosen | plan -> collect -> exchange) -> propose.

A leader decides nothing that the voters cannot check. It repeats what it sends, so losses cost time only; its death
costs a turn.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

import msgspec

from peer.errors import ProtocolViolation, RoundDiscarded
from peer.identity import Signed
from swarm.protocol.agreement import events
from swarm.protocol.agreement import messages as say
from swarm.protocol.agreement.applicants import Applicants
from swarm.protocol.agreement.chain import Chain, position_of
from swarm.protocol.agreement.context import AgreementContext
from swarm.protocol.agreement.round.attempt import Attempt, Phase
from swarm.protocol.agreement.round.exchanges import Exchanges
from swarm.protocol.agreement.round.instance import Exchange, Instance
from swarm.protocol.agreement.round.turns import Turns
from swarm.protocol.agreement.rules import evidence
from swarm.protocol.agreement.rules.acceptor import forced_value
from swarm.protocol.agreement.rules.succession import Succession
from swarm.protocol.exclusion import choose_excluded
from swarm.protocol.head import Head, Member
from swarm.protocol.plan import PLAN_KIND, Contribution, WorkPlan, fit_roster

TIMER: Final = "step"
TRIES_MAX: Final = 3  # attempts of one leader in one turn, after failures that a new attempt can mend


class AttemptLeader:
    """Leads this node's attempts of the round after one head, one at a time."""

    def __init__(
        self,
        context: AgreementContext,
        chain: Chain,
        instance: Instance,
        turns: Turns,
        applicants: Applicants,
        exchanges: Exchanges,
    ) -> None:
        self._context, self._chain, self._instance = context, chain, instance
        self._turns, self._applicants, self._exchanges = turns, applicants, exchanges
        self._succession = Succession(context)
        self._attempt: Attempt | None = None
        self._tries = 0
        self._given_up: set[bytes] = set()  # hashes of plans that cannot be completed
        self._reset: set[Member] = set()  # members that must forget what they have counted
        self._excluded: set[str] = set()  # peers that others waited for in the last exchange

    @property
    def planned(self) -> tuple[Member, ...]:
        """The members and newcomers that the present plan names."""
        plan = self._attempt.plan if self._attempt is not None else None
        return tuple(a.member for a in plan.assignments) if plan is not None else ()

    @property
    def phase(self) -> Phase | None:
        """What the present attempt waits for; None while this node does not lead."""
        return self._attempt.phase if self._attempt is not None else None

    def begin(self) -> None:
        """Begin this node's turn with a new attempt."""
        self._tries = 0
        self._begin()

    def _begin(self) -> None:
        head, context = self._instance.head, self._context
        attempt = self._attempt = Attempt(self._turns.next_attempt())
        attempt.joins = self._applicants.joins(head)
        learners = [learner.member for learner in head.learners]
        asked = (*context.electorate.voters(head), *learners, *attempt.joins)
        attempt.asked = tuple(dict.fromkeys(member.peer for member in asked))
        context.out.tell("attempt_begun", round=head.round + 1, attempt=attempt.number)
        self.repeat()

    def repeat(self) -> None:
        """Send the orders of the present phase again to those that have not answered."""
        attempt, context = self._attempt, self._context
        if attempt is None or attempt.number < self._instance.ballot.promised:
            return
        heard = {member.peer for member in attempt.promises}
        if attempt.phase in (Phase.PREPARE, Phase.COLLECT):
            prepare = say.PrepareMessage(self._instance.hash, attempt.number, position_of(self._instance.head))
            for peer in attempt.asked:
                if peer not in heard:
                    context.out.send(peer, prepare)
        if attempt.phase is Phase.COLLECT and attempt.signed_plan is not None:
            self._send_plan(attempt, done=attempt.contributions)
        elif attempt.phase is Phase.EXCHANGE:
            self._send_roster(attempt)
        elif attempt.phase is Phase.PROPOSE and attempt.proposal is not None:
            votes = self._instance.alike(self._instance.votes, attempt.number, attempt.proposal.value.hash)
            for voter in context.electorate.voters(self._instance.head):
                if voter not in votes:
                    context.out.send(voter.peer, attempt.proposal)

    # -- phase 1 -------------------------------------------------------------------------------------------------------

    def promise(self, peer: str, message: say.PromiseMessage) -> None:
        """Take a promise; with those of a quorum, and a moment for the others, go on."""
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
            if message.support is None:
                raise ProtocolViolation("a promise reports an accepted value without what it was made from")
        if not votes and not self._may_join(body.voter, message, attempt):
            return
        attempt.promises[body.voter] = message
        if votes:
            attempt.accepted[body.voter] = body.accepted
        if not self._context.electorate.enough(instance.head, attempt.accepted):
            return
        waited_for = {voter.peer for voter in self._context.electorate.voters(instance.head)}
        if self._context.work.divides_batch():  # a newcomer must be known to come before it gets a part
            waited_for = set(attempt.asked)
        waiting = waited_for - {m.peer for m in attempt.promises} - self._context.down
        if not waiting:
            self._decide_value(attempt)
        elif not attempt.end_at:
            attempt.end_at = self._context.now + self._context.config.grace_s
            self._context.out.timer(TIMER, attempt.end_at)

    def _may_join(self, member: Member, message: say.PromiseMessage, attempt: Attempt) -> bool:
        """Return whether a peer that has no vote may be planned for."""
        if member in {learner.member for learner in self._instance.head.learners}:
            return True
        if member not in attempt.joins or message.join is None:
            return False
        self._succession.join(message.join, self._instance.head, self._instance.hash)
        attempt.joins[member] = message.join
        return True

    def _late_promise(self, attempt: Attempt, peer: str, voter: Member, message: say.PromiseMessage) -> None:
        """Take in the ready contribution of a peer whose promise has come late; a member may vote in any case."""
        if self._chain.is_voter(voter) or self._may_join(voter, message, attempt):
            attempt.promises.setdefault(voter, message)
        if message.contribution is not None and attempt.phase is Phase.COLLECT:
            self.submit(peer, say.SubmitMessage(self._instance.hash, message.contribution, message.join))

    def _decide_value(self, attempt: Attempt) -> None:
        """Propose what may have been chosen in an earlier attempt; else plan."""
        forced = forced_value(attempt.accepted[voter] for voter in sorted(attempt.accepted))  # as the voters check it
        if forced is None:
            self._plan(attempt)
            return
        value = forced.value.hash
        for member in sorted(attempt.accepted):
            accepted, support = attempt.accepted[member], attempt.promises[member].support
            if accepted is None or support is None or accepted.value.hash != value:
                continue
            try:
                self._succession.support(support, self._instance.head, self._instance.hash, True)
            except (ProtocolViolation, RoundDiscarded) as error:
                self._context.out.tell("support_refused", peer=member.peer, reason=str(error))
                continue
            self._propose(attempt, forced.value, support)
            return
        self._fail("no promise brings what the accepted value was made from", again=True)

    # -- work ----------------------------------------------------------------------------------------------------------

    def _plan(self, attempt: Attempt) -> None:
        """Adopt the plan that a majority already works on, or make one; send it to all that promised."""
        attempt.phase = Phase.COLLECT
        head, context = self._instance.head, self._context
        self._exclude(attempt)
        adopted = self._adoptable(attempt)
        if adopted is not None:
            attempt.signed_plan, attempt.plan = adopted
        else:
            speeds = self._speeds(attempt)
            if not speeds:
                self._fail("no peer that may work has promised", again=False)
                return
            plan = context.work.plan(head, attempt.number, speeds, sorted(self._reset))
            attempt.plan, attempt.signed_plan = plan, context.signer.sign(PLAN_KIND, plan)
        attempt.end_at = context.now + attempt.plan.deadline_s
        context.out.timer(TIMER, attempt.end_at)
        for member, message in sorted(attempt.promises.items()):
            if message.plan == attempt.signed_plan and message.contribution is not None:
                try:
                    self.submit(member.peer, say.SubmitMessage(self._instance.hash, message.contribution, message.join))
                except ProtocolViolation as error:  # not the fault of the peer whose promise came last
                    context.blame(member.peer, error)
        if attempt is self._attempt and attempt.phase is Phase.COLLECT:
            # Also to this node and others that have submitted already: with a plan they give the leader its time.
            self._send_plan(attempt, done=())

    def _speeds(self, attempt: Attempt) -> dict[Member, float]:
        """Return the speed of each peer to plan for: those that promised, and newcomers that may be a moment late
        with the last commit. A newcomer that does not come costs no time: it is not waited for."""
        learners = [learner.member for learner in self._instance.head.learners]
        late = [] if self._context.work.divides_batch() else [*learners, *attempt.joins]
        chosen = {member.peer: member for member in (*late, *sorted(attempt.promises))}  # one incarnation of each peer
        for peer in (*self._applicants.proofs, self._context.config.coordinator):
            chosen.pop(peer, None)
        promised = attempt.promises
        return {m: promised[m].speed if m in promised else 0.0 for m in sorted(chosen.values())}

    def _adoptable(self, attempt: Attempt) -> tuple[Signed, WorkPlan] | None:
        """Return the latest plan that a majority of the head's members can still complete, so that a dead leader
        costs no training."""
        head = self._instance.head
        best: tuple[Signed, WorkPlan] | None = None
        for member in sorted(attempt.promises):
            signed = attempt.promises[member].plan
            if signed is None:
                continue
            try:
                plan = self._succession.plan(signed, head, self._instance.hash, attempt.number)
            except ProtocolViolation:
                continue
            alive = sum(head.has(a.member) and a.member in attempt.promises for a in plan.assignments)
            fits = plan.hash not in self._given_up and 2 * alive > len(head.members)
            if fits and (best is None or plan.attempt > best[1].attempt):
                best = (signed, plan)
        return best

    def _exclude(self, attempt: Attempt) -> None:
        """Choose the peers to leave out because others waited for them in vain."""
        told = {member.peer: message.lacks for member, message in attempt.promises.items()}
        waits = {peer: lacks or ((), ()) for peer, lacks in sorted(told.items())}
        tie_breaker = self._context.pick(b"exclude", self._instance.hash, attempt.number.to_bytes(8, "big"))
        self._excluded = choose_excluded(waits, tie_breaker) - {self._context.config.peer}

    def _send_plan(self, attempt: Attempt, done: Collection[Member]) -> None:
        """Send the plan to all but those."""
        assert attempt.signed_plan is not None and attempt.plan is not None
        planned = {assignment.member for assignment in attempt.plan.assignments}
        peers = sorted(member.peer for member in {*attempt.promises, *planned} - set(done))
        order = say.PlanMessage(self._instance.hash, attempt.number, attempt.signed_plan, attempt.finishing_early)
        for peer in peers:
            if peer != self._context.config.coordinator:
                self._context.out.send(peer, order)

    def submit(self, peer: str, message: say.SubmitMessage) -> None:
        """Take a contribution to the present plan."""
        attempt = self._attempt
        if attempt is None or attempt.plan is None or attempt.phase is not Phase.COLLECT:
            return
        body = self._context.signer.open(message.contribution, "contribution", Contribution)
        if body.plan != attempt.plan.hash or body.member in attempt.contributions:
            return
        body = self._succession.contribution(message.contribution, attempt.plan, self._instance.head)
        attempt.contributions[body.member] = (message.contribution, body)
        attempt.took_s[body.member] = self._context.now - self._instance.planned_at
        if self._instance.head.has(body.member):
            self.collect()

    def gathered(self, event: events.Gathered) -> None:
        """The method says that all of the work is done: ask for what there is."""
        if self._attempt is not None and self._attempt.phase is Phase.COLLECT:
            self._finish_early(self._attempt)

    def collect(self) -> None:
        """Go on to the exchange once every live member has submitted; newcomers are not waited for."""
        attempt, context = self._attempt, self._context
        if attempt is None or attempt.phase is not Phase.COLLECT or attempt.plan is None:
            return
        head = self._instance.head
        assigned = [a.member for a in attempt.plan.assignments if a.member in attempt.promises]
        missing = [m for m in assigned if m not in attempt.contributions and m.peer not in context.down]
        if context.now >= attempt.end_at or not missing:
            self._make_roster(attempt)
            return
        if attempt.finishing_early:
            return
        if not any(head.has(member) for member in missing):
            self._finish_early(attempt)
            return
        took = [attempt.took_s[member] for member in sorted(attempt.took_s)]
        late_s = context.work.late_s(attempt.plan, took)
        if late_s is not None:
            late_at = self._instance.planned_at + late_s
            if context.now >= late_at:
                self._finish_early(attempt)
            else:
                context.out.timer(TIMER, min(late_at, attempt.end_at))

    def _finish_early(self, attempt: Attempt) -> None:
        """Ask the missing ones for what they have, and wait a last moment."""
        if attempt.finishing_early:
            return
        attempt.finishing_early = True
        attempt.end_at = min(attempt.end_at, self._context.now + self._context.config.grace_s)
        self._context.out.timer(TIMER, attempt.end_at)
        self._send_plan(attempt, done=attempt.contributions)

    # -- exchange ------------------------------------------------------------------------------------------------------

    def _make_roster(self, attempt: Attempt) -> None:
        assert attempt.plan is not None and attempt.signed_plan is not None
        head, context = self._instance.head, self._context
        ready = fit_roster({member: signed for member, (signed, _) in attempt.contributions.items()})
        members = [member for member in ready if member.peer not in self._excluded] or ready
        if not any(head.has(member) for member in members):
            self._fail("no member has submitted a contribution", again=False)
            return
        newcomers = [m for m in members if m in attempt.joins and not head.has(m)]
        named = head.witness
        witness = self._applicants.witness
        if witness is not None and context.evidence.witness(witness) == named:
            witness = None
        roster = say.RosterBody(
            head=self._instance.hash,
            attempt=attempt.number,
            plan=attempt.plan.hash,
            contributions=tuple(attempt.contributions[member][0] for member in members),
            joins=tuple(attempt.joins[member] for member in newcomers),
            proofs=self._applicants.proofs_against(head),
            witness=witness,
        )
        signed = context.signer.sign(evidence.ROSTER, roster)
        try:
            opened = self._succession.roster(
                attempt.signed_plan, signed, head, self._instance.hash, self._exchanges.accepts_empty
            )
        except (ProtocolViolation, RoundDiscarded) as error:
            self._given_up.add(attempt.plan.hash)
            bodies = [attempt.contributions[member][1] for member in members]
            self._reset = set(context.work.reset(head, attempt.plan, bodies))
            self._fail(str(error), again=True)
            return
        attempt.phase, attempt.signed_roster = Phase.EXCHANGE, signed
        context.out.timer(TIMER, context.now + context.work.exchange_s(head))
        attempt.exchange = self._exchanges.open(opened)
        self._send_roster(attempt)

    def _send_roster(self, attempt: Attempt) -> None:
        assert attempt.signed_plan is not None and attempt.signed_roster is not None
        order = say.RosterMessage(self._instance.hash, attempt.number, attempt.signed_plan, attempt.signed_roster)
        peers = {member.peer for member in (*attempt.promises, *attempt.contributions)}
        for peer in sorted(peers | {member.peer for member in self._instance.head.members}):
            if peer not in (self._context.config.peer, self._context.config.coordinator):
                self._context.out.send(peer, order)

    def built(self, exchange: Exchange) -> None:
        """Propose what this node has built from the present exchange."""
        attempt = self._attempt
        if attempt is None or attempt.phase is not Phase.EXCHANGE or attempt.exchange is not exchange:
            return
        state = self._exchanges.state_of(exchange)
        if state is not None and attempt.number >= self._instance.ballot.promised:
            value = msgspec.structs.replace(exchange.opened.next, state_hash=state)
            self._propose(attempt, value, exchange.support)

    def _propose(self, attempt: Attempt, value: Head, support: say.Support) -> None:
        """Sign the one value of this attempt."""
        attempt.phase = Phase.PROPOSE
        context = self._context
        body = say.ProposalBody(self._instance.hash, attempt.number, value.hash)
        signed = context.signer.sign(evidence.PROPOSAL, body)
        promises = tuple(attempt.promises[voter].promise for voter in sorted(attempt.accepted))
        attempt.proposal = say.ProposalMessage(signed, value, promises, support)
        context.out.timer(TIMER, context.now + context.work.exchange_s(self._instance.head))
        self.repeat()

    # -- time ----------------------------------------------------------------------------------------------------------

    def time(self) -> None:
        """Go on when the present phase has lasted long enough."""
        attempt = self._attempt
        if attempt is None or attempt.number < self._instance.ballot.promised:
            return
        if attempt.phase is Phase.PREPARE:
            if self._context.electorate.enough(self._instance.head, attempt.accepted):
                self._decide_value(attempt)
        elif attempt.phase is Phase.COLLECT:
            self.collect()
        else:
            self._fail(f"waited too long for {attempt.phase.value}", again=attempt.phase is Phase.EXCHANGE)

    def _fail(self, reason: str, again: bool) -> None:
        """Give the attempt up. Try again at once where another attempt can do better and the turn is not over."""
        attempt = self._attempt
        assert attempt is not None
        self._context.out.tell(
            "attempt_failed", round=self._instance.head.round + 1, attempt=attempt.number, reason=reason
        )
        self._attempt = None
        self._tries += 1
        if again and self._tries < TRIES_MAX and attempt.number >= self._instance.ballot.promised:
            self._begin()
