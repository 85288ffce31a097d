"""The leader's collection of work: a plan, the contributions to it, and the roster of those that are merged."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Final

from peer.errors import ProtocolViolation, RoundDiscarded
from peer.identity import Signed
from swarm.protocol.agreement import messages as msg
from swarm.protocol.agreement.round.attempt import TIMER, Attempt
from swarm.protocol.agreement.round.exchanges import Exchanges
from swarm.protocol.agreement.round.parts import RoundParts
from swarm.protocol.agreement.rules import evidence
from swarm.protocol.agreement.rules.opened_roster import OpenedRoster
from swarm.protocol.agreement.rules.succession import Succession
from swarm.protocol.claims import Claims
from swarm.protocol.exclusion import choose_excluded
from swarm.protocol.head import Member
from swarm.protocol.ledger import Range
from swarm.protocol.plan import PLAN_KIND, Contribution, WorkPlan

NEWCOMERS_SHARE: Final = 0.25  # of the round's time so far
LATE_SHARE: Final = 0.5  # of `grace_s`


class Collector:
    """Plans work and collects it, for all attempts that one node leads after one head."""

    def __init__(self, parts: RoundParts, exchanges: Exchanges) -> None:
        self._context, self._instance = parts.context, parts.instance
        self._applicants, self._exchanges = parts.applicants, exchanges
        self._succession = Succession(parts.context)
        self._claims = Claims()
        self._gathered = b""  # the hash of the plan whose work is done, as the method says
        self._given_up: set[bytes] = set()  # hashes of plans that cannot be completed
        self._reset: set[Member] = set()  # members that must forget what they have counted
        self._excluded: set[str] = set()  # peers that others waited for in the last exchange

    @property
    def doubted(self) -> frozenset[str]:
        """Peers whose claims do not count any more in this round."""
        return self._claims.doubted

    # -- plan ----------------------------------------------------------------------------------------------------------

    def plan(self, attempt: Attempt) -> bool:
        """Adopt the plan that a majority already works on, or make one. Return False if no peer that may work is
        present."""
        head, context = self._instance.head, self._context
        self._exclude(attempt)
        adopted = self._adoptable(attempt)
        if adopted is not None:
            attempt.signed_plan, attempt.plan = adopted
        else:
            told = self._told(attempt)
            if not told:
                return False
            plan = context.work.plan(head, attempt.number, told, sorted(self._reset))
            attempt.plan, attempt.signed_plan = plan, context.signer.sign(PLAN_KIND, plan)
        attempt.end_at = context.now + attempt.plan.deadline_s
        if attempt.plan.hash == self._gathered:  # in an earlier attempt
            attempt.finishing_early = True
            attempt.end_at = min(attempt.end_at, context.now + context.config.finish_s)
        context.out.timer(TIMER, attempt.end_at)
        return True

    def _told(self, attempt: Attempt) -> dict[Member, msg.Measurements]:
        """Return each peer to plan for, with its measurements: those present, members whose links make them late with
        the last commit, and newcomers, which may be a moment late, too. A newcomer that does not take part costs a
        moment (`_newcomers_had_time`). This node is left out while its owner has paused it, if the plan has another
        member: a roster needs one."""
        context, head = self._context, self._instance.head
        later = context.work.later(head, attempt.present, context.config.grace_s / 2)
        coming = [member for member in later if member.peer not in context.down]
        late = [] if context.work.divides_batch() else [*(e.member for e in head.learners), *attempt.joins, *coming]
        chosen = {member.peer: member for member in (*late, *sorted(attempt.present))}  # one incarnation of each peer
        for peer in (*self._applicants.proofs, context.config.coordinator):
            chosen.pop(peer, None)
        me = context.me
        if self._applicants.paused and any(head.has(member) for member in chosen.values() if member != me):
            chosen.pop(me.peer, None)
        return {m: attempt.present.get(m, msg.Measurements()) for m in sorted(chosen.values())}

    def _adoptable(self, attempt: Attempt) -> tuple[Signed, WorkPlan] | None:
        """Return the latest plan that a majority of the head's members can still complete, so that a dead leader costs
        no training. A member that works under a later plan does not go back to an earlier one."""
        head = self._instance.head
        plans: dict[Member, tuple[Signed, WorkPlan]] = {}
        for member in sorted(attempt.promises):
            signed = attempt.promises[member].plan
            if signed is None:
                continue
            try:
                plans[member] = (signed, self._succession.plan(signed, head, self._instance.hash, attempt.number))
            except ProtocolViolation:
                continue
        at = {member: plans[member][1].attempt if member in plans else -1 for member in attempt.promises}
        best: tuple[Signed, WorkPlan] | None = None
        for signed, plan in plans.values():
            assigned = (a.member for a in plan.assignments if head.has(a.member))
            alive = sum(member in at and at[member] <= plan.attempt for member in assigned)
            fits = plan.hash not in self._given_up and 2 * alive > len(head.members)
            if fits and (best is None or plan.attempt > best[1].attempt):
                best = (signed, plan)
        return best

    def _exclude(self, attempt: Attempt) -> None:
        """Choose the peers to leave out because others have waited for their slices in vain."""
        reported = {member.peer: message.missing for member, message in attempt.promises.items()}
        waits = {peer: missing or ((), ()) for peer, missing in sorted(reported.items())}
        tie_breaker = self._context.pick(b"exclude", self._instance.hash, attempt.number.to_bytes(8, "big"))
        self._excluded = choose_excluded(waits, tie_breaker, self._context.config.peer)

    def send_plan(self, attempt: Attempt, done: Collection[Member]) -> None:
        """Send the plan to all but `done`. Members that have not promised see that the leader makes progress."""
        assert attempt.signed_plan is not None and attempt.plan is not None
        planned = {assignment.member for assignment in attempt.plan.assignments}
        peers = sorted(member.peer for member in {*self._instance.head.members, *attempt.present, *planned} - set(done))
        order = msg.PlanMessage(self._instance.hash, attempt.number, attempt.signed_plan, attempt.finishing_early)
        for peer in peers:
            if peer != self._context.config.coordinator:
                self._context.out.send(peer, order)

    def repeat_plan(self, attempt: Attempt) -> None:
        """Send the plan again to those that neither have it nor have submitted. The request to finish early is short,
        and repeated to all that have not submitted."""
        informed = () if attempt.finishing_early else attempt.informed
        self.send_plan(attempt, done={*attempt.contributions, *informed})

    # -- contributions -------------------------------------------------------------------------------------------------

    def take(self, attempt: Attempt, message: msg.SubmitMessage) -> bool:
        """Take a contribution to the attempt's plan. Return whether it is new and may be the last one that the leader
        waits for: a newcomer's only once that waits for newcomers, or finishes early."""
        if attempt.plan is None:
            return False
        body = self._context.signer.open(message.contribution, "contribution", Contribution)
        if body.plan != attempt.plan.hash or body.member in attempt.contributions:
            return False
        try:
            body = self._succession.contribution(message.contribution, attempt.plan, self._instance.head)
        except ProtocolViolation:
            if body.member.peer == message.contribution.signer:
                attempt.unusable.add(body.member)
            raise
        if not self._may_contribute(attempt, body.member, message.join):
            return False
        attempt.contributions[body.member] = (message.contribution, body)
        attempt.took_s[body.member] = self._context.now - self._instance.planned_at
        return self._instance.head.has(body.member) or attempt.finishing_early or attempt.late_until > 0

    def _may_contribute(self, attempt: Attempt, member: Member, join: Signed | None) -> bool:
        """Return whether a roster may name that peer. A newcomer must have sent its join request to this leader, which
        may have adopted another one's plan."""
        head = self._instance.head
        if head.has(member) or any(learner.member == member for learner in head.learners) or member in attempt.joins:
            return True
        if join is None or self._succession.join(join, head, self._instance.hash).member != member:
            return False
        attempt.joins[member] = join
        return True

    def note_claims(self, claims: Mapping[str, Sequence[Range]]) -> None:
        """Note which samples each peer (by id) says it has counted: together all of the present plan's."""
        if self._instance.plan is not None:
            self._gathered = self._instance.plan.hash
            self._claims.note(claims)

    def finish_gathered(self, attempt: Attempt) -> None:
        """Ask for what is ready, if the work of this attempt's plan is done."""
        if attempt.plan is not None and attempt.plan.hash == self._gathered:
            self._finish_early(attempt)

    def is_complete(self, attempt: Attempt) -> bool:
        """Return whether the leader can stop waiting for members and newcomers; ask slow ones to submit their work so
        far."""
        context, head = self._context, self._instance.head
        if attempt.plan is None:
            return False
        assigned = [a.member for a in attempt.plan.assignments if a.member in attempt.present]
        done = {*attempt.contributions, *attempt.unusable}
        missing = [m for m in assigned if m not in done and m.peer not in context.down]
        if attempt.finishing_early and context.now >= attempt.end_at:
            return True
        if not missing:
            return self._newcomers_had_time(attempt)
        if attempt.finishing_early:
            context.out.timer(TIMER, attempt.end_at)
            return False
        if context.now >= attempt.end_at:
            self._finish_early(attempt)
            return False
        if not any(head.has(member) for member in missing):
            self._finish_early(attempt, self._newcomers_s)
            return False
        took = [attempt.took_s[member] for member in sorted(attempt.took_s)]
        late_s = context.work.late_s(attempt.plan, took)
        late_at = attempt.end_at if late_s is None else self._instance.planned_at + late_s
        if context.now >= late_at:
            self._finish_early(attempt)
        else:
            context.out.timer(TIMER, min(late_at, attempt.end_at))
        return False

    def _newcomers_had_time(self, attempt: Attempt) -> bool:
        """Return whether newcomers of the plan that have not promised had a moment after all others have submitted:
        without it, if a commit takes a whole round to reach a newcomer, that would stay one round behind."""
        context, head = self._context, self._instance.head
        assert attempt.plan is not None
        here = {*attempt.present, *attempt.contributions, *attempt.unusable}
        planned = [a.member for a in attempt.plan.assignments if a.member not in here and not head.has(a.member)]
        if all(member.peer in context.down for member in planned):
            return True
        if not attempt.late_until:
            attempt.late_until = context.now + LATE_SHARE * context.config.grace_s
        if context.now < attempt.late_until:
            context.out.timer(TIMER, attempt.late_until)
            return False
        return True

    @property
    def _newcomers_s(self) -> float:
        """How long newcomers that have promised are waited for after all members have submitted: a small part of the
        round, or of a second."""
        config, took_s = self._context.config, self._context.now - self._instance.planned_at
        return min(config.finish_s, max(config.grace_s, NEWCOMERS_SHARE * took_s))

    def _finish_early(self, attempt: Attempt, wait_s: float | None = None) -> None:
        """Ask the missing members for their work so far, and wait a last moment: `finish_s`, or `wait_s`."""
        if attempt.finishing_early:
            return
        attempt.finishing_early = True
        attempt.end_at = self._context.now + (self._context.config.finish_s if wait_s is None else wait_s)
        self._context.out.timer(TIMER, attempt.end_at)
        self.send_plan(attempt, done=attempt.contributions)

    # -- roster --------------------------------------------------------------------------------------------------------

    def members(self, attempt: Attempt) -> list[Member]:
        """Return those whose contributions the roster can hold, in order; none that others waited for in vain, nor one
        that this node has judged, as long as most are left: a node that finds most others wrong may be wrong itself."""
        ready = sorted(attempt.contributions)
        ready = [member for member in ready if member.peer not in self._excluded] or ready
        kept = [member for member in ready if member.peer not in self._context.judged]
        most = 2 * len(kept) > len(ready) and any(self._instance.head.has(member) for member in kept)
        room = self._context.roster_room(self._instance.head, self._instance.hash)
        return room.fit({member: attempt.contributions[member][0] for member in (kept if most else ready)})

    def roster(self, attempt: Attempt, members: Sequence[Member]) -> OpenedRoster:
        """Return the roster of these contributions. Raise `RoundDiscarded` or `ProtocolViolation` if they cannot be
        merged: then the plan is abandoned, and the next one names those that must forget their samples."""
        assert attempt.plan is not None and attempt.signed_plan is not None
        head, context, witness = self._instance.head, self._context, self._applicants.witness
        newcomers = [m for m in members if m in attempt.joins and not head.has(m)]
        if witness is not None and context.evidence.witness(witness) == head.witness:
            witness = None
        roster = msg.RosterBody(
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
            return self._succession.roster(attempt.signed_plan, signed, head, self._instance.hash)
        except (ProtocolViolation, RoundDiscarded):
            self._give_up(attempt, attempt.plan, members)
            raise

    def _give_up(self, attempt: Attempt, plan: WorkPlan, members: Sequence[Member]) -> None:
        """Abandon a plan, and note which members must forget their counted samples: those that counted the same ones as
        others, and those that did not submit the ones they had claimed."""
        self._given_up.add(plan.hash)
        bodies = {member: body for member, (_, body) in attempt.contributions.items()}
        liable = {*self._instance.head.members, *(a.member for a in plan.assignments)}
        disputed = self._context.work.disputed(self._instance.head, [bodies[m] for m in members])
        self._reset = self._claims.settle(plan, liable, bodies, attempt.unusable, disputed)
