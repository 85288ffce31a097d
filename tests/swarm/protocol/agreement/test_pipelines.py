"""The stages of a pipeline on the core: what replicas have counted, synchronous batches, starts at other positions."""

from __future__ import annotations

import dataclasses

import msgspec
import pytest

from optim.config import AllReduceConfig, DilocoConfig, OuterConfig
from peer.config import InnerConfig
from peer.errors import ProtocolViolation
from peer.identity import Signed
from swarm.protocol.agreement import events
from swarm.protocol.agreement import messages as msg
from swarm.protocol.agreement.messages import ChainLink
from swarm.protocol.agreement.rules.electorate import leader_of
from swarm.protocol.agreement.work import Work, WorkTimeout, until_deadline
from swarm.protocol.claims import Claims
from swarm.protocol.head import Head, Member, genesis
from swarm.protocol.ledger import Ledger, Range, count, without
from swarm.protocol.plan import CONTRIBUTION_KIND, Assignment, Contribution, WorkPlan
from swarm.protocol.receipts import ReceiptBody, StageProof
from swarm.protocol.round_schedule import RoundSchedule
from tests.swarm.protocol.agreement.group import COORDINATOR, SCHEDULE, WORK, GroupOfNodes, Machine

BATCH = 24
MICRO_BATCH = 4
PLACES = {"A": 0, "B": 1, "C": 2}


def pipeline(outer: OuterConfig, stage: int, peers: str = "ABC", timeout: WorkTimeout = until_deadline) -> GroupOfNodes:
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
    return GroupOfNodes(peers, work=dataclasses.replace(WORK, schedule=schedule, timeout_of=timeout))


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


def test_a_leader_ends_its_round_once_the_batch_is_counted() -> None:
    """Members train on until they are asked, so without the leader's question the round would last 25 s."""
    group = pipeline(AllReduceConfig(batch=BATCH), 0)
    group.train_s = 25.0
    group.counted = lambda peer, plan: third(peer, 0)
    group.run(15.0, lambda: all(group.machines[peer].node._round.instance.plan is not None for peer in "ABC"))
    head = group.head("A")
    leader = leader_of(head, head.hash, 0).peer
    group.event(leader, events.Gathered(head.hash, {peer: third(peer, 0) for peer in "ABC"}))
    group.run(5.0, lambda: group.round("A") == 1)
    assert group.round("A") == 1 and group.head("A").ledger.cursor == BATCH


@pytest.mark.parametrize("lie", ["holds less", "unusable"])
def test_a_replica_that_does_not_submit_what_it_claimed_forgets_it(lie: str) -> None:
    """Its next contribution would be no better. After two false claims the leader asks it no more."""
    group = pipeline(AllReduceConfig(batch=BATCH), 0)
    group.counted = lambda peer, plan: third(peer, (plan.round - 1) * BATCH)
    group.run_to(1)
    head = group.head("A")
    leader = leader_of(head, head.hash, 0).peer
    liar = "A" if leader != "A" else "B"
    plans: dict[int, WorkPlan] = {}

    def counted(peer: str, plan: WorkPlan) -> tuple[Range, ...]:
        whole = third(peer, (plan.round - 1) * BATCH)
        plans[plan.attempt] = plan
        if plan.round != 2 or peer != liar or len(plans) > 2:
            return whole
        return () if lie == "holds less" else ((whole[0][0] + BATCH, whole[0][1] + BATCH),)

    def gathered() -> None:
        """The driver's part: what all say that they have counted is the whole batch."""
        node = group.machines[leader].node
        plan = node._round.instance.plan
        if plan is not None and plan.round == 2 and not plan.of(group.member(liar)).reset:  # type: ignore[union-attr]
            claims = {peer: third(peer, BATCH) for peer in "ABC"}
            group.event(leader, events.Gathered(node.head.hash, claims))
        if node.head == head:
            group.at(group.now + 0.2, gathered)

    group.counted = counted
    gathered()
    group.run(20.0, lambda: len(plans) > 1)
    workers = group.machines[leader].node.workers
    first, second = (plans[attempt] for attempt in sorted(plans)[:2])
    assert not any(assignment.reset for assignment in first.assignments)
    assert [assignment.member.peer for assignment in second.assignments if assignment.reset] == [liar]
    group.run_to(3)
    assert workers == ["A", "B", "C"] and (group.head("A").ledger.cursor, group.head("A").ledger.returned) == (
        3 * BATCH,
        (),
    )
    assert {accused for _, accused, _ in group.accusations()} == ({liar} if lie == "unusable" else set())


def test_a_leader_that_does_not_end_its_round_is_given_up_before_the_plans_deadline() -> None:
    """The method says how long its work may take, here 2 s of the plan's 30. The next leader goes on with the plan."""
    plans: set[bytes] = set()
    asked: set[int] = set()

    def timeout(head: Head, plan: WorkPlan, rotations: int) -> float:
        asked.add(rotations)
        return 2.0

    group = pipeline(AllReduceConfig(batch=BATCH), 0, timeout=timeout)

    def counted(peer: str, plan: WorkPlan) -> tuple[Range, ...]:
        plans.add(plan.hash)
        return third(peer, 0)

    def lost(source: str, target: str, message: msg.Message) -> bool:
        head = group.machines[target].node.head
        leads = bool(head.members) and leader_of(head, head.hash, 0).peer == target
        return isinstance(message, msg.SubmitMessage) and (leads or no_leader_ends)

    def change(source: str, message: msg.Message) -> msg.Message:
        promises = isinstance(message, msg.PromiseMessage)
        return msgspec.structs.replace(message, contribution=None) if promises and no_leader_ends else message

    no_leader_ends = False
    group.counted, group.lost, group.change = counted, lost, change
    group.run(20.0, lambda: group.head("A").round == 1)
    assert group.head("A").round == 1 and len(plans) == 1 and asked == {0}
    no_leader_ends = True
    group.run(120.0)
    assert group.head("A").round == 1 and asked >= {0, 1, 2}, "all have led in vain"


def test_a_leader_that_has_failed_does_not_keep_its_turn_until_its_plans_deadline() -> None:
    group = pipeline(AllReduceConfig(batch=BATCH), 0)

    def counted(peer: str, plan: WorkPlan) -> tuple[Range, ...]:
        head = group.head(peer)
        first = leader_of(head, head.hash, plan.attempt) == leader_of(head, head.hash, 0)
        return () if first and peer == "C" else third(peer, 0)

    group.counted = counted
    group.run(25.0, lambda: group.head("A").round == 1)
    assert group.head("A").round == 1, "the plan's deadline is 30 s"


class FirstStage:
    """The first stage, whose heads are believed."""

    def head(self, stage: int, links: StageProof) -> Head:
        assert stage == 0
        return links[-1].head

    def receipt(self, signed: Signed) -> ReceiptBody:
        raise ProtocolViolation("there are no receipts here")


def test_at_the_end_a_later_stage_declares_lost_what_it_has_not_merged() -> None:
    """In the last round all that the first stage has merged is merged, or lost. Nothing is committed before a member
    proves what that is."""
    group = pipeline(DilocoConfig(steps=6), 1)
    assert isinstance(group.work, Work)
    group.work = work = dataclasses.replace(
        group.work, schedule=dataclasses.replace(group.work.schedule, rounds=2), stages=FirstStage()
    )
    for machine in group.machines.values():
        machine.node._context.work = work
    first = msgspec.structs.replace(
        genesis("stage 0", b"s" * 32), round=2, ledger=Ledger(3 * BATCH, ((BATCH + 16, BATCH + 20),))
    )
    make, knows = group.contribution, False

    def contribution(machine: Machine, plan: WorkPlan) -> Signed:
        body = msgspec.msgpack.decode(make(machine, plan).body, type=Contribution)
        if knows and machine.peer == "B" and body.head == group.head("B").hash:
            body = msgspec.structs.replace(body, first_stage=(ChainLink(first),))
        return group.sign(machine.peer, CONTRIBUTION_KIND, body)

    group.contribution = contribution  # type: ignore[method-assign]
    group.counted = lambda peer, plan: third(peer, (plan.round - 1) * BATCH) if peer != "C" else ()
    group.run_to(1)
    group.run(20.0)
    assert group.round("A") == 1, "no member proves the first stage's last head"
    knows = True
    group.run_to(2)
    head = group.head("A")
    merged, free = head.tokens // SCHEDULE.seq_len, head.ledger.returned
    assert merged == 4 * BATCH // 3 and free == ((BATCH + 16, BATCH + 20),) and not group.accusations()
    assert head.ledger.cursor == 3 * BATCH == merged + count(free) + head.ledger.lost


def test_claims_that_prove_false_twice_in_a_round_are_ignored() -> None:
    members = [Member(peer, peer) for peer in "ABC"]
    claims = Claims()

    def plan(reset: str = "") -> WorkPlan:
        parts = tuple(Assignment(member, (), 1, reset=member.peer in reset) for member in members)
        return WorkPlan(bytes(32), 1, 0, parts, 1.0)

    def body(member: Member, *counted: Range) -> Contribution:
        return Contribution(bytes(32), bytes(32), member, 1, count(counted), 1.0, (), (), counted)

    a, b, c = members
    whole = {"A": [(0, 8)], "B": [(8, 16)], "C": [(16, 24)], "Z": [(8, 16)]}
    claims.note(whole)
    bodies = {a: body(a, (0, 8)), b: body(b, (8, 12))}
    assert claims.settle(plan(), members, bodies, (), ()) == {b}, "C has submitted nothing, so it can forget nothing"
    assert claims.settle(plan(), members, bodies, (), ()) == set(), "a claim counts for one plan"
    claims.note(whole)
    assert claims.settle(plan("B"), members, bodies, (), ()) == set(), "B was told to forget what it had just claimed"
    assert claims.doubted == {"C", "Z"}
    claims.note(whole)
    assert claims.settle(plan(), members, bodies | {c: body(c)}, {a}, ()) == {b}, "the claims of C are ignored"
    assert claims.settle(plan(), members, {b: body(b)}, {a}, ()) == {a}, "what A submitted is unusable"
    assert claims.doubted == {"B", "C", "Z"}
    assert claims.settle(plan(), members, {b: body(b)}, (), {a}) == {a}
    assert claims.doubted == {"A", "B", "C", "Z"}, "A has claimed what others have counted, the second false claim"


@pytest.mark.parametrize("mode", ["witness", "required"])
def test_a_stage_begins_when_the_groups_of_all_stages_may(mode: str) -> None:
    """One replica is enough where the other stages have the rest of `min_peers`."""
    asked: list[int] = []

    def may_begin(waiting: int) -> bool:
        asked.append(waiting)
        return waiting >= 2

    work = dataclasses.replace(WORK, may_begin=may_begin)
    group = GroupOfNodes("ABCD", work=work, min_peers=7, mode=mode)
    group.run_to(1)
    (start,) = {head for machine in group.machines.values() for head in machine.committed if head.round == 0}
    assert len(start.members) >= 2 and min(asked) >= 1


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

    work = dataclasses.replace(WORK, fast_forward=fast_forward)
    group = GroupOfNodes("ABC", work=work, mode=mode, lone_survivor=True)
    group.run_to(2)
    group.crash("B")
    group.crash("C")
    group.run(30.0)
    if mode == "witness":
        group.event(COORDINATOR, events.RegroupRequested())
    group.run(60.0, lambda: group.machines["A"].committed[-1].term > 1)
    start = next(head for head in group.machines["A"].committed if head.term == 2)
    base = next(head for head in group.machines["A"].committed if head.hash == start.previous)
    assert (start.round, start.inner_step, start.state_hash) == (base.round + 40, 400, base.state_hash)
    group.run_to(start.round + 2, "A")
