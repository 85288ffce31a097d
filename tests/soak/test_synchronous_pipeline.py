"""Synchronous mode at its full size: four stages, eight replicas, twenty steps, with and without a kill in a batch."""

from __future__ import annotations

from pathlib import Path

import pytest
import trio

from optim.config import AllReduceConfig
from tests.swarm.support.stage_replicas import Setting
from tests.swarm.support.stage_scene import BATCH, check_a_kill, check_one_process, scene_of

pytestmark = [pytest.mark.soak, pytest.mark.process]
STEPS = 20


async def test_eight_replicas_of_four_stages_are_one_process(tmp_path: Path) -> None:
    with trio.fail_after(600):
        async with scene_of(tmp_path, Setting(4, AllReduceConfig(batch=BATCH), STEPS), [2, 2, 2, 2]) as scene:
            await scene.run()
            scene.check(STEPS)
            check_one_process(scene, STEPS)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
async def test_so_they_are_where_one_is_killed_in_the_middle_of_a_batch(tmp_path: Path, stage: int) -> None:
    others = [2, 2, 2, 2]  # and the victim is the third of its stage: two are a majority
    others[(stage + 1) % 4] = 1
    await check_a_kill(tmp_path, others, stage, STEPS)
