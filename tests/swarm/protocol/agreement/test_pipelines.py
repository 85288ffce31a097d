"""The stages of a pipeline on the core: what replicas have counted, synchronous batches, starts at other positions."""

from __future__ import annotations

import dataclasses

import msgspec
import pytest

from optim.config import AllReduceConfig, DilocoConfig, OuterConfig
from peer.config import InnerConfig
from swarm.protocol.agreement import events
from swarm.protocol.head import Head
from swarm.protocol.ledger import Range, count, without
from swarm.protocol.plan import WorkPlan
from swarm.protocol.round_schedule import RoundSchedule
from tests.swarm.protocol.agreement.group import COORDINATOR, SCHEDULE, WORK, GroupOfNodes

BATCH = 24
MICRO_BATCH = 4
PLACES = {"A": 0, "B": 1, "C": 2}


def pipeline(outer: OuterConfig, stage: int, peers: str = "ABC") -> GroupOfNodes:
    """Return the replicas of one of two stages."""
    schedule = RoundSchedule(
        outer,
        InnerConfig(lr=1e-2, batch_size=4, total_steps=1000),
        seq_len=SCHEDULE.seq_len,
        compute_s_max=30.0,
        stage=stage,
        stages=2,
        micro_batch=MICRO_BATCH,
    )
    return GroupOfNodes(peers, work=dataclasses.replace(WORK, schedule=schedule))


def third(peer: str, first: int) -> tuple[Range, ...]:
    """Return the third of a batch that begins at `first` that this peer has counted."""
    begin = first + PLACES[peer] * BATCH // 3
    return ((begin, begin + BATCH // 3),)


@pytest.mark.parametrize("stage", [0, 1])
def test_a_synchronous_batch_is_merged_whole(stage: int) -> None:
    group = pipeline(AllReduceConfig(batch=BATCH), stage)
    group.counted = lambda peer, plan: third(peer, (plan.round - 1) * BATCH)
    group.run_to(3)
    ledger = group.head("A").ledger
    assert (ledger.cursor, ledger.returned) == (3 * BATCH, ()) and not group.accusations()
    assert group.head("A").tokens == 3 * BATCH * SCHEDULE.seq_len


@pytest.mark.parametrize("fault", ["a hole", "counted twice"])
def test_a_synchronous_batch_that_is_not_whole_is_worked_on_again(fault: str) -> None:
    """No half round: nothing is committed of it, and those that have counted what others counted must forget it."""
    group = pipeline(AllReduceConfig(batch=BATCH), 0)
    plans: list[WorkPlan] = []

    def counted(peer: str, plan: WorkPlan) -> tuple[Range, ...]:
        plans.append(plan)
        whole = third(peer, (plan.round - 1) * BATCH)
        if plan.round != 2 or plan.attempt > 0 or peer != "C":
            return whole
        return () if fault == "a hole" else third("B", BATCH)

    group.counted = counted
    group.run_to(3)
    assert max(plan.attempt for plan in plans if plan.round == 2) > 0
    again = [a.member.peer for plan in plans for a in plan.assignments if a.reset]
    assert bool(again) == (fault == "counted twice")
    ledger = group.head("A").ledger
    assert (ledger.cursor, ledger.returned) == (3 * BATCH, ()) and not group.accusations()


def test_a_later_stage_merges_what_its_replicas_have_counted_once() -> None:
    """Two replicas that have counted the same micro-batch: one contribution is merged, the rest is free again."""
    group = pipeline(DilocoConfig(steps=4), 1)

    def counted(peer: str, plan: WorkPlan) -> tuple[Range, ...]:
        first = (plan.round - 1) * BATCH
        return third("A" if plan.round == 2 and peer == "B" else peer, first)

    group.counted = counted
    group.run_to(3)
    ledger = group.head("A").ledger
    assert ledger.returned == third("B", BATCH) and not group.accusations()
    merged = count(without([(0, ledger.cursor)], ledger.returned))
    assert group.head("A").tokens == SCHEDULE.seq_len * merged
    assert len(group.head("A").members) == 3, "a replica whose count was not merged was present all the same"


@pytest.mark.parametrize("mode", ["witness", "required"])
def test_a_new_term_begins_at_the_position_of_the_other_stages(mode: str) -> None:
    """The state is that of the base; round, step and ledger are those that the other stages have reached."""

    def fast_forward(head: Head) -> Head:
        return msgspec.structs.replace(head, round=head.round + 40, inner_step=400) if head.round else head

    work = dataclasses.replace(WORK, fast_forward_of=fast_forward)
    group = GroupOfNodes("ABC", work=work, mode=mode)
    group.run_to(2)
    group.crash("B")
    group.crash("C")
    group.run(30.0)
    if mode == "witness":
        group.event(COORDINATOR, events.Asked())
    group.run(60.0, lambda: group.machines["A"].committed[-1].term > 1)
    start = next(head for head in group.machines["A"].committed if head.term == 2)
    base = next(head for head in group.machines["A"].committed if head.hash == start.previous)
    assert (start.round, start.inner_step, start.state_hash) == (base.round + 40, 400, base.state_hash)
    group.run_to(start.round + 2, "A")
