"""A gossip run as people start it: `peer coordinate`, `peer join`, `peer status`, `peer export`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import trio
from safetensors.torch import load_file

from tests.support.peer_process import POLL_S, PeerProcess
from tests.support.process_group import REPO
from tests.swarm.support.swarm_harness import RUN_TOML, Swarm, open_swarm

PATIENT = RUN_TOML.replace("min_peers = {min_peers}", "min_peers = {min_peers}\ntimeout_floor_s = 60.0")
assert PATIENT != RUN_TOML
OUTER = '[outer]\nmethod = "gossip"\nsteps = 10\n'


async def met(peer: PeerProcess, more: int) -> None:
    """Until it has met somebody so many times more."""
    wanted = len(peer.all("gossip_met")) + more
    await peer.until(lambda: len(peer.all("gossip_met")) >= wanted, f"meeting number {wanted}")


async def cli(*arguments: str) -> str:
    done = await trio.run_process([sys.executable, "-m", "cli.main", *arguments], capture_stdout=True, cwd=REPO)
    return str(done.stdout.decode())


async def status(swarm: Swarm) -> dict[str, Any]:
    seen: dict[str, Any] = json.loads(await cli("status", str(swarm.invite), "--json"))
    return seen


def has_learnt(swarm: Swarm) -> bool:
    measured = [fact.fields for peer in swarm.peers.values() for fact in peer.all("val_evaluated")]
    losses = [fields["loss"] for fields in sorted(measured, key=lambda fields: fields["round"])]
    return len(losses) > 1 and losses[-1] < 0.7 * losses[0]


@pytest.mark.soak  # test_gossip_processes is smaller
@pytest.mark.process
async def test_peers_learn_by_gossip_come_late_and_go(tmp_path: Path) -> None:
    async with open_swarm(tmp_path, outer=OUTER, run=PATIENT) as swarm:
        peers = [swarm.join(f"p{i}") for i in range(2)]
        for peer in peers:
            await met(peer, 8)  # beyond what a newcomer could be apart
        late = swarm.join("late")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(cli, "export", str(swarm.invite), "--out", str(tmp_path / "model"))
            await met(late, 2)
        seen = await status(swarm)
        with trio.fail_after(300):
            # Whoever looks on may not have found all of the records in time.
            while seen["stages"][0]["claims"]["replicas"] != 3:
                seen = await status(swarm)
        assert late.all("state_fetched"), late.transcript()
        assert load_file(tmp_path / "model" / "model.safetensors")
        assert seen["method"] == "gossip" and seen["round"] >= 4
        with trio.fail_after(900):
            while not has_learnt(swarm):  # who is slow to measure measures seldom
                await trio.sleep(POLL_S)
        met_fast_forward = [fact.fields for fact in peers[0].all("gossip_met") if not fact.fields["rounds_apart"]]
        assert max(fields["distance"] for fields in met_fast_forward) < 0.3

        peers[0].interrupt()
        assert await peers[0].wait_exit() == 130
        assert peers[0].all("checkpoint_saved")
        peers[1].kill()
        before = peers[0].all("gossip_met")[-1].fields["round"]
        swarm.restart(peers[0])
        await met(peers[0], 1)
        assert peers[0].all("gossip_met")[-1].fields["round"] > before
        struck = [fact.fields for peer in swarm.peers.values() for fact in peer.all("peer_penalized")]
        assert not struck, struck
        swarm.check_agreement()
