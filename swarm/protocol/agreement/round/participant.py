"""A voter's or newcomer's first half of an attempt: promise to its leader, work under its plan, submit."""

from __future__ import annotations

import msgspec

from peer.catalogue.rounds import RoundPlanned
from peer.errors import ProtocolViolation
from swarm.protocol.agreement import events
from swarm.protocol.agreement import messages as msg
from swarm.protocol.agreement.actions import StopTraining, Train
from swarm.protocol.agreement.chain import position_of
from swarm.protocol.agreement.output import encode
from swarm.protocol.agreement.records import BALLOT_KEY
from swarm.protocol.agreement.round.election_timeouts import ATTEMPTS_AHEAD_MAX
from swarm.protocol.agreement.round.parts import RoundParts
from swarm.protocol.agreement.rules import evidence
from swarm.protocol.agreement.rules.acceptor import Ballot
from swarm.protocol.agreement.rules.electorate import leader_of
from swarm.protocol.agreement.rules.evidence import is_leader
from swarm.protocol.agreement.rules.succession import Succession
from swarm.protocol.plan import PLAN_KIND, Contribution


class Participant:
    """Promises, plan and contribution of one node for the round after one head."""

    def __init__(self, parts: RoundParts) -> None:
        self._context, self._chain, self._instance = parts.context, parts.chain, parts.instance
        self._timeouts, self._applicants = parts.timeouts, parts.applicants
        self._succession = Succession(parts.context)
        self._pending: dict[str, msg.PrepareMessage] = {}  # by leader, whose turn it is not yet

    @property
    def votes(self) -> bool:
        """Whether this node is a voter here."""
        return self._chain.is_voter(self._context.me)

    def set_ballot(self, ballot: Ballot) -> None:
        """Change the promise or vote; what is sent from now on waits until it is on disk."""
        instance = self._instance
        if ballot == instance.ballot:
            return
        instance.ballot = ballot
        # A coordinator's identity as a witness ends with its process, and a required one votes by committing.
        if self.votes and not self._context.config.is_coordinator:
            self._context.out.persist(BALLOT_KEY, encode(instance.record), self._chain.kept)

    # -- promises ------------------------------------------------------------------------------------------------------

    def prepare(self, peer: str, ask: msg.PrepareMessage) -> None:
        """Promise to the leader of an attempt: at once if it is due, else when the present leader's turn is over."""
        instance = self._instance
        if not is_leader(instance.head, instance.hash, ask.attempt, peer):
            raise ProtocolViolation(f"it asked for promises in attempt {ask.attempt}, which another peer leads")
        if ask.attempt > instance.ballot.attempt + ATTEMPTS_AHEAD_MAX:
            raise ProtocolViolation("a leader skipped an absurd number of attempts")
        leader = leader_of(instance.head, instance.hash, ask.attempt)
        if not self._timeouts.is_due(leader) and not self._timeouts.heard(leader, ask.attempt):
            self._pending[peer] = ask
            return
        self._pending.pop(peer, None)
        ballot = instance.ballot.promise(ask.attempt)
        if ballot is None:
            return
        self.set_ballot(ballot)
        self._timeouts.granted(leader, ask.attempt)
        self._context.out.send(peer, self._promise(ask.attempt))

    def promise_pending(self) -> None:
        """Answer the leaders that had to wait, the highest attempt first: the present leader's turn is over."""
        for peer, ask in sorted(self._pending.items(), key=lambda item: -item[1].attempt):
            self.prepare(peer, ask)

    def _promise(self, attempt: int) -> msg.PromiseMessage:
        instance, context = self._instance, self._context
        measured = self._applicants.measured(instance.head)
        body = msg.PromiseBody(instance.hash, attempt, context.me, instance.accepted)
        return msg.PromiseMessage(
            promise=context.signer.sign(evidence.PROMISE, body),
            support=instance.support if instance.accepted is not None else None,
            speed=measured.speed,
            plan=instance.signed_plan,
            contribution=instance.contribution,
            join=self._applicants.request(),
            missing=instance.missing,
            rates=measured.rates or msgspec.UNSET,
        )

    # -- work ----------------------------------------------------------------------------------------------------------

    def work(self, peer: str, order: msg.PlanMessage) -> None:
        """Train under the plan of the attempt promised last, or of a later one."""
        instance, context = self._instance, self._context
        if not is_leader(instance.head, instance.hash, order.attempt, peer):
            raise ProtocolViolation(f"it sent a plan in attempt {order.attempt}, which another peer leads")
        if order.attempt < instance.ballot.promised:
            return
        plan = self._succession.plan(order.plan, instance.head, instance.hash, order.attempt)
        work_s = context.work.timeout_s(instance.head, plan, self._timeouts.rotations)
        seconds = work_s + context.config.finish_s  # until the roster
        seconds += context.work.exchange_s(instance.head) + self._timeouts.turn_s
        self._timeouts.extend(leader_of(instance.head, instance.hash, order.attempt), order.attempt, "plan", seconds)
        mine = instance.signed_plan
        if mine is not None and instance.plan is not None and instance.plan.hash != plan.hash:
            if plan.attempt == instance.plan.attempt:
                self._applicants.convict(PLAN_KIND, mine, order.plan)
                return
            if plan.attempt < instance.plan.attempt:
                return
            context.out.add(StopTraining("a new plan replaced it"))
            instance.contribution = None
        elif instance.plan is not None:
            if instance.contribution is not None:
                self.submit()
                return
            self.inform(peer)
            if order.finish_early and plan.of(context.me) is not None:
                context.out.add(Train(plan, finish_early=True))
            return
        instance.plan, instance.signed_plan, instance.planned_at = plan, order.plan, context.now
        self.inform(peer)
        context.out.emit(RoundPlanned(round=plan.round, members=len(plan.assignments)))
        if plan.of(context.me) is not None:
            context.out.add(Train(plan, order.finish_early))

    def inform(self, leader: str) -> None:
        """Report to a leader which plan and roster this node has, so that it sends them once."""
        instance, context = self._instance, self._context
        if leader != context.config.peer:
            at, latest = position_of(instance.head), self._timeouts.latest
            plan, roster = instance.plan_hash, instance.roster_hash
            context.out.send(leader, msg.StatusMessage(at, instance.hash, context.me, True, latest, plan, roster, True))

    def submitted(self, event: events.Submitted) -> None:
        """Take this node's own contribution."""
        instance = self._instance
        self._applicants.speed = event.speed or self._applicants.speed
        if instance.plan is None or instance.contribution is not None:
            return
        body = self._context.signer.open(event.contribution, "contribution", Contribution)
        if body.plan == instance.plan.hash and body.member == self._context.me:
            instance.contribution = event.contribution
            self.submit()

    def submit(self) -> None:
        """Send the contribution to the leader of the present attempt. A later leader gets it with the promise."""
        instance = self._instance
        if instance.contribution is not None and instance.head.members:
            leader = leader_of(instance.head, instance.hash, instance.ballot.attempt)
            message = msg.SubmitMessage(instance.hash, instance.contribution, self._applicants.request())
            self._context.out.send(leader.peer, message)

    def repeat(self) -> None:
        """Send again what may have been lost."""
        if self._instance.ballot.attempt not in self._instance.rosters:
            self.submit()
