"""Rounds of a twentieth of a second, in processes of their own: a newcomer is always a moment behind."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.swarm.support.swarm_harness import open_swarm

pytestmark = [pytest.mark.soak, pytest.mark.process]  # tests/swarm/rounds/test_newcomers.py has them in one process


@pytest.mark.parametrize("members", [2, 3])
async def test_a_newcomer_of_quick_rounds_becomes_a_member(tmp_path: Path, members: int) -> None:
    async with open_swarm(tmp_path, min_peers=members, steps=1) as swarm:
        peers = [swarm.join(f"p{number}") for number in range(members)]
        await swarm.committed(20, *peers)  # beyond an endorsement: it begins there
        late = swarm.join("late")
        await late.wait_for("round_committed", lambda commit: commit["members"] == members + 1)
        await swarm.committed(late.round + 5, *peers, late)
        swarm.check_agreement()
