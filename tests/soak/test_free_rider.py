"""What free-riders cost: peers that take their full share of every round and do none of the work.

By itself a run detects none: its update has a plausible norm and its word is signed. The gate of the merge leaves out
zeros, and no more. So these are the documented costs. ROUNDS (60) of each run.

With `check_by_loss` a member whose updates do not help is put out: here one that flips their sign.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from peer.identity import Identity
from swarm.run.home import Home
from tests.support.free_rider import FLIPPED, KIND_VARIABLE, KINDS
from tests.support.lan_swarm import RUN_TOML
from tests.support.process_group import Launch
from tests.support.scorecard import Scorecard
from tests.swarm.support.swarm_harness import open_swarm

PEERS = 8
ROUNDS = int(os.environ.get("ROUNDS", "60"))
OUTER = "[outer]\nsteps = 20\ncheck_by_loss = 1.0"
MEMBERS = 4
PUT_OUT_S = 400.0


async def last_loss(folder: Path, honest: int, riders: int, kind: str = "") -> float:
    """Return the held-out loss after the last round of a run with so many of both."""
    folder.mkdir()
    toml = RUN_TOML.replace("MODE", "witness")

    def launch(name: str) -> Launch:
        if not name.startswith("rider"):
            return Launch()
        return Launch(module="tests.support.free_rider", environment={KIND_VARIABLE: kind})

    async with open_swarm(folder, rounds=ROUNDS, min_peers=honest + riders, run=toml, launch=launch) as swarm:
        peers = [swarm.join(f"p{number}") for number in range(honest)]
        peers += [swarm.join(f"rider{number}") for number in range(riders)]
        for peer in peers:
            await peer.wait_for("run_finished", timeout_s=3600.0)
        swarm.check_agreement()
        told = [fact for peer in peers for fact in peer.all("val_evaluated") if fact.fields["round"] == ROUNDS]
        return float(told[-1].fields["loss"])


@pytest.mark.soak
@pytest.mark.process
@pytest.mark.parametrize("riders", [1, 2])
async def test_free_riders_cost_no_more_than_their_share(tmp_path: Path, riders: int) -> None:
    honest = PEERS - riders
    card = Scorecard(f"{riders} of {PEERS} ride free")
    card.note("rounds", ROUNDS)
    alone = await last_loss(tmp_path / "alone", honest, 0)
    card.note(f"loss of {honest} honest alone", alone)
    for kind in KINDS:
        loss = await last_loss(tmp_path / kind, honest, riders, kind)
        card.at_most(f"loss with {kind}, times that", loss / alone, PEERS / honest)
    card.tell()
    assert not card.missed(), card.missed()


def launch(name: str) -> Launch:
    if name != "vandal":
        return Launch()
    return Launch(module="tests.support.free_rider", environment={KIND_VARIABLE: FLIPPED})


@pytest.mark.soak
@pytest.mark.process
async def test_a_member_that_flips_the_sign_is_found_and_put_out(tmp_path: Path) -> None:
    async with open_swarm(tmp_path, min_peers=MEMBERS, outer=OUTER, launch=launch) as swarm:
        honest = [swarm.join(f"p{number}") for number in range(MEMBERS - 1)]
        vandal = swarm.join("vandal")
        await swarm.committed(1, *honest, vandal)
        name = Identity.load_or_create(Home(vandal.home).identity).peer_id
        for peer in honest:
            await peer.wait_for("round_committed", lambda fields: fields["members"] == MEMBERS)
        for peer in honest:
            await peer.wait_for("round_committed", lambda fields: fields["members"] < MEMBERS, peer.mark(), PUT_OUT_S)
        judged = [fact.fields for peer in honest for fact in peer.all("contribution_judged")]
        assert {fields["peer"] for fields in judged if fields["left_out"]} == {name}
        assert len([peer for peer in honest if any(f.fields["left_out"] for f in peer.all("contribution_judged"))]) >= 2
        assert all(peer.alive for peer in swarm.processes())
        assert not [fact for peer in honest for fact in peer.all("loss_check_failed")]
