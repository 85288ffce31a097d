"""A stage's group with scripted trainers: replicas that have counted the same samples, or none."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import trio

from optim.config import AllReduceConfig
from peer.identity import Identity
from swarm.protocol.agreement.messages import PlanMessage
from swarm.protocol.ledger import Range, count, union
from swarm.protocol.plan import Assignment
from swarm.protocol.round_schedule import RoundSchedule
from swarm.protocol.timeouts import AdaptiveTimeouts
from swarm.rounds.trainers.trainer import TrainRequest, TrainResult
from tests.swarm.support.driven_group import DrivenGroup, DrivenReplica, GroupSetting, open_driven_group
from tests.swarm.support.group import Patient, schedule_of

pytestmark = pytest.mark.slow

NUMEL, MICRO = 2_000, 2
LATER = dataclasses.replace(schedule_of(4), stage=1, stages=2, micro_batch=MICRO)
SYNCHRONOUS = dataclasses.replace(LATER, outer=AllReduceConfig(batch=12))
Script = Callable[[int, TrainRequest], Awaitable[tuple[Range, ...]]]


def unused(peer: str, first_step: int, assignment: Assignment) -> torch.Tensor:
    raise AssertionError("the trainers are scripted")


def trainer_of(member: DrivenReplica) -> Any:
    return member.trainer


async def enter(group: DrivenGroup, number: int, script: Script, identity: Identity | None = None) -> DrivenReplica:
    """Start a replica whose trainer counts what `script(number, order)` says."""
    member = await group.enter(unused, identity)

    async def train(order: TrainRequest) -> TrainResult:
        await trio.lowlevel.checkpoint()
        counted = union(await script(number, order))
        seed = torch.Generator().manual_seed(number)
        delta = torch.randn(NUMEL, generator=seed) * 1e-2 * math.sqrt(count(counted))
        return TrainResult(len(counted), count(counted), 1.0, delta, counted)

    trainer_of(member).train = train
    return member


@asynccontextmanager
async def running(
    folder: Path,
    schedule: RoundSchedule,
    rounds: int,
    script: Script,
    prepare: Callable[[int, DrivenReplica], None] = lambda number, member: None,
    timeouts: type[AdaptiveTimeouts] = Patient,
) -> AsyncIterator[list[DrivenReplica]]:
    """Run a group of three that commits `rounds` rounds by the end of the block. Its members are numbered in the order
    of their peer ids; `prepare` is called before they begin."""
    setting = GroupSetting(
        numel=NUMEL, codec="fp32", rounds=rounds, schedule=schedule, timeouts=timeouts, exchange_s=4.0
    )
    identities = sorted((Identity.generate() for _ in range(3)), key=lambda identity: identity.peer_id)
    async with open_driven_group(folder, setting) as group:
        members = []
        for number, identity in enumerate(identities):
            members.append(await enter(group, number, script, identity))
            prepare(number, members[-1])
        yield members
        await group.until_round(rounds)


def seen(members: Sequence[DrivenReplica], name: str, reason: str) -> bool:
    return any(reason in str(event.fields.get("reason")) for member in members for event in member.seen(name))


def counted(member: DrivenReplica) -> tuple[tuple[Range, ...], ...]:
    """What was merged in the member's last commit."""
    merged = member.merged[-1]
    assert merged is not None, "it has built the state itself"
    return tuple(body.counted for body in merged)


async def test_one_of_two_overlapping_is_merged(tmp_path: Path) -> None:
    async def script(number: int, order: TrainRequest) -> tuple[Range, ...]:
        first = 20 * (order.round_info.round - 1)
        return [((first, first + 6),), ((first + 4, first + 8),), ((first + 8, first + 10),)][number]

    async with running(tmp_path, LATER, 3, script) as members:
        pass
    for member in members:
        head = member.head
        assert head == members[0].head and head.round == 3 and len(head.members) == 3
        assert counted(member) == (((40, 46),), ((48, 50),))
        assert head.ledger.cursor == 50 and head.ledger.returned == ((6, 8), (10, 20), (26, 28), (30, 40), (46, 48))
        assert head.inner_step == 3 * 4 and head.tokens == 3 * 8 * schedule_of(4).seq_len
        assert not member.seen("peer_penalized")


async def test_round_without_samples_is_no_commit(tmp_path: Path) -> None:
    tries: list[int] = []

    async def script(number: int, order: TrainRequest) -> tuple[Range, ...]:
        tries.append(number)
        return () if len(tries) <= 3 else ((2 * number, 2 * number + 2),)

    async with running(tmp_path, LATER, 1, script) as members:
        pass
    assert seen(members, "attempt_failed", "nothing that may be merged")
    assert members[0].head.ledger.returned == () and members[0].head.ledger.cursor == 6


async def test_dry_round_keeps_the_state(tmp_path: Path) -> None:
    async def script(number: int, order: TrainRequest) -> tuple[Range, ...]:
        return ((2 * number, 2 * number + 2),) if order.round_info.round == 1 else ()

    def dry(number: int, member: DrivenReplica) -> None:
        member.trainer.exhausted = True

    async with running(tmp_path, LATER, 2, script, dry) as members:
        pass
    for member in members:
        before, last = member.heads[-2:]
        assert member.head == last == members[0].head and last.previous == before.hash
        assert last.round == 2 and last.members == before.members and len(last.members) == 3
        assert last.state_hash == before.state_hash == member.state.tree.root
        assert last.ledger == before.ledger and last.tokens == before.tokens > 0
        assert counted(member) == ()
        assert not member.seen("peer_penalized") and not member.seen("bug")


async def test_one_dry_member_is_no_majority(tmp_path: Path) -> None:
    """It leads, and would end the round with nothing merged. Its turn is over then: the plan's time, which is long, is
    not waited for."""
    at_work: list[DrivenReplica] = []

    async def script(number: int, order: TrainRequest) -> tuple[Range, ...]:
        if not any(trainer_of(member).exhausted for member in at_work):
            trainer_of(next(member for member in at_work if member.seen("attempt_begun"))).exhausted = True
        return ((2 * number, 2 * number + 2),) if seen(at_work, "attempt_failed", "") else ()

    def prepare(number: int, member: DrivenReplica) -> None:
        at_work.append(member)

    async with running(tmp_path, LATER, 1, script, prepare, AdaptiveTimeouts) as members:
        pass
    assert members[0].head.tokens > 0 and all(counted(member) for member in members)
    (dry,) = (member for member in members if trainer_of(member).exhausted)
    assert len(dry.seen("attempt_begun")) <= 2, "once a turn"


async def test_leader_that_moves_to_another_stage_is_not_waited_for(tmp_path: Path) -> None:
    """Its process goes on, so that no failure detector tells the others; its plan's time is an hour."""
    at_work: list[DrivenReplica] = []
    moved: list[DrivenReplica] = []

    def leads(member: DrivenReplica) -> bool:
        return any(event.fields["round"] == 2 for event in member.seen("attempt_begun"))

    async def script(number: int, order: TrainRequest) -> tuple[Range, ...]:
        if order.round_info.round == 2 and not moved:
            moved.append(next(member for member in at_work if leads(member)))
            moved[0].moving.cancel()
        if moved and at_work[number] is moved[0]:
            await trio.sleep_forever()
        first = 10 * order.round_info.round + 2 * number
        return ((first, first + 2),)

    def prepare(number: int, member: DrivenReplica) -> None:
        at_work.append(member)

    patient = dataclasses.replace(LATER, compute_s_max=3600.0)
    async with running(tmp_path, patient, 4, script, prepare) as members:
        pass
    assert moved[0].head.round == 1
    stayed = [member for member in members if member is not moved[0]]
    assert stayed[0].head == stayed[1].head and stayed[0].head.term == 1 and not stayed[0].seen("peer_penalized")


async def test_late_member_is_told_of_the_plans_end(tmp_path: Path) -> None:
    """It has missed the plan. It does not begin work that no member waits for."""
    missed: list[str] = []
    told = trio.Event()

    def prepare(number: int, member: DrivenReplica) -> None:
        sender: Any = member.driver.group._sender
        add = sender.add

        def without_plan(peer: str, message: Any) -> None:
            if isinstance(message, PlanMessage) and peer != member.peer:
                if not missed:
                    missed.append(peer)
                if peer in missed and not message.finish_early:
                    return
            add(peer, message)

        sender.add = without_plan

    async def script(number: int, order: TrainRequest) -> tuple[Range, ...]:
        if order.cut_short:
            told.set()
        return ((2 * number, 2 * number + 2),)

    async with running(tmp_path, LATER, 1, script, prepare):
        await told.wait()


async def test_overlapping_batch_is_gathered_again(tmp_path: Path) -> None:
    """Two have counted the same at first: the plan is given up, and one of them forgets it."""
    told_reset: list[int] = []

    async def script(number: int, order: TrainRequest) -> tuple[Range, ...]:
        assert order.assignment.ranges == ()
        if order.assignment.reset:
            told_reset.append(number)
        if number == 2:
            return ((6, 8),) if told_reset or order.round_info.round > 1 else ((2, 8),)
        return [((0, 6),), ((8, 12),)][number]

    async with running(tmp_path, SYNCHRONOUS, 1, script) as members:
        pass
    assert told_reset == [2]
    assert seen(members, "attempt_failed", "nothing that may be merged")
    for member in members:
        assert union(r for ranges in counted(member) for r in ranges) == ((0, 12),)
        assert member.head.ledger.cursor == 12 and len(member.head.members) == 3
        assert not member.seen("peer_penalized")


async def test_leader_ends_the_round_when_all_is_gathered(tmp_path: Path) -> None:
    """Synchronous: an early submission does not end the round, however long the others take."""
    gathered, cut_short = trio.Event(), [trio.Event() for _ in range(3)]

    async def script(number: int, order: TrainRequest) -> tuple[Range, ...]:
        if number:
            await cut_short[number].wait()
        return ((4 * number, 4 * number + 4),)

    def prepare(number: int, member: DrivenReplica) -> None:
        async def gather(members: Sequence[str]) -> None:
            assert len(members) == 3
            await gathered.wait()

        trainer_of(member).finish_early = cut_short[number].set
        trainer_of(member).gather = gather

    async with running(tmp_path, SYNCHRONOUS, 1, script, prepare) as members:
        while not any(event.fields["phase"] == "submit" for event in members[0].seen("phase_entered")):
            await members[0].changed.wait(1.0)
        assert not any(event.is_set() for event in cut_short)
        gathered.set()
    assert members[0].head.ledger.cursor == 12


async def test_joiner_with_samples_enters_the_next_plan(tmp_path: Path) -> None:
    """It missed a commit, and counted before the others knew that it is back: no other replica will count what it
    has."""
    cut_short = [trio.Event() for _ in range(3)]
    members: list[DrivenReplica] = []

    async def script(number: int, order: TrainRequest) -> tuple[Range, ...]:
        await cut_short[number].wait()
        cut_short[number] = trio.Event()
        return ((4 * number, 4 * number + 4),)

    async def gather(names: Sequence[str]) -> dict[str, tuple[Range, ...]]:
        while len(names) < 3:
            await trio.sleep(0.01)
        return {member.peer: ((4 * k, 4 * k + 4),) for k, member in enumerate(members)}

    async def come(group: DrivenGroup, number: int) -> None:
        member = await enter(group, number, script)
        members.append(member)
        trainer_of(member).gather = gather
        trainer_of(member).finish_early = lambda: cut_short[number].set()

    setting = GroupSetting(numel=NUMEL, codec="fp32", rounds=1, min_peers=2, schedule=SYNCHRONOUS)
    async with open_driven_group(tmp_path, setting) as group:
        for number in range(2):
            await come(group, number)
        await group.until(lambda: all(member.actor.training.plan for member in members))
        await come(group, 2)
        await group.until_round(1)
        head = members[0].head
        learners = [learner.member.peer for learner in head.learners]
        assert head.round == 1 and learners == [members[2].peer] and head.ledger.cursor == 12
        assert all(member.head == head and not member.seen("peer_penalized") for member in members)


async def test_leader_that_never_ends_a_round_is_replaced(tmp_path: Path) -> None:
    """Synchronous: the leader of the third round never stops gathering. The plan allows an hour; a batch usually takes
    less than a second."""
    schedule = dataclasses.replace(SYNCHRONOUS, compute_s_max=3600.0)
    cut_short = [trio.Event() for _ in range(3)]
    broken: list[int] = []

    async def script(number: int, order: TrainRequest) -> tuple[Range, ...]:
        await cut_short[number].wait()
        cut_short[number] = trio.Event()
        first = 12 * (order.round_info.round - 1) + 4 * number
        return ((first, first + 4),)

    def prepare(number: int, member: DrivenReplica) -> None:
        async def gather(members: Sequence[str]) -> None:
            if member.head.round == 2 and not broken:
                broken.append(number)
            if number in broken:
                await trio.sleep_forever()

        trainer_of(member).finish_early = lambda: cut_short[number].set()
        trainer_of(member).gather = gather

    async with running(tmp_path, schedule, 3, script, prepare, AdaptiveTimeouts) as members:
        pass
    assert broken
    for member in members:
        assert member.head.ledger.cursor == 36 and len(member.head.members) == 3
        plans = [event for event in member.seen("round_planned") if event.fields["round"] == 3]
        assert len(plans) == 1, "the next leader has adopted the plan"
