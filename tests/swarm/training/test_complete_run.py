"""A complete run can be had, of real processes: after all members have left, after a restart of the coordinator, and
where that was away when the last round was committed."""

from __future__ import annotations

from pathlib import Path

import pytest

from swarm.client.download import download_head
from swarm.monitor.collector import MonitorCollector
from swarm.run.invite import Invite
from swarm.training.saved_models import newest_model
from tests.swarm.support.swarm_harness import WITNESS, Swarm, open_swarm
from tests.swarm.training.test_last_round import TWO_STAGES

ROUNDS = 2
ALARMS = {"quorum_lost", "stages_missing", "move_started", "regroup_failed"}


async def check_it_can_be_had(swarm: Swarm, folder: Path, states: list[str]) -> None:
    """Only the coordinator is there. `states`: the hash of each stage's last state."""
    invite = Invite.parse(swarm.invite.read_text())
    seen = await MonitorCollector(invite).once()
    assert (seen.verdict.word, seen.round) == ("complete", seen.rounds_planned), seen
    assert [member.claims.role for member in seen.members if member.claims is not None] == ["coordinator"]
    assert [stage.facts.state_hash for stage in seen.stages if stage.facts is not None] == states
    fetched = await download_head(invite, folder / "fetched.part")
    assert [head.state_hash.hex() for head in fetched.heads] == states and fetched.donors == 1
    saved = newest_model([swarm.coordinator.home])
    assert [part.tree.root.hex() for part in saved.parts] == states
    assert saved.theta.equal(fetched.theta)


@pytest.mark.process
async def test_a_complete_run_can_be_had_after_all_have_left(tmp_path: Path) -> None:
    async with open_swarm(tmp_path, rounds=ROUNDS, min_peers=1) as swarm:
        member = swarm.join("member")
        assert await member.wait_exit() == 0
        assert f"complete: round {ROUNDS} of {ROUNDS}" in member.log.read_text()
        await swarm.coordinator.wait_for("run_completed")
        await check_it_can_be_had(swarm, tmp_path, [member.state_hash])

        swarm.coordinator.kill()
        before = swarm.coordinator.mark()
        swarm.restart(swarm.coordinator)
        await swarm.coordinator.wait_for("run_completed", since=before)
        await check_it_can_be_had(swarm, tmp_path, [member.state_hash])
        assert not ALARMS & {fact.name for fact in swarm.coordinator.facts}

        late = swarm.join("late")
        assert await late.wait_exit() == 0
        assert f"complete: round {ROUNDS} of {ROUNDS}" in late.log.read_text()
        assert not late.all("worker_ready"), "there is nothing to train"
        assert [part.tree.root.hex() for part in newest_model([late.home]).parts] == [member.state_hash]
        swarm.restart(member)
        assert await member.wait_exit() == 0, "it is told, too"


@pytest.mark.process
async def test_a_coordinator_that_was_away_fetches_the_last_state_later(tmp_path: Path) -> None:
    async with open_swarm(tmp_path, rounds=ROUNDS, min_peers=1, run=WITNESS) as swarm:
        member = swarm.join("member", fault=f"stop:before_send:{ROUNDS}")
        await member.wait_stopped()
        swarm.coordinator.kill()
        member.thaw()
        assert await member.wait_exit() == 0, "it does not wait for ever"
        assert member.round == ROUNDS and not swarm.coordinator.all("run_completed")
        swarm.restart(swarm.coordinator)
        swarm.restart(member)
        await swarm.coordinator.wait_for("run_completed")
        assert await member.wait_exit() == 0
        await check_it_can_be_had(swarm, tmp_path, [member.state_hash])


@pytest.mark.process
async def test_a_complete_pipeline_can_be_had_after_all_have_left(tmp_path: Path) -> None:
    async with open_swarm(tmp_path, rounds=ROUNDS, min_peers=2, steps=5, run=TWO_STAGES) as swarm:
        peers = [swarm.join(f"p{stage}", "--stage", str(stage)) for stage in (0, 1)]
        assert [await peer.wait_exit() for peer in peers] == [0, 0]
        for stage in (0, 1):
            await swarm.coordinator.wait_for("run_completed", lambda fields, stage=stage: fields["stage"] == stage)  # type: ignore[misc]
        await check_it_can_be_had(swarm, tmp_path, [peer.state_hash for peer in peers])
        late = swarm.join("late")
        assert await late.wait_exit() == 0
        assert "`peer export INVITE --out DIR` writes the model" in late.log.read_text()
        for peer in peers:
            names = [fact.name for fact in peer.facts]
            assert not ALARMS & set(names[names.index("run_finished") :])
        assert not ALARMS & {fact.name for fact in swarm.coordinator.facts}
