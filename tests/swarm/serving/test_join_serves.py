"""A peer that trains and serves at the same time, as a real process, and a client in this one."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from swarm.inference.client import open_model
from swarm.run.invite import Invite
from tests.support.forking.command import peer_meanwhile
from tests.support.peer_process import PeerProcess
from tests.swarm.serving.served_run import ask, compared
from tests.swarm.support.swarm_harness import open_swarm

pytestmark = pytest.mark.process


def rounds_served(peer: PeerProcess) -> set[int]:
    return {fact.fields["round"] for fact in peer.all("commit_served")}


async def served_round(peer: PeerProcess) -> int:
    """Return the last round of a peer that commits no more, once it serves that."""
    await peer.until(lambda: peer.round in rounds_served(peer), f"service of round {peer.round}")
    return peer.round


async def test_a_peer_that_trains_answers_with_the_commits_that_it_makes(tmp_path: Path) -> None:
    """The answer to the last one has the tokens of that commit's export."""
    async with open_swarm(tmp_path) as swarm:
        both, other = swarm.join("both", "--serve"), swarm.join("other")
        await both.wait_for("commit_served", where=lambda fields: fields["round"] > 0)
        answered: set[int] = set()
        async with open_model(Invite.parse(swarm.invite.read_text())) as model:
            while len(answered) < 2:
                answered.add((await ask(model, 65)).round)
                await both.wait_for("commit_served", since=both.mark())
            other.kill()  # of two members the one that is left commits nothing
            await swarm.coordinator.wait_for("quorum_lost")
            last = await served_round(both)
            while (found := await ask(model, 65)).round < last:
                await model.servers.refresh(0.0)
        rounds = [fact.fields["round"] for fact in both.commits]
        assert rounds == sorted(rounds) and len(rounds) >= 3, "it trains on"
        assert not both.all("commit_unserved") and not both.all("worker_died")
        both.process.send_signal(signal.SIGINT)
        assert await both.wait_exit() == 130
        folder = tmp_path / "model"
        done = await peer_meanwhile("export", "--home", both.home, "--out", folder)
        assert done.returncode == 0, done.stderr
        assert found.round == last == both.round
    assert compared([found], {last: folder}) == (1, 0)
