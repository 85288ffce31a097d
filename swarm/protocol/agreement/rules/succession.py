"""The next head as a function of the roster: members, learners, absences, owners and ledger. Every voter derives it.

So a leader can leave out a contribution, and cannot choose the electorate: a member is dropped only after two rounds
without a contribution under two different leaders, or on a proof that any peer can check.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import msgspec
from blake3 import blake3

from peer.errors import ProtocolViolation, RoundDiscarded
from peer.identity import Signed
from swarm.protocol.agreement.context import AgreementContext
from swarm.protocol.agreement.messages import JoinBody, ResultsBody, RosterBody, Support
from swarm.protocol.agreement.rules.electorate import leader_of, owners_of, room_for_newcomers
from swarm.protocol.agreement.rules.evidence import RESULTS, ROSTER, is_leader
from swarm.protocol.agreement.rules.opened_roster import OpenedRoster
from swarm.protocol.agreement.rules.sponsors import Sponsors
from swarm.protocol.head import Absence, Head, Learner, Member, Sponsorship
from swarm.protocol.plan import CONTRIBUTION_KIND, PLAN_KIND, Contribution, WorkPlan
from swarm.protocol.roster_room import bytes_of

MERGED_MIN: Final = 2  # contributions of a learner before it becomes a member
ABSENCES_MAX: Final = 2  # rounds without a contribution, under as many leaders, before a member is dropped
NEWCOMERS_MIN: Final = 16  # newcomers that a roster may have at least, taken in or not
MISSED_MAX: Final = 8  # rounds in a row without a contribution before a learner is dropped


class Succession:
    """Opens plans, rosters and results of one node's group."""

    def __init__(self, context: AgreementContext) -> None:
        self._context = context

    def plan(self, signed: Signed, head: Head, head_hash: bytes, until: int) -> WorkPlan:
        """Open the plan of an attempt up to `until`, signed by the attempt's leader."""
        plan = self._context.signer.open(signed, PLAN_KIND, WorkPlan)
        if plan.attempt > until or not is_leader(head, head_hash, plan.attempt, signed.signer):
            raise ProtocolViolation("a plan is signed by another peer than the leader of its attempt")
        if plan.head != head_hash:
            raise ProtocolViolation("a plan is for another head")
        self._context.work.check_plan(plan, head)
        return plan

    def contribution(self, signed: Signed, plan: WorkPlan, head: Head) -> Contribution:
        """Open a contribution to a plan, signed by its contributor."""
        body = self._context.signer.open(signed, CONTRIBUTION_KIND, Contribution)
        if body.member.peer != signed.signer or plan.of(body.member) is None or body.plan != plan.hash:
            raise ProtocolViolation("a contribution belongs to another peer or plan")
        self._context.work.check_contribution(body, plan, head)
        return body

    def join(self, signed: Signed, head: Head, head_hash: bytes) -> JoinBody:
        """Open a join request for this head or the one before it, by a peer that the run's gate admits."""
        body = self._context.evidence.join(signed)
        if body.head not in (head_hash, head.previous) or body.member.peer == self._context.config.coordinator:
            raise ProtocolViolation("a join request is for another head")
        if self._context.work.sponsors(body, signed.signer) is None:
            raise ProtocolViolation("a join request is of a peer that the run does not admit")
        return body

    def roster(self, signed_plan: Signed, signed: Signed, head: Head, head_hash: bytes) -> OpenedRoster:
        """Check a roster with its plan; derive what follows."""
        context = self._context
        roster = context.signer.open(signed, ROSTER, RosterBody)
        if roster.head != head_hash or not is_leader(head, head_hash, roster.attempt, signed.signer):
            raise ProtocolViolation("a roster is signed by another peer than the leader of its attempt")
        plan = self.plan(signed_plan, head, head_hash, roster.attempt)
        if plan.hash != roster.plan:
            raise ProtocolViolation("a roster is for another plan")
        self._check_size(roster, head)
        bodies = [self.contribution(contribution, plan, head) for contribution in roster.contributions]
        present = [body.member for body in bodies]
        if present != sorted(present) or len({member.peer for member in present}) != len(present):
            raise ProtocolViolation("a roster is out of order or names a peer twice")
        joins = {body.member: body for body in (self.join(join, head, head_hash) for join in roster.joins)}
        inside = {*head.members, *(learner.member for learner in head.learners), *joins}
        if any(member not in inside for member in present):
            raise ProtocolViolation("a roster names a peer that has not asked to join")
        owning = [member for member in present if head.has(member)]
        if not owning:
            raise ProtocolViolation("a roster has no contribution of a member")
        settlement = context.work.settle(head, plan, bodies)
        if settlement is None:
            raise RoundDiscarded("a roster has nothing that may be merged")
        witness = head.witness if roster.witness is None else context.evidence.witness(roster.witness)
        culprits = {context.evidence.culprit(proof) for proof in roster.proofs}
        merged = {body.member for body, w in zip(bodies, settlement.weights, strict=True) if w > 0}
        weights = plan.weights([body for body in bodies if head.has(body.member)])
        owners = owners_of(head_hash, owning, context.work.slices(head), weights)
        contributions = dict(zip(present, roster.contributions, strict=True))
        room = context.roster_room(head, head_hash)
        left_out = room.left_out(contributions, set(head.members).difference(present))
        electorate = _Electors(context, head, culprits, frozenset(left_out))
        electorate.count(set(present), merged, joins, leader_of(head, head_hash, roster.attempt))
        following = msgspec.structs.replace(
            head,
            round=head.round + 1,
            previous=head_hash,
            state_hash=b"",
            members=tuple(sorted(electorate.members)),
            ledger=settlement.ledger,
            inner_step=settlement.inner_step,
            tokens=settlement.tokens,
            senders=settlement.senders,
            witness=witness,
            learners=tuple(sorted(electorate.learners.values())),
            absent=tuple(sorted(electorate.absent)),
            sponsored=electorate.sponsored(),
            attempt=roster.attempt,
        )
        parts: dict[Member, list[int]] = {}
        for index, owner in enumerate(owners):
            parts.setdefault(owner, []).append(index)
        return OpenedRoster(
            key=blake3(signed.body).digest(),
            attempt=roster.attempt,
            signed_plan=signed_plan,
            signed=signed,
            plan=plan,
            contributions=tuple(bodies),
            weights=settlement.weights,
            owners=owners,
            next=following,
            parts={owner: tuple(indexes) for owner, indexes in parts.items()},
            left_out=left_out,
            size=sum(map(bytes_of, roster.contributions)),
        )

    def _check_size(self, roster: RosterBody, head: Head) -> None:
        """Raise if a roster has more in it than any leader may have collected: each signature takes time."""
        n, learners = len(head.members), [learner.member.peer for learner in head.learners]
        if len(roster.contributions) > n + len(learners) + max(2 * room_for_newcomers(n), NEWCOMERS_MIN):
            raise ProtocolViolation("a roster has more contributions than a round has room for")
        if len(roster.joins) > len(roster.contributions):
            raise ProtocolViolation("a roster has join requests of peers that have contributed nothing")
        accused = [proof.first.signer for proof in roster.proofs]
        inside = {*(member.peer for member in head.members), *learners}
        if len(set(accused)) != len(accused) or not inside.issuperset(accused):
            raise ProtocolViolation("a roster has proofs against peers that are in no head, or two against one")

    def results(self, signed: Signed, opened: OpenedRoster, head_hash: bytes) -> tuple[Member, ResultsBody]:
        """Open an owner's results of that exchange."""
        owner = next((member for member in opened.parts if member.peer == signed.signer), None)
        if owner is None:
            raise ProtocolViolation("results are by no owner")
        body = self._context.signer.open(signed, RESULTS, ResultsBody)
        if (body.head, body.attempt, body.key) != (head_hash, opened.attempt, opened.key):
            raise ProtocolViolation("results are of another exchange")
        if len(body.hashes) != len(opened.parts[owner]) or any(len(name) != 32 for name in body.hashes):
            raise ProtocolViolation("results name another number of slices than the owner has")
        return owner, body

    def support(
        self, support: Support, head: Head, head_hash: bytes, known: OpenedRoster | None = None
    ) -> tuple[OpenedRoster, dict[Member, tuple[Signed, ResultsBody]]]:
        """Check what a value was made from: the roster, unless it is the one `known`, and the results of every
        owner."""
        if known is not None and (known.signed_plan, known.signed) == (support.plan, support.roster):
            opened = known
        else:
            opened = self.roster(support.plan, support.roster, head, head_hash)
        if len(support.results) != len(opened.parts):
            raise ProtocolViolation("a value comes without the results of all owners, or with more")
        results: dict[Member, tuple[Signed, ResultsBody]] = {}
        for signed in support.results:
            owner, body = self.results(signed, opened, head_hash)
            results[owner] = (signed, body)
        if set(results) != set(opened.parts):
            raise ProtocolViolation("a value comes without the results of all owners")
        return opened, results


class _Electors:
    """The members, learners and absences of the next head, in the making."""

    def __init__(self, context: AgreementContext, head: Head, culprits: set[str], left_out: frozenset[Member]) -> None:
        self._head, self._culprits, self._left_out = head, culprits, left_out
        self._most = context.config.max_peers
        self.members: set[Member] = set(head.members)
        self.learners: dict[str, Learner] = {entry.member.peer: entry for entry in head.learners}
        self.absent: list[Absence] = []
        self._work, self._sponsors = context.work, Sponsors(head.sponsored)

    def count(
        self, present: set[Member], merged: set[Member], joins: Mapping[Member, JoinBody], leader: Member
    ) -> None:
        """Apply one round."""
        self._drop(present, leader)
        self._learn(present, merged)
        self._promote()
        self._take_in(present, merged, joins)

    @property
    def _inside(self) -> set[str]:
        return {member.peer for member in self.members} | set(self.learners)

    def sponsored(self) -> tuple[Sponsorship, ...]:
        """Return who vouches for those in the next head."""
        return self._sponsors.among(self._inside)

    def _drop(self, present: set[Member], leader: Member) -> None:
        """Drop proved liars, but never the last member, and members absent too often: these only where those that have
        contributed are most of what stays. Else a quorum could vote itself out of the group that is left. A round
        whose roster had no room for a member says nothing about it."""
        for member in sorted(self.members):
            if member.peer in self._culprits and len(self.members) > 1:
                self.members.discard(member)
        before = {entry.member: entry for entry in self._head.absent}
        away = list[Absence]()
        for member in sorted(self.members - present):
            entry = before.get(member, Absence(member, 0, Member("", "")))
            if member in self._left_out:
                self.absent += [entry] if member in before else []
                continue
            away.append(Absence(member, min(entry.rounds + (entry.leader != leader), ABSENCES_MAX), leader))
        leaving = {entry.member for entry in away if entry.rounds >= ABSENCES_MAX}
        if 2 * len(self.members & present) <= len(self.members - leaving):
            leaving = set()
        self.members -= leaving
        self.absent += [entry for entry in away if entry.member not in leaving]

    def _learn(self, present: set[Member], merged: set[Member]) -> None:
        for peer, entry in sorted(self.learners.items()):
            missed = 0 if entry.member in present else entry.missed + 1
            counted = entry.merged + (entry.member in merged)
            self.learners[peer] = Learner(entry.member, counted, missed)
            if peer in self._culprits or missed > MISSED_MAX:
                del self.learners[peer]

    def _promote(self) -> None:
        """Make learners members, a minority a round. A peer's new incarnation takes the place of its old one."""
        room = room_for_newcomers(len(self._head.members))
        for peer, entry in sorted(self.learners.items()):
            if entry.merged >= MERGED_MIN and room > 0:
                room -= 1
                self.members = {member for member in self.members if member.peer != peer}
                self.absent = [absence for absence in self.absent if absence.member.peer != peer]
                self.members.add(entry.member)
                del self.learners[peer]

    def _take_in(self, present: set[Member], merged: set[Member], joins: Mapping[Member, JoinBody]) -> None:
        room = room_for_newcomers(len(self._head.members))
        for member, join in sorted(joins.items()):
            fits = len(self.members) + len(self.learners) < self._most or member.peer in self.learners
            if member not in present or member in self.members or member.peer in self._culprits:
                continue
            known = self.learners.get(member.peer)
            if known is not None and known.member == member:
                continue
            sponsors = self._work.sponsors(join, member.peer) or ()
            if room > 0 and fits and self._sponsors.bring_in(member.peer, sponsors, self._inside):
                room -= 1
                self.learners[member.peer] = Learner(member, int(member in merged))
