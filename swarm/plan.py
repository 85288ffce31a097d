"""What a round will do, decided before it does it: who trains on what for how long, who sums which slice.

Everything here is a pure function of values that all members hold, so that whoever receives a plan or a roster can
check every number in it instead of trusting the leader.

The method cuts its messages into *slices*. A slice is the unit that is encoded, hashed, sent, merged by its *owner*,
and sent back to all (butterfly all-reduce with one owner a slice).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Final

import msgspec
from blake3 import blake3

from peer.errors import ProtocolViolation
from peer.identity import Signed, open_body
from swarm.chain import Count, Hash, Head, Member
from swarm.ledger import Range, contains, count, head_of, overlaps
from swarm.pace import Pace, with_surplus

EQUAL_WITHIN: Final = 3.0  # links whose speeds differ by less than this share equally: measurements are noisy
ROUND_TIME_SLACK: Final = 2.0  # a contributor may take this many times the expected compute time

CONTRIBUTION_KIND: Final = "contribution"
PLAN_KIND: Final = "plan"


class Assignment(msgspec.Struct, frozen=True):
    """`steps` inner steps on the samples in `ranges` (see `swarm.ledger`); `ahead` is promised to the member for the
    next round, so that it can train on while this one's exchange is in flight. Ranges that were promised may hold more
    than `steps` need: a member that waits for the others may use them up."""

    member: Member
    ranges: tuple[Range, ...]
    steps: int
    ahead: tuple[Range, ...] = ()


class WorkPlan(msgspec.Struct, frozen=True):
    """The compute half of a round: sent signed by the leader before anybody computes. `deadline_s` is the time from its
    receipt after which a contributor stops where it is."""

    head: Hash
    round: Count
    attempt: Count
    assignments: tuple[Assignment, ...]
    deadline_s: float

    @property
    def hash(self) -> bytes:
        return blake3(_ENCODER.encode(self)).digest()

    def of(self, member: Member) -> Assignment | None:
        return next((a for a in self.assignments if a.member == member), None)


class Contribution(msgspec.Struct, frozen=True):
    """What a contributor commits to, signed, before it sends a byte: the blake3 hash and the squared norm (of the
    decoded values, float64) of each encoded slice of its pseudo-gradient. No slices at all if it did no work (`steps`
    = 0)."""

    head: Hash
    plan: Hash
    member: Member
    steps: Count
    samples: Count
    loss: float
    hashes: tuple[Hash, ...]
    sqnorms: tuple[float, ...]

    @property
    def norm(self) -> float:
        return float(sum(self.sqnorms) ** 0.5)


class Roster(msgspec.Struct, frozen=True):
    """The exchange half of a round, for one attempt: whose updates are merged (`contributions`, in order of peer id)
    and which of them owns each slice (`owners[i]` indexes `contributions`)."""

    head: Hash
    plan: Hash
    attempt: Count
    contributions: tuple[Signed, ...]
    owners: tuple[int, ...]

    @property
    def hash(self) -> bytes:
        return blake3(_ENCODER.encode(self)).digest()


def make_plan(head: Head, attempt: int, members: Mapping[Member, float], pace: Pace) -> WorkPlan:
    """Assign a round's work. `members` maps each to its measured speed in inner steps a second, 0 if not yet known."""
    counts, expected_s = pace.divide(head, members)
    ordered = sorted(members)
    ranges = {member: head.ledger.promise(member.peer) for member in ordered}
    fresh = [member for member in ordered if not ranges[member]]
    eager = ordered if pace.overlaps else []
    wanted = [counts[member] for member in fresh] + [with_surplus(counts[member]) for member in eager]
    handed = head.ledger.assign([steps * pace.batch_size for steps in wanted])
    ranges.update(zip(fresh, handed, strict=False))
    ahead = dict(zip(eager, handed[len(fresh) :], strict=True))
    steps = {member: min(counts[member], count(ranges[member]) // pace.batch_size) for member in ordered}
    return WorkPlan(
        head=head.hash,
        round=head.round + 1,
        attempt=attempt,
        assignments=tuple(
            Assignment(member, ranges[member], steps[member], ahead.get(member, ()))
            for member in ordered
        ),
        deadline_s=min(pace.compute_s_max, ROUND_TIME_SLACK * expected_s + 5.0),
    )


def check_plan(plan: WorkPlan, head: Head, pace: Pace) -> None:
    """Refuse a plan that does not follow from the head: `ProtocolViolation` says what is wrong with it."""
    ranges = {a.member.peer: a.ranges for a in plan.assignments}
    if plan.head != head.hash or plan.round != head.round + 1:
        raise ProtocolViolation("the plan is for another round")
    if len(ranges) != len(plan.assignments) or not plan.assignments:
        raise ProtocolViolation("the plan names a peer twice, or nobody")
    pace.check(head, {a.member: a.steps for a in plan.assignments})
    needed = {a.member.peer: a.steps * pace.batch_size for a in plan.assignments}
    surplus = {peer: count(r) - needed[peer] for peer, r in ranges.items()}
    if any(more < 0 or (more and not head.ledger.promise(peer)) for peer, more in surplus.items()):
        raise ProtocolViolation("the plan assigns an impossible amount of work")
    if any(count(a.ahead) > pace.ahead(head) * pace.batch_size for a in plan.assignments):
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
    if not 0 < plan.deadline_s <= pace.compute_s_max:
        raise ProtocolViolation("the plan's deadline is outside what the run's manifest allows")


def share_slices(slices: int, bandwidths: Sequence[float]) -> tuple[int, ...]:
    """Owner of each slice, in contiguous parts proportional to bandwidth (bytes/s, measured; 0 if unknown)."""
    usual = median(known) if (known := [b for b in bandwidths if b > 0]) else 1.0
    weights = [b if b > 0 else usual for b in bandwidths]
    if max(weights) < EQUAL_WITHIN * min(weights):
        weights = [1.0] * len(weights)
    total = sum(weights)
    owners: list[int] = []
    reached = 0.0
    for owner, weight in enumerate(weights):
        reached += weight
        upto = slices if owner == len(weights) - 1 else round(slices * reached / total)
        owners += [owner] * (upto - len(owners))
    return tuple(owners)


def open_contribution(signed: Signed, plan: WorkPlan, slices: int, batch_size: int) -> Contribution:
    """Check one commitment against the plan; `ProtocolViolation` if it is forged, foreign or claims too much."""
    body = open_body(signed, CONTRIBUTION_KIND, Contribution)
    assignment = plan.of(body.member)
    if body.plan != plan.hash or body.head != plan.head or assignment is None:
        raise ProtocolViolation("a contribution belongs to another plan")
    if body.member.peer != signed.signer:
        raise ProtocolViolation("a contribution is signed by another peer than it names")
    if body.steps < 0 or body.samples != body.steps * batch_size or body.samples > count(assignment.ranges):
        raise ProtocolViolation("a contribution claims more work than was assigned")
    expected = slices if body.steps else 0
    if len(body.hashes) != expected or len(body.sqnorms) != expected or any(len(h) != 32 for h in body.hashes):
        raise ProtocolViolation("a contribution has the wrong number of slices")
    if any(not 0 <= q < 1e30 for q in body.sqnorms):  # also refuses NaN
        raise ProtocolViolation("a contribution has a norm that is not finite")
    return body


def open_roster(roster: Roster, head: Head, plan: WorkPlan, slices: int, batch_size: int) -> list[Contribution]:
    """Check a roster against the head and the plan; returns its contributions in order."""
    if roster.head != head.hash or roster.plan != plan.hash:
        raise ProtocolViolation("the roster is for another round or plan")
    if len(roster.contributions) > len(plan.assignments):
        raise ProtocolViolation("the roster names more peers than were assigned work")
    bodies = [open_contribution(signed, plan, slices, batch_size) for signed in roster.contributions]
    members = [body.member for body in bodies]
    if members != sorted(members) or len({m.peer for m in members}) != len(members):
        raise ProtocolViolation("the roster is out of order or names a peer twice")
    if sum(head.has(member) for member in members) < head.quorum:
        raise ProtocolViolation("the roster holds no majority of the last commit")
    if len(roster.owners) != slices or any(not 0 <= owner < len(members) for owner in roster.owners):
        raise ProtocolViolation("the roster leaves a slice without an owner")
    return bodies


def next_head(
    head: Head,
    plan: WorkPlan,
    merged: Sequence[Contribution],
    everyone: Sequence[Contribution],
    pace: Pace,
    state_hash: bytes,
) -> Head:
    """The head a completed exchange leads to. `merged` are the contributions that passed the gate; `everyone` stays."""
    consumed = []
    for body in merged:
        assignment = plan.of(body.member)
        assert assignment is not None
        consumed.append(head_of(assignment.ranges, body.samples))
    staying = {body.member for body in everyone}
    promised = {a.member.peer: a.ahead for a in plan.assignments if a.member in staying}
    return Head(
        run_id=head.run_id,
        term=head.term,
        round=head.round + 1,
        previous=head.hash,
        state_hash=state_hash,
        members=tuple(body.member for body in everyone),
        ledger=head.ledger.settle([a.ranges for a in plan.assignments], consumed, promised),
        inner_step=head.inner_step + pace.advance(max((body.steps for body in merged), default=0)),
        tokens=head.tokens + pace.seq_len * sum(body.samples for body in merged),
    )


_ENCODER: Final = msgspec.msgpack.Encoder(order="deterministic")
