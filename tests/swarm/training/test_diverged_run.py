"""A pipeline that diverges, of real processes: the peers of all stages end with 7, and none is told to join again."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.swarm.support.swarm_harness import open_swarm
from tests.swarm.training.test_last_round import TWO_STAGES

TOO_FAST = TWO_STAGES.replace("lr = 4e-3", "lr = 1e8").replace("warmup_steps = 10", "warmup_steps = 0")
assert "1e8" in TOO_FAST and "warmup_steps = 0" in TOO_FAST


@pytest.mark.soak  # a minute; test_divergence.py judges the same rule without processes
@pytest.mark.process
async def test_all_stages_end_with_the_one_that_diverges(tmp_path: Path) -> None:
    async with open_swarm(tmp_path, rounds=50, steps=4, run=TOO_FAST) as swarm:
        peers = [swarm.join(f"p{stage}", "--stage", str(stage)) for stage in (0, 1)]
        assert [await peer.wait_exit() for peer in peers] == [7, 7], swarm.transcript()
        for peer in peers:
            said = peer.log.read_text()
            assert "training has diverged" in said and "lower [inner] lr in a new run" in said
            assert "Traceback" not in said and "Join again" not in said
