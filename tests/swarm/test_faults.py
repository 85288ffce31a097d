"""Scripted faults in a swarm of real processes: at most one round lost, one state hash, and nobody waits twice."""

from __future__ import annotations

from pathlib import Path

import pytest

from peer.faults import POINTS
from tests.swarm.swarm_harness import PeerProcess, Swarm, open_swarm

FREEZE_COSTS_S = 15.0


async def settle(swarm: Swarm, healthy: list[PeerProcess], more: int = 2) -> None:
    """Until all the healthy have committed `more` further rounds."""
    await swarm.committed(max(peer.round for peer in healthy) + more, *healthy)


async def strike(swarm: Swarm, healthy: list[PeerProcess], signal: str, point: str) -> None:
    """One more peer joins, meets its fault, and the others go on."""
    await settle(swarm, healthy, 1)
    discarded = [len(peer.all("round_discarded")) for peer in healthy]
    victim = swarm.join(f"{signal}-{point}", fault=f"{signal}:{point}:0")
    if point == "during_state_transfer":
        await victim.wait_for("round_committed")
        swarm.join(f"{signal}-{point}-joiner")
    if signal == "kill":
        await victim.wait_exit(60.0)
        victim.kill()
    else:
        await victim.wait_stopped()
    struck_at = max(fact.at for peer in healthy for fact in peer.facts)
    await settle(swarm, healthy)
    for peer, before in zip(healthy, discarded, strict=True):
        assert len(peer.all("round_discarded")) - before <= 1, peer.story()
        assert peer.longest_pause(struck_at) <= FREEZE_COSTS_S, peer.story()
    if signal == "stop":
        first_pause_over = max(fact.at for peer in healthy for fact in peer.commits)
        await settle(swarm, healthy, 3)
        for peer in healthy:
            assert peer.longest_pause(first_pause_over) <= 5.0, f"delayed again\n{peer.story()}"
        victim.thaw()
        await victim.until(lambda: victim.round >= healthy[0].round, "catching up after the thaw")
        victim.kill()
        await settle(swarm, healthy, 1)
    swarm.check_agreement()


@pytest.mark.process
@pytest.mark.parametrize("signal", ["kill", "stop"])
async def test_a_fault_at_any_point_of_the_protocol(tmp_path: Path, signal: str) -> None:
    async with open_swarm(tmp_path, min_peers=3) as swarm:
        healthy = [swarm.join(f"p{i}") for i in range(3)]
        await swarm.committed(1, *healthy)
        for point in POINTS:
            await strike(swarm, healthy, signal, point)
