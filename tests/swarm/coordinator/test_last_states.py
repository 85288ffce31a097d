"""The coordinator and the last state of each group, with real replicas."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from swarm.coordinator import last_states as module
from swarm.membership.completion import WANTING
from swarm.membership.proven_heads import ask_proven_heads
from swarm.placement import commits
from swarm.run.agreement import agreement_config
from tests.swarm.coordinator.run_scene import CoordinatedRun, open_run

ROUNDS = 2


async def complete(run: CoordinatedRun) -> bytes:
    """Wait until the run of one stage is complete; return the hash of its last state."""
    await run.until(lambda: run.seen("run_completed"))
    return run.groups[0].head.state_hash


async def test_the_last_state_is_kept_and_served_before_the_run_is_complete(tmp_path: Path) -> None:
    async with open_run(tmp_path, min_peers=2, rounds=ROUNDS) as run:
        one, other = await run.enter(), await run.enter()
        last = await complete(run)
        names = [event.name for event in run.events]
        assert names.index("checkpoint_saved") < names.index("run_completed")
        assert last in run.stores[0].state_hashes and run.last_states.phase == ""
        await run.until(lambda: other.head.round == ROUNDS)
        config = agreement_config(run.manifest, 0, other.peer)
        await run.leave(one)
        best = (await ask_proven_heads(other.host, config, [run.host.peer_id], 60.0))[0]
        assert best.head.state_hash == last and best.holders == (run.host.peer_id,)

        await run.leave(other)
        await run.restart()
        assert await complete(run) == last and not run.seen("last_state_missing"), "it is on its disk"
        assert last in run.stores[0].state_hashes


async def test_without_its_last_state_it_says_so_and_asks_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there: list[Any] = []

    async def ask(*arguments: Any) -> Any:
        return await ask_proven_heads(*arguments) if there else []

    monkeypatch.setattr(module, "PATIENT_S", 0.0)
    monkeypatch.setattr(module, "ask_proven_heads", ask)
    async with open_run(tmp_path, min_peers=1, rounds=ROUNDS) as run:
        member = await run.enter()
        await run.until(lambda: run.seen("last_state_missing"))
        assert "start one again" in str(run.seen("last_state_missing")[0].fields["reason"])
        assert run.last_states.phase == WANTING and not run.seen("run_completed")
        there.append(member)
        assert await complete(run) == member.head.state_hash
        assert len(run.seen("last_state_missing")) == 1 and run.last_states.phase == ""


async def test_a_disk_that_is_full_is_told_and_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refused: list[int] = []
    save = commits.save_commit

    async def full_at_first(place: Any, stage: int, *commit: Any) -> bool:
        refused.append(stage)
        return len(refused) > 2 and await save(place, stage, *commit)

    monkeypatch.setattr(module, "save_commit", full_at_first)
    monkeypatch.setattr(module, "SAVE_AGAIN_S", 0.1)
    async with open_run(tmp_path, min_peers=1, rounds=ROUNDS) as run:
        member = await run.enter()
        await run.until(lambda: len(refused) == 2)
        assert not run.seen("run_completed") and run.last_states.phase == WANTING
        assert run.groups[0].head.state_hash in run.stores[0].state_hashes, "it is served meanwhile"
        await complete(run)
        assert len(refused) == 3 and member.head.round == ROUNDS
