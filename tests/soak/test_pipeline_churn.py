"""Half an hour in which the peers of a pipeline are killed and others join, at random: the run goes on, peers move to
where they are needed, and no more than that.

SOAK_MINUTES (default 30) and SOAK_SEED (default: a random one, printed) come from the environment.
"""

from __future__ import annotations

import os
import random
import time
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Final

import pytest
import trio

from swarm.placement.rebalance import RebalanceConfig
from tests.support.peer_process import Fact
from tests.swarm.support.pipeline_run import STAGES, Pipeline, Replica, open_pipeline

pytestmark = [pytest.mark.soak, pytest.mark.process]

STRIKE_EVERY_S: Final = 20.0  # on average
OWNER_S: Final = 10.0  # after which an owner starts a peer again that the coordinator misses
LOOK_EVERY_S: Final = 2.0
PEERS_MIN, PEERS_MAX = 5, 8
PAUSE_MAX_S: Final = 120.0  # a stage may lose its last replica: somebody has to take it
REPORT_EVERY_S: Final = 60.0
OUTER: Final = '[outer]\nmethod = "diloco"\nsteps = 20'


class Churn:
    """Who lives is chosen at random, and so is what happens to them."""

    def __init__(self, pipeline: Pipeline, rng: random.Random) -> None:
        self._pipeline, self._random = pipeline, rng
        self._dead: dict[str, Replica] = {}
        self.strikes: Counter[str] = Counter()

    async def run(self) -> None:
        while True:
            await trio.sleep(self._random.expovariate(1 / STRIKE_EVERY_S))
            replicas = self._pipeline.replicas
            share = (len(replicas) - PEERS_MIN) / (PEERS_MAX - PEERS_MIN)
            if self._random.random() < share:
                victim = self._random.choice(replicas)
                replicas.remove(victim)
                self._dead[victim.peer.name] = victim
                victim.peer.kill()
                self.strikes["killed"] += 1
            else:
                self._pipeline.join()
                self.strikes["joined"] += 1

    async def revive(self) -> None:
        """Be the owners: start again the dead peers of a stage that the coordinator names, as it asks for, each a while
        after it was first named. In an open run it lets no survivor of many go on alone, which may lie."""
        coordinator = self._pipeline.swarm.coordinator
        while True:
            await trio.sleep(LOOK_EVERY_S)
            heads = {fact.fields["stage"]: fact.at for fact in coordinator.all("head_seen")}
            for lost in coordinator.all("quorum_lost"):
                if heads.get(lost.fields["stage"], 0.0) < lost.at < time.time() - OWNER_S:
                    self._revive(lost.fields["away"])

    def _revive(self, away: list[str]) -> None:
        names = {f.fields["peer"]: f.fields["name"] for f in self._pipeline.swarm.coordinator.all("member_joined")}
        for replica in [self._dead.pop(names[peer]) for peer in away if names.get(peer) in self._dead]:
            self._pipeline.swarm.restart(replica.peer)
            self._pipeline.replicas.append(replica)
            self.strikes["revived"] += 1


def moves(pipeline: Pipeline) -> dict[str, list[Fact]]:
    """By the peer that moved."""
    return {peer.name: found for peer in pipeline.all_peers() if (found := peer.all("move_started"))}


def thrashing(pipeline: Pipeline) -> list[str]:
    """Peers that went on to another stage, nobody's death compelling them, before they could have been of use."""
    stay_s = RebalanceConfig().stay_s
    return [
        f"{name} moved twice within {b.at - a.at:.0f} s"
        for name, found in moves(pipeline).items()
        for a, b in pairwise(found)
        if b.at - a.at < stay_s and b.fields["reason"] == "it is the slowest"
    ]


def report(pipeline: Pipeline, churn: Churn, since: float) -> str:
    found = [fact for facts in moves(pipeline).values() for fact in facts]
    reasons = Counter(str(fact.fields["reason"]) for fact in found)
    where = Counter(replica.stage for replica in pipeline.replicas)
    now = time.time()
    return (
        f"{(now - since) / 60:5.1f} min: {dict(churn.strikes)}, {len(found)} moves {dict(reasons)}, replicas"
        f" {[where[stage] for stage in range(STAGES)]}, {pipeline.completed(since, now)} micro-batches,"
        f" longest pause {pipeline.pause(since, now):.1f} s"
    )


async def test_moves_are_few_and_the_run_goes_on(tmp_path: Path) -> None:
    minutes = float(os.environ.get("SOAK_MINUTES", "30"))
    seed = int(os.environ.get("SOAK_SEED", random.SystemRandom().randrange(10**6)))
    print(f"\n{minutes:g} minutes of churn; repeat these strikes with SOAK_SEED={seed}", flush=True)
    async with open_pipeline(tmp_path, OUTER, [None] * 6) as pipeline:
        churn, since = Churn(pipeline, random.Random(seed)), time.time()
        end = since + 60 * minutes
        async with trio.open_nursery() as strikes:
            strikes.start_soon(churn.run)
            strikes.start_soon(churn.revive)
            while time.time() < end:
                await trio.sleep(min(REPORT_EVERY_S, max(0.0, end - time.time())))
                print(report(pipeline, churn, since), flush=True)
                assert not pipeline.forks() and not pipeline.twice()
                gone = [replica.peer.name for replica in pipeline.replicas if not replica.peer.alive]
                assert not gone, f"{gone} ended by themselves: {pipeline.swarm.peers[gone[0]].transcript()}"
            strikes.cancel_scope.cancel()
        count = sum(len(found) for found in moves(pipeline).values())
        assert count <= churn.strikes.total(), "more moves than there was reason for"
        assert not thrashing(pipeline)
        assert pipeline.pause(since, time.time()) <= PAUSE_MAX_S
