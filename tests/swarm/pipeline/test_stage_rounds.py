"""Groups of a pipeline's stages over real sockets with real workers: what they commit after losses."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import trio

from optim.config import AllReduceConfig, CodecConfig, DilocoConfig, SparseLocoConfig
from swarm.pipeline import local_steps
from swarm.protocol.plan import Assignment
from swarm.rounds.trainers.trainer import TrainRequest
from tests.swarm.support import stage_replicas as stage_members
from tests.swarm.support.pipeline_harness import Table, without_haste
from tests.swarm.support.stage_replicas import FP32, Setting, StageMember, run_members
from tests.swarm.support.stage_scene import BATCH, Scene, check_a_kill, check_one_process, kill_worker, scene_of, until

pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(sys.platform != "linux", reason="worker processes are supervised through Linux's /proc"),
]
STEPS = 4


@pytest.mark.parametrize(
    ("outer", "codec"),
    [
        pytest.param(DilocoConfig(steps=4), FP32, id="diloco"),
        pytest.param(SparseLocoConfig(steps=4), CodecConfig(), id="sparseloco", marks=pytest.mark.soak),
    ],
)
async def test_replicas_are_bit_identical_after_every_commit(tmp_path: Path, outer: Any, codec: CodecConfig) -> None:
    """Local steps, two replicas of each stage."""
    rounds = 3
    async with scene_of(tmp_path, Setting(2, outer, rounds, codec), [2, 2]) as scene:
        with trio.fail_after(300):
            await scene.run()
            scene.check(rounds)
            for members in scene.stages:
                assert {len(head.members) for member in members for head in member.heads} == {2}
                assert members[0].heads[-1].inner_step == rounds * outer.steps, "all stages are at one place"
                assert not torch.equal(members[0].context.state.theta, members[0].replica.worker_group.delta)


def at_work(members: list[StageMember]) -> list[StageMember]:
    """Return the members with something to lose."""
    return [member for member in members if member.heads and member.replica.server.accounting.counted]


@pytest.mark.soak  # test_synchronous_batches_survive_a_killed_replica is of its kind
async def test_lost_worker_costs_no_commit(tmp_path: Path) -> None:
    """Local steps; the worker of a replica of each stage dies in the middle."""
    rounds = 3
    async with scene_of(tmp_path, Setting(2, DilocoConfig(steps=4), rounds), [2, 2]) as scene:
        with trio.fail_after(400):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(scene.run)
                for members in scene.stages:
                    await until(partial(at_work, members))
                    kill_worker(at_work(members)[0])
            scene.check(rounds)


@pytest.mark.parametrize("gone", [False, pytest.param(True, marks=pytest.mark.soak)], ids=["stays", "is-gone"])
async def test_stage_ahead_of_its_last_round_finishes(
    tmp_path: Path, gone: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its plan was late by a round of stage 0, which finishes the run and may then be gone."""
    without_haste(monkeypatch)  # a late replica counts the same sample as another, and one of the two is left out
    rounds = 2
    async with scene_of(tmp_path, Setting(2, DilocoConfig(steps=4), rounds), [1, 2]) as scene:
        with trio.fail_after(300):
            (first,), later = scene.stages
            await first.run()
            await heard_of_the_end(scene, rounds)
            if gone:
                del scene.table[first.replica.peer]
                await all_read(scene, monkeypatch)
            await run_members(later)
            for member in later:
                before, last = member.heads[-2:]
                assert (before.round, last.round) == (1, rounds) and len(last.members) == 2
                assert last.state_hash == before.state_hash == member.context.state.tree.root
                assert last.ledger == before.ledger and before.ledger.returned == ()
                assert before.ledger.cursor == first.heads[-1].ledger.cursor, "it has counted all"


@pytest.mark.parametrize(
    "share", [pytest.param(0.0, id="lost", marks=pytest.mark.soak), pytest.param(1.0, id="come again")]
)
async def test_stage_that_lost_its_last_samples_finishes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, share: float
) -> None:
    """They are dispatched again, as far as the budget allows; the rest is declared lost."""
    monkeypatch.setattr(local_steps, "REDISPATCH_SHARE", share)
    async with scene_of(tmp_path, Setting(2, DilocoConfig(steps=4), rounds=1), [1, 1]) as scene:
        with trio.fail_after(300):
            (first,), (last,) = scene.stages
            await first.run()
            await heard_of_the_end(scene, 1)
            kill_worker(last)
            await until(lambda: last.replica.seen("worker_died"))
            await last.run()
            ours, theirs = last.heads[-1], first.heads[-1]
            assert ours.round == 1 and last.replica.seen("pipeline_lost")
            assert ours.ledger.settled == theirs.ledger.settled and theirs.ledger.lost == 0
            assert ours.tokens == share * theirs.tokens and bool(ours.ledger.lost) == (share == 0)
            assert bool(last.replica.seen("round_empty")) == (share == 0)
            assert last.replica.seen("pipeline_redispatched")


async def all_read(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait until every later replica has read again what stage 0 says."""
    reads, look = list[int | None](), stage_members._first_round

    def noting(table: Table) -> int | None:
        reads.append(look(table))
        return reads[-1]

    monkeypatch.setattr(stage_members, "_first_round", noting)
    await until(lambda: len(reads) >= 2 * len(scene.stages[1]))  # all look equally often


async def heard_of_the_end(scene: Scene, rounds: int) -> None:
    await until(lambda: all(member.trainer.is_exhausted(rounds) for member in scene.stages[1]))


async def test_only_the_last_rounds_can_run_dry(tmp_path: Path) -> None:
    """Records about stage 0 cannot change this; stage 0 itself never runs dry."""
    rounds = 4
    async with scene_of(tmp_path, Setting(2, DilocoConfig(steps=4), rounds), [1, 1]) as scene:
        with trio.fail_after(300):
            (first,), (last,) = scene.stages
            first.entry["round"] = rounds
            await heard_of_the_end(scene, rounds)
            assert [last.trainer.is_exhausted(number) for number in range(1, 5)] == [False, False, True, True]
            assert not first.trainer.is_exhausted(rounds)


async def test_late_plan_submits_what_there_is(tmp_path: Path) -> None:
    async with scene_of(tmp_path, Setting(2, DilocoConfig(steps=4), rounds=9), [1, 1]) as scene:
        with trio.fail_after(300):
            (member,) = scene.stages[1]
            head, context = member.head, member.context
            coding = context.state.strategy.coding(context.schedule.round_info(head), context.state.tensors)
            assignment = Assignment(context.me, (), context.schedule.most_steps(head))
            work = await member.trainer.train(
                TrainRequest(assignment, context.schedule.round_info(head), coding.places, 1, 600.0, cut_short=True)
            )
            assert (work.steps, work.counted) == (0, ())


# -- synchronous -----------------------------------------------------------------------------------------------------


async def test_synchronous_batches_equal_one_process(tmp_path: Path) -> None:
    setting = Setting(3, AllReduceConfig(batch=BATCH), STEPS)
    async with scene_of(tmp_path, setting, [2, 2, 1]) as scene:
        with trio.fail_after(300):
            await scene.run()
            scene.check(STEPS)
            check_one_process(scene, STEPS)


@pytest.mark.soak
@pytest.mark.parametrize("stage", [0, 1])
async def test_synchronous_batches_survive_a_lost_worker(tmp_path: Path, stage: int) -> None:
    setting = Setting(2, AllReduceConfig(batch=BATCH), STEPS)
    async with scene_of(tmp_path, setting, [2, 2]) as scene:
        with trio.fail_after(300):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(scene.run)
                victim = scene.stages[stage][0]
                await until(lambda: victim.heads and victim.replica.server.accounting.counted)
                kill_worker(victim)
            assert victim.replica.seen("worker_died")
            scene.check(STEPS)
            check_one_process(scene, STEPS)


async def test_synchronous_batches_survive_a_killed_replica(tmp_path: Path) -> None:
    await check_a_kill(tmp_path, [2, 2], 1, STEPS)
