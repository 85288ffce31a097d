"""Scripted faults in a swarm of real processes: at most one round lost, and one state hash.

Here at every point in one swarm; in tests/soak in all combinations, where it looks at the clock. `make test` strikes in
one process: donors in tests/swarm/state/test_state_donors.py, newcomers and members in tests/swarm/rounds; and it kills
processes in test_quickstart.py and test_coordinator_loss.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from peer.faults import ROUND_POINTS
from tests.swarm.support.fault_runs import Fault, Onlooker, strikes_a_donor
from tests.swarm.support.swarm_harness import open_swarm

OF_MEMBERS = (  # founders of the run, struck one after the other: each when the others have got over the one before
    Fault("kill", "before_send"),
    Fault("kill", "during_exchange"),
    Fault("stop", "before_vote"),
    Fault("kill", "after_vote"),
    Fault("kill", "during_checkpoint"),
)
OF_A_DONOR = Fault("kill", "during_state_transfer")
OF_A_JOINER = Fault("stop", "during_fetch")
ENDORSED = 18  # round: a newcomer to an earlier one begins at the first weights, and replays results instead of a fetch


def test_every_point_has_a_fault() -> None:
    assert {fault.point for fault in (*OF_MEMBERS, OF_A_DONOR, OF_A_JOINER)} == set(ROUND_POINTS)


@pytest.mark.soak
@pytest.mark.process
async def test_a_fault_at_any_point_of_the_protocol(tmp_path: Path) -> None:
    async with open_swarm(tmp_path, min_peers=3 + len(OF_MEMBERS)) as swarm:
        healthy = [swarm.join("p0"), swarm.join("p1")]
        scripts = {fault: tmp_path / f"{fault.point}.script" for fault in (*OF_MEMBERS, OF_A_DONOR)}
        donor, *victims = (swarm.join(fault.point, fault=f"@{scripts[fault]}") for fault in (OF_A_DONOR, *OF_MEMBERS))
        await swarm.committed(1, *healthy)
        for fault, victim in zip(OF_MEMBERS, victims, strict=True):
            onlooker = Onlooker(swarm, healthy, timed=False)
            scripts[fault].write_text(str(fault))
            await fault.strikes(victim)
            await onlooker.check_the_others_go_on([victim])
        onlooker = Onlooker(swarm, healthy, timed=False)
        scripts[OF_A_DONOR].write_text(str(OF_A_DONOR))
        await strikes_a_donor(swarm, OF_A_DONOR, donor)
        await onlooker.check_the_others_go_on([donor])
        await swarm.committed(ENDORSED, *healthy)
        onlooker = Onlooker(swarm, healthy, timed=False)
        joiner = swarm.join("struck joiner", fault=str(OF_A_JOINER))
        await OF_A_JOINER.strikes(joiner)
        await onlooker.check_the_others_go_on([joiner])
