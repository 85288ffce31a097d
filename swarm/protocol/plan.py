"""Plans, contributions and rosters of a round: which peer trains on which samples and merges which slices.

Everything here is a pure function of values that all members hold. A peer that receives a plan or a roster checks every
number in it instead of trusting the leader.

The method cuts its updates into *slices*. A slice is encoded, hashed, sent, merged by its *owner* and sent back to all
contributors (butterfly all-reduce with one owner a slice).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from statistics import median_low
from typing import Annotated, Final

import msgspec
from blake3 import blake3

from peer.bounds import MEMBERS_MAX, SLICES_MAX, Count, Hash, Loss, Number, Seconds, SquaredNorm
from peer.errors import ProtocolViolation
from swarm.protocol.head import Head, Member
from swarm.protocol.ledger import Ledger, Range, Ranges, contains, count, head_of, overlaps, union
from swarm.protocol.receipts import Receipts, StageProof
from swarm.protocol.round_schedule import RoundSchedule, with_surplus
from swarm.protocol.shares import SHARE_MAX

ROUND_TIME_SLACK: Final = 2.0  # a contributor may take this many times the expected compute time
RANGES_MAX: Final = 1 << 15  # of samples, in one contribution
RETURNED_MAX: Final = 2048  # ranges that a later stage's ledger keeps on either side of its members' position
REACH_MAX: Final = 1 << 40  # samples that a contribution may be ahead of the ledger, so that numbers do not run out

Share = Annotated[int, msgspec.Meta(ge=0, le=SHARE_MAX)]
Shares = Annotated[tuple[Share, ...], msgspec.Meta(max_length=MEMBERS_MAX)]

CONTRIBUTION_KIND: Final = "contribution"
PLAN_KIND: Final = "plan"


class Assignment(msgspec.Struct, frozen=True):
    """One member's part of a plan."""

    member: Member
    ranges: Ranges
    """Samples to train on; empty for a pipeline's later stages. Promised ranges may exceed `steps`: a member may use
    them up while it waits for the others."""
    steps: Number
    """Inner steps to make; for a pipeline's later stages, a bound on what the member may claim."""
    ahead: Ranges = ()
    """Samples promised for the next round, to train on while this round's exchange is in flight."""
    reset: bool = False
    """The member must forget the samples counted since the last commit, because others have counted the same ones."""


class WorkPlan(msgspec.Struct, frozen=True):
    """The compute phase of a round. The leader signs it and sends it to all members."""

    head: Hash
    round: Count
    attempt: Count
    assignments: Annotated[tuple[Assignment, ...], msgspec.Meta(max_length=MEMBERS_MAX)]
    deadline_s: Seconds
    """Seconds from receipt after which a contributor stops where it is."""
    shares: Shares | msgspec.UnsetType = msgspec.UNSET
    """How much each of `assignments` merges, in proportion (`swarm.protocol.shares`). Unset: all the same."""

    @property
    def hash(self) -> bytes:
        return blake3(_ENCODER.encode(self)).digest()

    def of(self, member: Member) -> Assignment | None:
        """Return the member's assignment, or None."""
        return next((a for a in self.assignments if a.member == member), None)

    def weights(self, owners: Sequence[Contribution]) -> list[int]:
        """Return how much each of these contributors merges, in proportion: nothing if it cannot be dialled."""
        shares = self.shares if isinstance(self.shares, tuple) else (1,) * len(self.assignments)
        given = {a.member: share for a, share in zip(self.assignments, shares, strict=True)}
        return [0 if body.client is True else given[body.member] for body in owners]


class Contribution(msgspec.Struct, frozen=True):
    """A contributor's signed commitment to its update, made before it sends any slice."""

    head: Hash
    plan: Hash
    member: Member
    steps: Count
    """Inner steps made; 0 means no work, and no slices."""
    samples: Count
    loss: Loss
    hashes: Annotated[tuple[Hash, ...], msgspec.Meta(max_length=SLICES_MAX)]
    """Of each bundle of encoded slices (`optim.bundles`)."""
    sqnorms: Annotated[tuple[SquaredNorm, ...], msgspec.Meta(max_length=SLICES_MAX)]
    """The squared norm of each bundle's decoded values, float64."""
    counted: Annotated[tuple[Range, ...], msgspec.Meta(max_length=RANGES_MAX)] = ()
    """In a pipeline, the samples in the update, in order. Elsewhere they are the first `samples` of those assigned."""
    receipts: Receipts = ()
    """At a later stage: by peers of the stage before, for the samples in `counted` (`swarm.protocol.receipts`)."""
    stage_before: StageProof = ()
    """The proof of a head of the stage before, where receipts are by peers that the group's head does not know."""
    first_stage: StageProof = ()
    """In the last round of a later stage: the proof of the first stage's last head, which says what that has merged."""
    exhausted: bool = msgspec.field(default=False, name="dry")  # as protocol 8 calls it
    """No work can come in this round. Where most contributors say so and none has any, nothing is merged."""
    client: bool | msgspec.UnsetType = msgspec.UNSET
    """No other peer can dial this one, so it merges nothing. Unset: others can."""

    @property
    def norm(self) -> float:
        """The norm of the whole update."""
        return float(sum(self.sqnorms) ** 0.5)


def make_plan(
    head: Head,
    attempt: int,
    members: Mapping[Member, float],
    schedule: RoundSchedule,
    reset: Collection[Member] = (),
    shares: Mapping[Member, int] | None = None,
) -> WorkPlan:
    """Assign a round's work. `members` maps each member to its measured inner steps a second, 0 if unknown; members in
    `reset` must forget their counted samples. `shares`: how much each merges, if not all the same."""
    counts, expected_s = schedule.divide(head, members)
    ordered = sorted(members)
    assignments = [Assignment(m, (), counts[m]) for m in ordered] if schedule.stage else _assign(head, counts, schedule)
    return WorkPlan(
        head=head.hash,
        round=head.round + 1,
        attempt=attempt,
        assignments=tuple(msgspec.structs.replace(a, reset=a.member in reset) for a in assignments),
        deadline_s=min(schedule.compute_s_max, ROUND_TIME_SLACK * expected_s + 5.0),
        shares=tuple(shares[m] for m in ordered) if shares else msgspec.UNSET,
    )


def _assign(head: Head, counts: Mapping[Member, int], schedule: RoundSchedule) -> list[Assignment]:
    """Assign each member the samples it was promised, or the next free ones."""
    ordered = sorted(counts)
    ranges = {member: head.ledger.promise(member.peer) for member in ordered}
    fresh = [member for member in ordered if not ranges[member]]
    overlapping = ordered if schedule.overlaps else []
    wanted = [counts[member] for member in fresh] + [with_surplus(counts[member]) for member in overlapping]
    handed = head.ledger.assign([steps * schedule.unit for steps in wanted])
    ranges.update(zip(fresh, handed, strict=False))
    ahead = dict(zip(overlapping, handed[len(fresh) :], strict=True))
    steps = {member: min(counts[member], count(ranges[member]) // schedule.unit) for member in ordered}
    return [Assignment(m, ranges[m], steps[m], ahead.get(m, ())) for m in ordered]


def check_plan(plan: WorkPlan, head: Head, schedule: RoundSchedule) -> None:
    """Raise `ProtocolViolation` if a plan does not follow from the head."""
    ranges = {a.member.peer: a.ranges for a in plan.assignments}
    if plan.head != head.hash or plan.round != head.round + 1:
        raise ProtocolViolation("the plan is for another round")
    if len(ranges) != len(plan.assignments) or not plan.assignments:
        raise ProtocolViolation("the plan names a peer twice, or no peer")
    if isinstance(plan.shares, tuple) and not (schedule.by_link and len(plan.shares) == len(plan.assignments)):
        raise ProtocolViolation("the plan gives shares of the merging to other members than it names, or in this run")
    schedule.check(head, {a.member: a.steps for a in plan.assignments})
    if not 0 < plan.deadline_s <= schedule.compute_s_max:
        raise ProtocolViolation("the plan's deadline is outside what the run's manifest allows")
    if schedule.stage:
        if any(a.ranges or a.ahead for a in plan.assignments):
            raise ProtocolViolation("the plan assigns samples to a stage that is assigned none")
        return
    needed = {a.member.peer: a.steps * schedule.unit for a in plan.assignments}
    surplus = {peer: count(r) - needed[peer] for peer, r in ranges.items()}
    if any(more < 0 or (more and not head.ledger.promise(peer)) for peer, more in surplus.items()):
        raise ProtocolViolation("the plan assigns an impossible amount of work")
    if any(count(a.ahead) > schedule.ahead(head) * schedule.unit for a in plan.assignments):
        raise ProtocolViolation("the plan promises more work than a round has")
    handed = {peer: r for peer, r in ranges.items() if not head.ledger.promise(peer)}
    if any(ranges[peer] != promise for peer, promise in head.ledger.promised if peer in ranges):
        raise ProtocolViolation("the plan breaks a promise of the last round")
    handed |= {f"{a.member.peer} ahead": a.ahead for a in plan.assignments}
    if any(first >= last for r in handed.values() for first, last in r):
        raise ProtocolViolation("the plan assigns an empty range of samples")
    if overlaps(handed):
        raise ProtocolViolation("the plan assigns a sample twice")
    end = head.ledger.cursor + sum(count(r) for r in handed.values())
    if any(not contains([*head.ledger.returned, (head.ledger.cursor, end)], r) for r in handed.values()):
        raise ProtocolViolation("the plan assigns samples that are not free")


def check_contribution(body: Contribution, plan: WorkPlan, slices: int, head: Head, schedule: RoundSchedule) -> None:
    """Raise `ProtocolViolation` if a contribution is for another plan or claims more than the plan allows."""
    assignment = plan.of(body.member)
    if body.plan != plan.hash or body.head != plan.head or assignment is None:
        raise ProtocolViolation("a contribution belongs to another plan")
    if (body.receipts or body.stage_before) and not schedule.stage:
        raise ProtocolViolation("a contribution has receipts of a stage before, and there is none")
    if body.first_stage and not schedule.closes(head):
        raise ProtocolViolation("a contribution proves the first stage's head before the last round")
    if schedule.pipeline:
        _check_counted(body, assignment, head, schedule)
    elif body.counted:
        raise ProtocolViolation("a contribution names samples, which only a stage of a pipeline does")
    elif body.steps < 0 or body.samples != body.steps * schedule.batch_size or body.samples > count(assignment.ranges):
        raise ProtocolViolation("a contribution claims more work than was assigned")
    if body.client is not msgspec.UNSET and not schedule.by_link:
        raise ProtocolViolation("a contribution is of a client, which this run does not know")
    if body.exhausted and body.steps:
        raise ProtocolViolation("a contribution has work and says that none can come")
    expected = slices if body.steps else 0
    if len(body.hashes) != expected or len(body.sqnorms) != expected or any(len(h) != 32 for h in body.hashes):
        raise ProtocolViolation("a contribution has the wrong number of slices")


def _check_counted(body: Contribution, assignment: Assignment, head: Head, schedule: RoundSchedule) -> None:
    if body.counted != union(body.counted) or body.samples != count(body.counted):
        raise ProtocolViolation("a contribution does not name the samples it contains")
    size = schedule.micro_batch
    if size and any(first % size or last % size for first, last in body.counted):
        raise ProtocolViolation(f"a contribution counts samples that are no whole micro-batches of {size}")
    most = schedule.most_steps(head)
    if not 0 <= body.steps <= most or body.samples > most * schedule.unit or (body.steps > 0) != (body.samples > 0):
        raise ProtocolViolation("a contribution claims an impossible amount of work")
    if not head.ledger.is_free(body.counted) or any(last > head.ledger.cursor + REACH_MAX for _, last in body.counted):
        raise ProtocolViolation("a contribution counts samples that are not free")
    batch = schedule.batch(head)
    given = assignment.ranges if batch is None else (batch,)
    if not (batch is None and schedule.stage) and not contains(given, body.counted):
        raise ProtocolViolation("a contribution counts samples that do not belong to this round")


def next_ledger(
    head: Head,
    plan: WorkPlan,
    merged: Sequence[Contribution],
    everyone: Sequence[Contribution],
    schedule: RoundSchedule,
) -> Ledger:
    """Return the ledger after a commit of the contributions `merged`; those of `everyone` keep their promises."""
    consumed = []
    for body in merged:
        assignment = plan.of(body.member)
        assert assignment is not None
        consumed.append(body.counted if schedule.pipeline else head_of(assignment.ranges, body.samples))
    staying = {body.member for body in everyone}
    promised = {a.member.peer: a.ahead for a in plan.assignments if a.member in staying}
    ledger = head.ledger.settle([a.ranges for a in plan.assignments], consumed, promised)
    if schedule.follows and (at := _position(merged)) is not None:
        ledger = ledger.without_oldest(at, RETURNED_MAX)  # samples left so far behind do not come again
    return ledger


def within_reach(
    head: Head, plan: WorkPlan, bodies: Sequence[Contribution], schedule: RoundSchedule
) -> Sequence[Contribution]:
    """Return the contributions to a later stage that leave its ledger small enough.

    Its members are assigned no samples, so one could count scattered ones without limit. Where more than `RETURNED_MAX`
    free ranges, and more than before, would lie beyond the members' median position, those contributions are left out
    that have most of theirs there."""
    kept = list(bodies)
    while schedule.follows and len(kept) > 1 and (at := _position(kept)) is not None:
        most = max(RETURNED_MAX, head.ledger.ranges_from(at))
        if next_ledger(head, plan, kept, kept, schedule).ranges_from(at) <= most:
            break
        beyond = [sum(first >= at for first, _ in body.counted) for body in kept]
        del kept[beyond.index(max(beyond))]
    return kept


def _position(bodies: Sequence[Contribution]) -> int | None:
    """Return the lower median of where contributions end; None if they contain no samples."""
    reached = [body.counted[-1][1] for body in bodies if body.counted]
    return median_low(reached) if reached else None


_ENCODER: Final = msgspec.msgpack.Encoder(order="deterministic")
