"""Twenty faults, each in a swarm of its own: every point by SIGKILL and SIGSTOP, leaders, two peers at once."""

from __future__ import annotations

from pathlib import Path

import pytest

from peer.faults import ROUND_POINTS
from tests.support.peer_process import PeerProcess
from tests.swarm.support.fault_runs import Fault, Onlooker, strikes_a_donor
from tests.swarm.support.swarm_harness import WITNESS, open_swarm

OF_JOINERS = "during_fetch"
OF_DONORS = "during_state_transfer"
STRUCK_IN = 3  # the round
JOINS_WITHIN = 5  # rounds
LEADS = [("kill", "plan"), ("kill", "exchange"), ("stop", "compute"), ("stop", "vote")]

pytestmark = [pytest.mark.soak, pytest.mark.process]


@pytest.mark.parametrize("point", ROUND_POINTS)
@pytest.mark.parametrize("signal", ["kill", "stop"])
async def test_one_peer_is_struck(tmp_path: Path, signal: str, point: str) -> None:
    fault = Fault(signal, point, 0 if point in (OF_JOINERS, OF_DONORS) else STRUCK_IN)
    async with open_swarm(tmp_path, min_peers=3) as swarm:
        healthy = [swarm.join(f"p{i}") for i in range(3)]
        if point == OF_JOINERS:
            await swarm.committed(1)
        victim = swarm.join("victim", fault=str(fault))
        if point == OF_DONORS:
            await victim.wait_for("round_committed")
        await swarm.committed(1, *healthy)
        onlooker = Onlooker(swarm, healthy, timed=True)
        if point == OF_DONORS:
            await strikes_a_donor(swarm, fault, victim)
        else:
            await fault.strikes(victim)
        await onlooker.check_the_others_go_on([victim])
        if point == OF_JOINERS and victim.alive:
            fetched, joined = victim.all("state_fetched")[0].at, victim.commits[0].at
            assert sum(fetched < fact.at < joined for fact in healthy[0].commits) <= JOINS_WITHIN, victim.transcript()


@pytest.mark.parametrize(("signal", "phase"), LEADS)
async def test_the_leader_is_struck(tmp_path: Path, signal: str, phase: str) -> None:
    """Whoever leads a round is struck when it enters a phase of that round."""
    async with open_swarm(tmp_path, min_peers=4) as swarm:
        peers = [swarm.join(f"p{i}") for i in range(4)]
        await swarm.committed(2)
        leader, since = await the_next_leader(peers)
        await leader.wait_for("phase_entered", lambda fields: fields["phase"] == phase, since)
        healthy = [peer for peer in peers if peer is not leader]
        onlooker = Onlooker(swarm, healthy, timed=True)
        if signal == "kill":
            leader.kill()
        else:
            leader.freeze()
            await leader.wait_stopped()
        await onlooker.check_the_others_go_on([leader])


async def the_next_leader(peers: list[PeerProcess]) -> tuple[PeerProcess, int]:
    """Who begins to lead an attempt now, with the place of that in its facts; only a leader enters the phase `plan`."""
    since = {peer.name: peer.mark() for peer in peers}
    while True:
        for peer in peers:
            for place, fact in enumerate(peer.facts[since[peer.name] :], since[peer.name]):
                if fact.name == "phase_entered" and fact.fields["phase"] == "plan":
                    return peer, place
        await peers[0].news.wait()


@pytest.mark.parametrize("coordinated", [True, False], ids=["coordinated", "alone"])
async def test_two_peers_are_struck_at_once(tmp_path: Path, coordinated: bool) -> None:
    faults = [Fault("kill", "during_exchange", STRUCK_IN), Fault("stop", "before_vote", STRUCK_IN)]
    async with open_swarm(tmp_path, min_peers=5, run=WITNESS) as swarm:
        healthy = [swarm.join(f"p{i}") for i in range(3)]
        victims = [swarm.join(fault.point, fault=str(fault)) for fault in faults]
        await swarm.committed(1, *healthy)
        if not coordinated:
            swarm.coordinator.kill()
        onlooker = Onlooker(swarm, healthy, timed=True)
        for fault, victim in zip(faults, victims, strict=True):
            await fault.strikes(victim)
        await onlooker.check_the_others_go_on(victims)
