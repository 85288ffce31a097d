"""A guest that was the only member once signs a history of its own, and shows it to a coordinator, two members, a
newcomer and who looks: nobody moves, and what is exported is the run's."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
import trio

from tests.processes.test_strangers import RUN_TOML
from tests.support.forger import STATE, open_forger
from tests.support.process_group import REPO
from tests.swarm.support.swarm_harness import open_swarm

pytestmark = [pytest.mark.process, pytest.mark.soak]  # two minutes


async def peer(*arguments: str) -> tuple[str, str]:
    """Run another command; return what it printed, and what it said beside."""
    command = [sys.executable, "-m", "cli.main", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(REPO), "OMP_NUM_THREADS": "1"}
    with trio.fail_after(300):
        done = await trio.run_process(
            command, capture_stdout=True, capture_stderr=True, check=False, env=environment, cwd=REPO
        )
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout.decode(), done.stderr.decode()


async def test_a_history_that_a_guest_has_made_up_moves_nobody(tmp_path: Path) -> None:
    async with open_swarm(tmp_path, min_peers=1, outer="[outer]\nsteps = 10", run=RUN_TOML) as swarm:
        guest = swarm.join("guest")
        await swarm.committed(1, guest)
        members = [swarm.join("ann"), swarm.join("bob")]
        await guest.until(lambda: guest.commits[-1].fields.get("members") == 3, "three members")
        guest.kill()
        await swarm.committed(guest.round + 2, *members)
        async with open_forger(guest.home, tmp_path / "forger", swarm.invite) as forger:
            known = [name for name in forger.host.connected if name != forger.host.peer_id]
            assert await forger.show(*known) >= 3 * len(known) > 6, "they hear it"
            newcomer = swarm.join("newcomer")
            await newcomer.wait_for("state_fetched", timeout_s=300)
            await forger.show(*forger.host.connected)
            at = max(member.round for member in members)
            await swarm.committed(at + 2, *members, newcomer)
            status, _ = await peer("status", str(swarm.invite), "--json")
            seen = json.loads(status)
            names = {one["claims"]["name"] for one in seen["members"] if one["claims"]}
            assert "forger" in names, "status has asked it, too"
            assert seen["round"] < forger.head.round and seen["stages"][0]["facts"]["state_hash"] != STATE.hex()
            [invite] = seen["guests"]
            assert len(invite["peers"]) == 4 and seen["shares"][0]["invite"] == invite["invite"]
            assert seen["shares"][0]["is_only"], "all came by one invite"
            said, warned = await peer("export", str(swarm.invite), "--out", str(tmp_path / "model"))
            assert f"state {STATE.hex()[:8]}" not in said and (tmp_path / "model" / "model.safetensors").exists()
            assert "members came by the invite" not in warned
        assert STATE.hex() not in {found for one in swarm.hashes().values() for found in one}
        assert len(swarm.coordinator.all("regrouped")) == 1, "no start over it"
