"""Groups of a pipeline's stages over real sockets with real workers: what they commit, whatever is lost on the way."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import trio

from optim.config import AllReduce, CodecConfig, Diloco, SparseLoco
from tests.swarm.stage_scene import BATCH, check_a_kill, check_one_process, kill_worker, scene_of, until
from tests.swarm.stage_seats import FP32, Setting

pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(sys.platform != "linux", reason="worker processes are supervised through Linux's /proc"),
]
STEPS = 5


@pytest.mark.parametrize(
    ("outer", "codec"),
    [
        pytest.param(Diloco(steps=4), FP32, id="diloco"),
        pytest.param(SparseLoco(steps=4), CodecConfig(), id="sparseloco", marks=pytest.mark.soak),
    ],
)
async def test_replicas_of_a_stage_are_the_same_bits_after_every_commit(
    tmp_path: Path, outer: Any, codec: CodecConfig
) -> None:
    """Local steps, two replicas of each stage."""
    rounds = 3
    with trio.fail_after(120):
        async with scene_of(tmp_path, Setting(2, outer, rounds, codec), [2, 2]) as scene:
            await scene.run()
            scene.check(rounds)
            for seats in scene.stages:
                assert {len(head.members) for seat in seats for head in seat.heads} == {2}
                assert seats[0].heads[-1].inner_step == rounds * outer.steps, "all stages are at one place"
                assert not torch.equal(seats[0].post.state.theta, seats[0].replica.gang.delta)


async def test_a_lost_worker_costs_no_commit_and_counts_nothing_twice(tmp_path: Path) -> None:
    """Local steps; the worker of a replica of each stage dies in the middle."""
    rounds = 3
    with trio.fail_after(150):
        async with scene_of(tmp_path, Setting(2, Diloco(steps=4), rounds), [2, 2]) as scene:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(scene.run)
                for seats in scene.stages:
                    await until(lambda seats=seats: seats[0].heads and seats[0].replica.station.counting.counted)
                    kill_worker(seats[0])
            scene.check(rounds)


# -- synchronous -----------------------------------------------------------------------------------------------------


async def test_synchronous_batches_are_one_process(tmp_path: Path) -> None:
    setting = Setting(3, AllReduce(batch=BATCH), STEPS)
    with trio.fail_after(150):
        async with scene_of(tmp_path, setting, [2, 2, 1]) as scene:
            await scene.run()
            scene.check(STEPS)
            check_one_process(scene, STEPS)


@pytest.mark.soak
@pytest.mark.parametrize("stage", [0, 1])
async def test_so_they_are_where_a_worker_dies_in_the_middle(tmp_path: Path, stage: int) -> None:
    setting = Setting(2, AllReduce(batch=BATCH), STEPS)
    with trio.fail_after(150):
        async with scene_of(tmp_path, setting, [2, 2]) as scene:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(scene.run)
                victim = scene.stages[stage][0]
                await until(lambda: victim.heads and victim.replica.station.counting.counted)
                kill_worker(victim)
            assert victim.replica.seen("worker_died")
            scene.check(STEPS)
            check_one_process(scene, STEPS)


async def test_so_they_are_where_a_replica_is_killed_in_the_middle(tmp_path: Path) -> None:
    await check_a_kill(tmp_path, [2, 2], 1, STEPS)
