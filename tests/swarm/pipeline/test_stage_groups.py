"""A stage's group with scripted trainers: replicas that have counted the same samples, or none."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import trio
from swarm.rounds.collect import ContributionCollector
from swarm.rounds.round_state import RoundState
from tests.swarm.support.hostile import Impatient, Liar

from optim.config import AllReduceConfig
from peer.errors import ProtocolViolation, RoundDiscarded
from peer.identity import open_body
from swarm.protocol.head import TRIES_PER_LEADER, Member
from swarm.protocol.ledger import Range, count, union
from swarm.protocol.messages import START_ROUND
from swarm.protocol.plan import PLAN_KIND, Assignment, WorkPlan, make_plan
from swarm.protocol.round_schedule import RoundSchedule
from swarm.protocol.timeouts import AdaptiveTimeouts
from swarm.rounds.trainer import TrainRequest, TrainResult
from tests.swarm.support.driven_group import Patient, StageReplica, open_group, schedule_of
from tests.swarm.support.group import begun

NUMEL, MICRO = 2_000, 2
LATER = dataclasses.replace(schedule_of(4), stage=1, stages=2, micro_batch=MICRO)
SYNCHRONOUS = dataclasses.replace(LATER, outer=AllReduceConfig(batch=12))
Script = Callable[[int, TrainRequest], Awaitable[tuple[Range, ...]]]


def unused(peer: str, first_step: int, assignment: Assignment) -> torch.Tensor:
    raise AssertionError("the trainers are scripted")


def scripted(member: StageReplica, number: int, script: Script) -> None:
    """Let the member's trainer count what `script(number, order)` says."""

    async def train(order: TrainRequest) -> TrainResult:
        await trio.lowlevel.checkpoint()
        counted = union(await script(number, order))
        seed = torch.Generator().manual_seed(number)
        delta = torch.randn(NUMEL, generator=seed) * 1e-2 * math.sqrt(count(counted))
        return TrainResult(len(counted), count(counted), 1.0, delta, counted)

    trainer: Any = member.context.trainer
    trainer.train = train


@asynccontextmanager
async def running(
    folder: Path,
    schedule: RoundSchedule,
    rounds: int,
    script: Script,
    members: int = 3,
    timeouts: type[AdaptiveTimeouts] = Patient,
    to_the_end: bool = True,
) -> AsyncIterator[list[StageReplica]]:
    """Run a group that commits `rounds` rounds by the end of the block, or is cancelled there."""
    with trio.fail_after(300):
        async with AsyncExitStack() as stack:
            group = await stack.enter_async_context(open_group(folder, NUMEL, "fp32", rounds, members))
            group.schedule, group.timeouts = schedule, timeouts
            members = [await stack.enter_async_context(group.join(unused)) for _ in range(members)]
            for number, member in enumerate(sorted(members, key=lambda member: member.host.peer_id)):
                scripted(member, number, script)
            async with trio.open_nursery() as nursery:
                for member in members:
                    nursery.start_soon(member.engine.run)
                yield members
                if not to_the_end:
                    nursery.cancel_scope.cancel()


def seen(members: Sequence[StageReplica], name: str, reason: str) -> bool:
    return any(reason in str(event.fields.get("reason")) for member in members for event in member.seen(name))


async def test_one_of_two_overlapping_is_merged(tmp_path: Path) -> None:
    async def script(number: int, order: TrainRequest) -> tuple[Range, ...]:
        first = 20 * (order.round_info.round - 1)
        return [((first, first + 6),), ((first + 4, first + 8),), ((first + 8, first + 10),)][number]

    async with running(tmp_path, LATER, 3, script) as members:
        pass
    for member in members:
        head = member.engine.head
        assert head == members[0].engine.head and head.round == 3 and len(head.members) == 3
        assert member.engine.counted == (((40, 46),), ((48, 50),))
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
    assert seen(members, "attempt_failed", "no contributor has a usable update")
    assert members[0].engine.head.ledger.returned == () and members[0].engine.head.ledger.cursor == 6


async def test_dry_round_keeps_the_state(tmp_path: Path) -> None:
    async def script(number: int, order: TrainRequest) -> tuple[Range, ...]:
        return ((2 * number, 2 * number + 2),) if order.round_info.round == 1 else ()

    async with running(tmp_path, LATER, 2, script) as members:
        for member in members:
            trainer: Any = member.context.trainer
            trainer.dry = True
    for member in members:
        before, last = member.heads[-2:]
        assert member.engine.head == last == members[0].engine.head and last.previous == before.hash
        assert last.round == 2 and last.members == before.members and len(last.members) == 3
        assert last.state_hash == before.state_hash == member.context.state.tree.root
        assert last.ledger == before.ledger and last.tokens == before.tokens > 0
        assert not member.seen("peer_penalized") and not member.seen("bug")
    assert any(event.fields["round"] == 2 for member in members for event in member.seen("round_empty"))


async def test_one_dry_member_is_no_majority(tmp_path: Path) -> None:
    at_work: list[StageReplica] = []

    async def script(number: int, order: TrainRequest) -> tuple[Range, ...]:
        return ((2 * number, 2 * number + 2),) if seen(at_work, "attempt_failed", "") else ()

    async with running(tmp_path, LATER, 1, script, timeouts=Impatient) as members:
        at_work += members
        trainer: Any = members[0].context.trainer
        trainer.dry = True
    assert members[0].engine.head.tokens > 0 and not seen(members, "round_empty", "")


async def test_late_member_is_told_of_the_plans_end(tmp_path: Path) -> None:
    """It does not begin work that no member waits for."""
    missed: list[str] = []
    told, cut_short = trio.Event(), trio.Event()

    def change(peer: str, work: Any, payload: bytes) -> tuple[Any, bytes] | None:
        if not missed and len(open_body(work.plan, PLAN_KIND, WorkPlan).assignments) == 3:
            missed.append(peer)
        return None if peer in missed and not work.finish_early else (work, payload)

    async def script(number: int, order: TrainRequest) -> tuple[Range, ...]:
        if order.cut_short:
            told.set()
        elif led_by(names[number]):
            return ((2 * number, 2 * number + 2),)
        await cut_short.wait()
        return ((2 * number, 2 * number + 2),)

    def led_by(peer: str) -> bool:
        return any(
            e.fields["phase"] == "plan" for s in members if s.host.peer_id == peer for e in s.seen("phase_entered")
        )

    async with running(tmp_path, LATER, 1, script) as members:
        names = sorted(member.host.peer_id for member in members)
        for member in members:
            Liar(member).sends(START_ROUND, change)
        await told.wait()
        cut_short.set()


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
    assert seen(members, "attempt_failed", "not all of the batch")
    for member in members:
        assert union(r for ranges in member.engine.counted for r in ranges) == ((0, 12),)
        assert member.engine.head.ledger.cursor == 12 and len(member.engine.head.members) == 3
        assert not member.seen("peer_penalized")


async def test_leader_ends_the_round_when_all_is_gathered(tmp_path: Path) -> None:
    """Synchronous: an early submission does not end the round, however long the others take."""
    gathered, cut_short = trio.Event(), [trio.Event() for _ in range(3)]

    async def script(number: int, order: TrainRequest) -> tuple[Range, ...]:
        if number:
            await cut_short[number].wait()
        return ((4 * number, 4 * number + 4),)

    async with running(tmp_path, SYNCHRONOUS, 1, script) as members:
        for number, member in enumerate(sorted(members, key=lambda member: member.host.peer_id)):
            trainer: Any = member.context.trainer
            trainer.finish_early = cut_short[number].set

            async def gather(members: Sequence[str]) -> None:
                assert len(members) == 3
                await gathered.wait()

            trainer.gather = gather
        while not any(member.seen("phase_entered") and _submitted(member) for member in members):
            await trio.sleep(0.02)
        assert not any(event.is_set() for event in cut_short)
        gathered.set()
    assert members[0].engine.head.ledger.cursor == 12


async def test_member_outside_the_plan_is_asked(tmp_path: Path) -> None:
    """It did not answer in time, but goes on counting. A member with a false claim is not asked."""
    async with open_group(tmp_path, NUMEL, "fp32", 1, 1) as group, group.join(unused) as member:
        planned, left_out, liar = members = tuple(Member(name, "s") for name in ("a", "b", "c"))
        round_state = RoundState(begun(group.genesis(), members, 1), planned)
        round_state.plan = make_plan(round_state.head, 0, {planned: 1.0}, SYNCHRONOUS)
        asked: list[str] = []
        trainer: Any = member.context.trainer

        async def gather(names: Sequence[str]) -> None:
            asked.extend(names)

        async def finish_early() -> None:
            raise AssertionError

        trainer.gather = gather
        await ContributionCollector(member.context, round_state, 1, [planned], finish_early, [liar.peer]).gather(
            trio.CancelScope()
        )
        assert asked == [planned.peer, left_out.peer]


async def test_joiner_with_samples_enters_the_next_plan(tmp_path: Path) -> None:
    """It missed a commit, and counted before the others knew that it is back: no other replica will count what it
    has."""
    cut_short = [trio.Event() for _ in range(3)]

    async def script(number: int, order: TrainRequest) -> tuple[Range, ...]:
        await cut_short[number].wait()
        cut_short[number] = trio.Event()
        return ((4 * number, 4 * number + 4),)

    async with AsyncExitStack() as stack:
        group = await stack.enter_async_context(open_group(tmp_path, NUMEL, "fp32", 1, 2))
        group.schedule, group.timeouts = SYNCHRONOUS, Patient
        members = [await stack.enter_async_context(group.join(unused)) for _ in range(3)]

        async def gather(names: Sequence[str]) -> dict[str, tuple[Range, ...]]:
            while len(names) < 3:
                await trio.sleep(0.01)
            return {member.host.peer_id: ((4 * k, 4 * k + 4),) for k, member in enumerate(members)}

        for number, member in enumerate(members):
            scripted(member, number, script)
            trainer: Any = member.context.trainer
            trainer.gather, trainer.finish_early = gather, lambda number=number: cut_short[number].set()
        with trio.fail_after(300):
            async with trio.open_nursery() as nursery:
                for member in members[:2]:
                    nursery.start_soon(member.engine.run)
                while not all(
                    member.engine._state.round and member.engine._state.round.round_state.plan for member in members[:2]
                ):
                    await trio.sleep(0.02)
                nursery.start_soon(members[2].engine.run)
    head = members[0].engine.head
    assert head.round == 1 and len(head.members) == 3 and head.ledger.cursor == 12
    assert all(member.engine.head == head for member in members) and not any(
        member.seen("peer_penalized") for member in members
    )


async def test_leader_that_never_ends_a_round_is_replaced(tmp_path: Path) -> None:
    """Synchronous: the leader of the third round never stops gathering. The plan allows an hour; a batch usually takes
    a few seconds."""
    schedule = dataclasses.replace(SYNCHRONOUS, compute_s_max=3600.0)
    cut_short = [trio.Event() for _ in range(3)]
    broken: list[int] = []

    async def script(number: int, order: TrainRequest) -> tuple[Range, ...]:
        await cut_short[number].wait()
        cut_short[number] = trio.Event()
        first = 12 * (order.round_info.round - 1) + 4 * number
        return ((first, first + 4),)

    async with running(tmp_path, schedule, 3, script, timeouts=Impatient) as members:
        for number, member in enumerate(sorted(members, key=lambda member: member.host.peer_id)):
            trainer: Any = member.context.trainer
            trainer.finish_early = lambda number=number: cut_short[number].set()

            async def gather(members: Sequence[str], number: int = number, member: StageReplica = member) -> None:
                if member.engine.head.round == 2 and not broken:
                    broken.append(number)
                if number in broken:
                    await trio.sleep_forever()

            trainer.gather = gather
    assert broken
    for member in members:
        assert member.engine.head.ledger.cursor == 36 and len(member.engine.head.members) == 3


async def test_former_leader_is_not_penalized(tmp_path: Path) -> None:
    async def script(number: int, order: TrainRequest) -> tuple[Range, ...]:
        await trio.sleep_forever()
        raise AssertionError

    async with running(tmp_path, SYNCHRONOUS, 1, script, to_the_end=False) as members:
        here = members[0].engine._state
        while here.round is None or here.round.round_state.signed_plan is None:
            await trio.sleep(0.02)
        round_state, order = here.round.round_state, here.round.round_state.signed_plan
        second, third = (round_state.head.leader(turn * TRIES_PER_LEADER).peer for turn in (1, 2))
        with pytest.raises(ProtocolViolation, match="another peer leads"):
            here.round.take_work(order, True, second)
        round_state.acceptor.promise(2 * TRIES_PER_LEADER)
        with pytest.raises(RoundDiscarded, match="a later attempt"):
            here.round.take_work(order, True, second)
        here.round.take_work(order, False, third)


def _submitted(member: StageReplica) -> bool:
    return any(event.fields["phase"] == "submit" for event in member.seen("phase_entered"))
