"""Peers whose devices share the model in different ways: what they commit is the same to the bit."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.swarm.support.swarm_harness import open_swarm

INT8 = '[outer]\nmethod = "diloco"\nsteps = 6\n\n[codec]\nup = "int8"\ndown = "int8"'


@pytest.mark.process
async def test_peers_of_different_layouts_commit_one_state(tmp_path: Path) -> None:
    async with open_swarm(tmp_path, rounds=2, outer=INT8) as swarm:
        alone = swarm.join("alone")
        several = swarm.join("several", "--devices", "cpu:2", "--layout", "fsdp")
        await swarm.committed(2, alone, several)
        assert max(fact.fields["contributions"] for fact in several.commits) == 2
        assert len(several.all("worker_ready")) == 2 and not several.all("worker_died")
        assert len(swarm.hashes()) >= 2 and all(len(hashes) == 1 for hashes in swarm.hashes().values())
