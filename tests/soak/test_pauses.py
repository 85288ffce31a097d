"""Owners who take their machines back for a while, in real processes."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
import trio

from swarm.membership.membership import REFRESH_S, TTL_S
from swarm.run.owners_pause import PauseRequest, write_request
from tests.support.peer_process import PeerProcess
from tests.swarm.support.pipeline_run import open_pipeline
from tests.swarm.support.swarm_harness import Swarm, open_swarm

pytestmark = [pytest.mark.soak, pytest.mark.process]


def pause(peer: PeerProcess) -> None:
    write_request(peer.home / "paused", PauseRequest())


def resume(peer: PeerProcess) -> None:
    (peer.home / "paused").unlink()


async def gone(pid: int, timeout_s: float) -> float:
    """Wait until a process has ended; the time that it took."""
    began = time.monotonic()
    with trio.fail_after(timeout_s):
        while os.path.exists(f"/proc/{pid}"):
            await trio.sleep(0.02)
    return time.monotonic() - began


def contributions_of(swarm: Swarm, paused: PeerProcess, first: int) -> list[int]:
    """Return the rounds from `first` on in which that peer had trained."""
    return [
        int(fact.fields["round"])
        for fact in paused.all("round_committed")
        if int(fact.fields["round"]) >= first and int(fact.fields.get("steps") or 0) > 0
    ]


async def test_a_machine_is_given_back_and_comes_again(tmp_path: Path) -> None:
    async with open_swarm(tmp_path, min_peers=3, steps=40) as swarm:
        peers = [swarm.join(f"p{number}") for number in range(3)]
        *working, paused = peers
        await swarm.committed(3, *peers)
        pid = int(paused.all("worker_ready")[-1].fields["pid"])
        mark = paused.mark()
        pause(paused)
        took_s = await gone(pid, 10.0)
        assert took_s < 2.5, "half a second until it looks, and two to be gone"
        await paused.wait_for("peer_paused", lambda fields: "peer pause" in fields["reason"], mark)
        at = working[0].round
        await working[0].wait_for("round_committed", lambda fields: fields["members"] == 2, working[0].mark())
        assert working[0].round <= at + 8, "two rounds under different leaders, by the hash of a head"
        await swarm.committed(working[0].round + 2, *peers)

        paused.interrupt()
        await paused.wait_exit()
        mark = paused.mark()
        swarm.restart(paused)
        await paused.wait_for("peer_paused", since=mark)
        await swarm.committed(working[0].round + 1, *peers)
        assert not [fact for fact in paused.facts[mark:] if fact.name == "worker_ready"]

        mark = paused.mark()
        resume(paused)
        await paused.wait_for("worker_ready", since=mark)
        since = working[0].round
        await paused.wait_for("round_committed", lambda fields: (fields.get("steps") or 0) > 0, mark)
        assert contributions_of(swarm, paused, since)[0] <= since + 3
        await working[0].wait_for("round_committed", lambda fields: fields["members"] == 3, working[0].mark())
        swarm.check_agreement()


GOSSIP = """
[outer]
method = "gossip"
steps = 20
"""


async def test_a_peer_of_a_gossip_run_rests_and_catches_up(tmp_path: Path) -> None:
    async with open_swarm(tmp_path, min_peers=3, outer=GOSSIP) as swarm:
        peers = [swarm.join(f"p{number}") for number in range(3)]
        *working, paused = peers
        for peer in peers:
            await peer.wait_for("gossip_met")
        pid = int(paused.all("worker_ready")[-1].fields["pid"])
        pause(paused)
        assert await gone(pid, 10.0) < 2.5
        await trio.sleep(TTL_S + REFRESH_S)  # what it said of itself before is believed by no peer any more
        rounds = len(paused.all("gossip_met"))
        for peer in working:
            await peer.wait_for("gossip_met", since=peer.mark())
        assert len(paused.all("gossip_met")) == rounds
        mark = paused.mark()
        resume(paused)
        await paused.wait_for("gossip_met", since=mark)


LOCAL = '[outer]\nmethod = "diloco"\nsteps = 20'
SYNCHRONOUS = '[outer]\nmethod = "allreduce"\nbatch = 64'


@pytest.mark.parametrize("outer", [LOCAL, SYNCHRONOUS], ids=["local", "synchronous"])
async def test_a_replica_of_a_pipeline_is_given_back_and_comes_again(tmp_path: Path, outer: str) -> None:
    async with open_pipeline(tmp_path, outer, [0, 0, 1, 1, 2, 2]) as pipeline:
        await pipeline.whole(timeout_s=240.0)
        paused = pipeline.of(1)[1]
        pid = int(paused.peer.all("worker_ready")[-1].fields["pid"])
        mark = paused.peer.mark()
        pause(paused.peer)
        assert await gone(pid, 10.0) < 2.5
        await paused.peer.wait_for("peer_paused", since=mark)
        since = time.time()
        await pipeline.until(lambda: pipeline.advanced(since), "the run goes on", 180)
        mark = paused.peer.mark()
        resume(paused.peer)
        opened = await paused.peer.wait_for("replica_opened", since=mark)
        assert opened.fields["stage"] == 1, "it has kept its place"
        since = time.time()
        await pipeline.until(lambda: pipeline.advanced(since), "the run goes on", 180)
        await paused.peer.wait_for("round_committed", since=paused.peer.mark())
        assert not pipeline.twice() and not pipeline.forks()
