"""Every method with real peers and real compute: thirty rounds, one SIGKILL, one state, and the loss falls."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.swarm.support.swarm_harness import open_swarm

ROUNDS = 30
METHODS = {
    "diloco": '[outer]\nsteps = 10\n[codec]\nup = "int4"\ndown = "int4"',
    "quadratic": '[outer]\nsteps = 5\nschedule = "quadratic"\nalpha = 0.014',
    "streaming": '[outer]\nmethod = "streaming"\nsteps = 20\nfragments = 2\ntau = 2',
    "eager": '[outer]\nmethod = "eager"\nsteps = 10',
    "sparseloco": '[outer]\nmethod = "sparseloco"\nsteps = 10',
    "demo": '[outer]\nmethod = "demo"\nchunk = 32',
    "lion": '[outer]\nmethod = "lion"',
    "allreduce": '[outer]\nmethod = "allreduce"\nbatch = 32',
    "sign": '[outer]\nsteps = 10\nlr = 0.3\nmomentum = 0.5\n[codec]\nup = "sign"',
    "lgreco": '[outer]\nsteps = 10\n[codec]\nup = "lgreco"',
    "powersgd": '[outer]\nsteps = 10\nlr = 1.0\nmomentum = 0.0\n[codec]\nup = "powersgd"',
}


@pytest.mark.soak
@pytest.mark.parametrize("name", METHODS)
async def test_it_learns_while_a_peer_is_killed(name: str, tmp_path: Path) -> None:
    async with open_swarm(tmp_path, rounds=ROUNDS, min_peers=4, outer=METHODS[name]) as swarm:
        peers = [swarm.join(f"p{i}") for i in range(4)]
        await swarm.committed(8, *peers)
        peers[0].kill()
        rest = peers[1:]
        await swarm.committed(ROUNDS, *rest, timeout_s=180)
        for peer in rest:
            await peer.wait_for("run_finished")
        assert len({peer.state_hash for peer in rest}) == 1
        swarm.check_agreement()
        losses = [fact.fields["loss"] for peer in peers for fact in peer.all("val_evaluated")]
        assert min(losses) < 0.8 * max(losses), losses
        assert not [fact for peer in rest for fact in peer.all("worker_failed")]
