"""What the stages of a pipeline count: issued = merged + free + lost at every head of every stage, whatever is lost."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from optim.config import DilocoConfig
from peer.config import InnerConfig
from peer.errors import ProtocolViolation
from peer.identity import Signed
from swarm.protocol.agreement.messages import ChainLink, Measurements
from swarm.protocol.agreement.work import Work
from swarm.protocol.head import Head, Member, genesis
from swarm.protocol.ledger import Range, common, count, overlaps, union, without
from swarm.protocol.plan import Contribution, WorkPlan
from swarm.protocol.receipts import ReceiptBody, StageProof
from swarm.protocol.round_schedule import RoundSchedule

ROUNDS, STEPS, BATCH, MICRO, SEQ = 4, 3, 4, 2, 8
MEMBERS = tuple(Member(peer, "s") for peer in "ABC")
FIRST = RoundSchedule(
    DilocoConfig(steps=STEPS), InnerConfig(lr=1e-2, batch_size=BATCH, total_steps=100), SEQ, 60.0, 0, 3, MICRO, ROUNDS
)


class Believed:
    """What other stages say, believed as it comes."""

    def head(self, stage: int, links: StageProof) -> Head:
        return links[-1].head

    def receipt(self, signed: Signed) -> ReceiptBody:
        return msgspec.msgpack.decode(signed.body, type=ReceiptBody)


def work_of(stage: int) -> Work:
    schedule = dataclasses.replace(FIRST, stage=stage)
    return Work(schedule, lambda head: 1, lambda head: 4.0, stages=Believed())


def body_of(
    plan: WorkPlan, member: Member, counted: tuple[Range, ...], first_stage: tuple[ChainLink, ...] = ()
) -> Contribution:
    work = bool(counted)
    return Contribution(
        head=plan.head,
        plan=plan.hash,
        member=member,
        steps=int(work),
        samples=count(counted),
        loss=1.0,
        hashes=(b"h" * 32,) * work,
        sqnorms=(1.0,) * work,
        counted=counted,
        first_stage=first_stage,
        exhausted=not counted,
    )


@dataclass
class Stage:
    """One group: its head, and all that its commits contain."""

    stage: int
    head: Head = field(init=False)
    merged: list[Range] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.work = work_of(self.stage)
        self.head = msgspec.structs.replace(genesis(f"group {self.stage}", b"s" * 32), members=MEMBERS)

    def plan(self) -> WorkPlan:
        return self.work.plan(self.head, 0, dict.fromkeys(MEMBERS, Measurements(1.0)), ())

    def commit(self, plan: WorkPlan, bodies: list[Contribution]) -> bool:
        """Merge what may be merged; return whether there is a new head."""
        for body in bodies:
            self.work.check_contribution(body, plan, self.head)
        settlement = self.work.settle(self.head, plan, bodies)
        if settlement is None:
            return False
        self.merged += [
            r for body, weight in zip(bodies, settlement.weights, strict=True) if weight > 0 for r in body.counted
        ]
        self.head = msgspec.structs.replace(
            self.head,
            round=self.head.round + 1,
            previous=self.head.hash,
            ledger=settlement.ledger,
            tokens=settlement.tokens,
        )
        self.check()
        return True

    def check(self) -> None:
        """The invariant, by the head alone and by all that was merged."""
        head, ledger = self.head, self.head.ledger
        assert ledger.cursor == head.tokens // SEQ + count(ledger.returned) + ledger.lost
        assert not overlaps({"all": tuple(self.merged)}), "a sample was merged twice"
        assert head.tokens // SEQ == count(self.merged)
        missing = without([(0, ledger.cursor)], [*self.merged, *ledger.returned])
        assert count(missing) == ledger.lost, "a sample was lost silently"


def micro_batches(ranges: tuple[Range, ...]) -> list[Range]:
    return [(at, at + MICRO) for first, end in ranges for at in range(first, end, MICRO)]


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_nothing_is_lost_silently(data: st.DataObject) -> None:
    """Three stages; in each, replicas lose what they have counted, claim what others have, and what is lost may be
    dispatched again or not."""
    first, later = Stage(0), [Stage(1), Stage(2)]
    waiting: dict[int, list[Range]] = {1: [], 2: []}
    while first.head.round < ROUNDS:
        plan = first.plan()
        bodies = []
        for assignment in plan.assignments:
            mine = micro_batches(assignment.ranges)
            done = data.draw(st.sets(st.sampled_from(mine))) if mine else set()
            bodies.append(body_of(plan, assignment.member, union(done)))
        first.commit(plan, bodies)
        for stage in later:
            waiting[stage.stage] += [r for body in bodies for r in micro_batches(body.counted)]
            if stage.head.round + 1 < ROUNDS:
                _count(stage, waiting[stage.stage], data)
    proof = (ChainLink(first.head),)
    for stage in later:
        while stage.head.round + 1 < ROUNDS:
            _count(stage, waiting[stage.stage], data)
        plan = stage.plan()
        nothing = [body_of(plan, member, ()) for member in MEMBERS]
        assert stage.work.settle(stage.head, plan, nothing) is None, "not without the first stage's end"
        again = common(first.head.ledger.settled, stage.head.ledger.free)
        found = data.draw(st.sets(st.sampled_from(micro_batches(again)))) if again else set()
        knowing = data.draw(st.integers(0, len(MEMBERS) - 1))
        bodies = [
            body_of(plan, member, union(found) if k == 0 else (), proof if k == knowing else ())
            for k, member in enumerate(MEMBERS)
        ]
        assert stage.commit(plan, bodies)
        assert not without(first.head.ledger.settled, stage.head.ledger.settled), "all is merged or declared lost"
        assert stage.head.ledger.cursor >= first.head.ledger.cursor


def _count(stage: Stage, waiting: list[Range], data: st.DataObject) -> None:
    """One round of a later stage: each micro-batch is counted by a replica or two, is late, or is lost."""
    claims: list[set[Range]] = [set() for _ in MEMBERS]
    late = []
    for samples in waiting:
        fate = data.draw(st.sampled_from(["A", "B", "C", "A", "B", "C", "two", "late", "lost"]))
        if not stage.head.ledger.is_free([samples]):
            continue
        for k, member in enumerate(MEMBERS):
            if fate == member.peer or (fate == "two" and k < 2):
                claims[k].add(samples)
        if fate == "late":
            late.append(samples)
    waiting[:] = late
    plan = stage.plan()
    stage.commit(plan, [body_of(plan, m, union(claim)) for m, claim in zip(MEMBERS, claims, strict=True)])


def test_the_first_stages_end_is_proved_in_the_last_round_only() -> None:
    stage = Stage(1)
    plan = stage.plan()
    end = msgspec.structs.replace(genesis("group 0", b"s" * 32), round=ROUNDS)
    with pytest.raises(ProtocolViolation, match="before the last round"):
        stage.work.check_contribution(body_of(plan, MEMBERS[0], (), (ChainLink(end),)), plan, stage.head)
    stage.head = msgspec.structs.replace(stage.head, round=ROUNDS - 1)
    plan = stage.plan()
    early = (ChainLink(msgspec.structs.replace(end, round=ROUNDS - 1)),)
    with pytest.raises(ProtocolViolation, match="not its last"):
        stage.work.check_contribution(body_of(plan, MEMBERS[0], (), early), plan, stage.head)
    stage.work.check_contribution(body_of(plan, MEMBERS[0], (), (ChainLink(end),)), plan, stage.head)
