"""A stage's group with scripted trainers: replicas that have counted the same samples, or none."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import torch
import trio

from optim.config import AllReduceConfig
from peer.identity import Identity
from swarm.protocol.ledger import Range, count, union
from swarm.protocol.plan import Assignment
from swarm.protocol.round_schedule import RoundSchedule
from swarm.rounds.trainer import TrainRequest, TrainResult
from tests.swarm.support.driven_group import DrivenGroup, DrivenReplica, GroupSetting, open_driven_group
from tests.swarm.support.group import schedule_of

NUMEL, MICRO = 2_000, 2
LATER = dataclasses.replace(schedule_of(4), stage=1, stages=2, micro_batch=MICRO)
SYNCHRONOUS = dataclasses.replace(LATER, outer=AllReduceConfig(batch=12))
Script = Callable[[int, TrainRequest], Awaitable[tuple[Range, ...]]]
Prepare = Callable[[int, Any], None]


def unused(peer: str, first_step: int, assignment: Assignment) -> torch.Tensor:
    raise AssertionError("the trainers are scripted")


def scripted(member: DrivenReplica, number: int, script: Script) -> None:
    """Let the member's trainer count what `script(number, order)` says."""

    async def train(order: TrainRequest) -> TrainResult:
        await trio.lowlevel.checkpoint()
        counted = union(await script(number, order))
        seed = torch.Generator().manual_seed(number)
        delta = torch.randn(NUMEL, generator=seed) * 1e-2 * math.sqrt(count(counted))
        return TrainResult(len(counted), count(counted), 1.0, delta, counted)

    trainer: Any = member.trainer
    trainer.train = train


@asynccontextmanager
async def running(
    folder: Path,
    schedule: RoundSchedule,
    rounds: int,
    script: Script,
    prepare: Prepare | None = None,
) -> AsyncIterator[tuple[DrivenGroup, list[DrivenReplica]]]:
    """Run three replicas that commit `rounds` rounds by the end of the block. `prepare(number, trainer)` may change a
    trainer before the first one."""
    setting = GroupSetting(numel=NUMEL, codec="fp32", rounds=rounds, schedule=schedule)
    async with open_driven_group(folder, setting) as group:
        members = []
        identities = sorted((Identity.generate() for _ in range(3)), key=lambda identity: identity.peer_id)
        for number, identity in enumerate(identities):
            members.append(member := await group.enter(unused, identity))
            scripted(member, number, script)
            if prepare is not None:
                prepare(number, member.trainer)
        yield group, members
        await group.until_round(rounds)
        group.check()


def counted(member: DrivenReplica) -> set[tuple[Range, ...]]:
    """Return what the last commit has merged."""
    return {body.counted for body in member.merged[-1] or ()}


def seen(members: Sequence[DrivenReplica], name: str, reason: str) -> bool:
    return any(reason in str(event.fields.get("reason")) for member in members for event in member.seen(name))


async def test_one_of_two_overlapping_is_merged(tmp_path: Path) -> None:
    async def script(number: int, order: TrainRequest) -> tuple[Range, ...]:
        first = 20 * (order.round_info.round - 1)
        return [((first, first + 6),), ((first + 4, first + 8),), ((first + 8, first + 10),)][number]

    async with running(tmp_path, LATER, 3, script) as (group, members):
        await group.until_round(3)
        for member in members:
            head = member.heads[-1]
            assert head == members[0].heads[-1] and head.round == 3 and len(head.members) == 3
            assert counted(member) == {((40, 46),), ((48, 50),)}
            assert head.ledger.cursor == 50
            assert head.ledger.returned == ((6, 8), (10, 20), (26, 28), (30, 40), (46, 48))
            assert head.inner_step == 3 * 4 and head.tokens == 3 * 8 * schedule_of(4).seq_len


async def test_round_without_samples_is_no_commit(tmp_path: Path) -> None:
    tries: list[int] = []

    async def script(number: int, order: TrainRequest) -> tuple[Range, ...]:
        tries.append(number)
        return () if len(tries) <= 3 else ((2 * number, 2 * number + 2),)

    async with running(tmp_path, LATER, 1, script) as (group, members):
        await group.until_round(1)
        assert members[0].heads[-1].ledger.returned == () and members[0].heads[-1].ledger.cursor == 6
        assert any(member.seen("attempt_failed") for member in members)


async def test_dry_round_keeps_the_state(tmp_path: Path) -> None:
    async def script(number: int, order: TrainRequest) -> tuple[Range, ...]:
        return ((2 * number, 2 * number + 2),) if order.round_info.round == 1 else ()

    def prepare(number: int, trainer: Any) -> None:
        trainer.dry = True

    async with running(tmp_path, LATER, 2, script, prepare) as (group, members):
        await group.until_round(2)
        for member in members:
            before, last = member.heads[-2:]
            assert last == members[0].heads[-1] and last.previous == before.hash
            assert last.round == 2 and last.members == before.members and len(last.members) == 3
            assert last.state_hash == before.state_hash == member.state.tree.root
            assert last.ledger == before.ledger and last.tokens == before.tokens > 0
        assert all(member.merged[-1] == [] for member in members), "nothing was merged"


async def test_one_dry_member_is_no_majority(tmp_path: Path) -> None:
    at_work: list[DrivenReplica] = []

    async def script(number: int, order: TrainRequest) -> tuple[Range, ...]:
        return ((2 * number, 2 * number + 2),) if seen(at_work, "attempt_failed", "") else ()

    def prepare(number: int, trainer: Any) -> None:
        trainer.dry = number == 0

    async with running(tmp_path, LATER, 1, script, prepare) as (group, members):
        at_work += members
        await group.until_round(1)
        assert members[0].heads[-1].tokens > 0 and not any(member.merged[-1] == [] for member in members)


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

    async with running(tmp_path, SYNCHRONOUS, 1, script) as (group, members):
        await group.until_round(1)
        assert told_reset == [2]
        for member in members:
            assert union(r for ranges in counted(member) for r in ranges) == ((0, 12),)
            assert member.heads[-1].ledger.cursor == 12 and len(member.heads[-1].members) == 3


async def test_leader_ends_the_round_when_all_is_gathered(tmp_path: Path) -> None:
    """Synchronous: an early submission does not end the round, however long the others take."""
    gathered, cut_short = trio.Event(), [trio.Event() for _ in range(3)]
    asked: list[int] = []

    async def script(number: int, order: TrainRequest) -> tuple[Range, ...]:
        if number:
            await cut_short[number].wait()
        return ((4 * number, 4 * number + 4),)

    def prepare(number: int, trainer: Any) -> None:
        async def gather(members: Sequence[str]) -> dict[str, tuple[Range, ...]]:
            asked.append(len(members))
            await gathered.wait()
            return {}

        trainer.finish_early, trainer.gather = cut_short[number].set, gather

    async with running(tmp_path, SYNCHRONOUS, 1, script, prepare) as (group, members):
        await group.until(lambda: any(event.fields["phase"] == "submit" for event in members[0].seen("phase_entered")))
        assert not any(event.is_set() for event in cut_short)
        gathered.set()
        await group.until_round(1)
        assert members[0].heads[-1].ledger.cursor == 12 and set(asked) == {3}
