"""The end of a run, for one who is about to join it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.swarm.swarm_harness import open_swarm

ROUNDS = 2


@pytest.mark.process
async def test_nobody_is_left_alone_with_an_earlier_round(tmp_path: Path) -> None:
    """A joiner comes in the last round, while the members stand still; they see to it that it has that round, too."""
    async with open_swarm(tmp_path, rounds=ROUNDS, steps=100) as swarm:
        members = [swarm.join("p1"), swarm.join("p2")]
        await swarm.committed(1, *members)
        for member in members:
            member.freeze()
        joiner = swarm.join("late")
        await swarm.coordinator.wait_for("member_joined", lambda fields: fields["name"] == "late")
        for member in members:
            member.thaw()
        everybody = (*members, joiner)
        finished = [await peer.wait_for("run_finished", timeout_s=120) for peer in everybody]
        assert {(f.fields["round"], f.fields["state_hash"]) for f in finished} == {(ROUNDS, members[0].state_hash)}
        assert [await peer.wait_exit(90) for peer in everybody] == [0, 0, 0]
        swarm.check_agreement()
