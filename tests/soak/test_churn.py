"""Half an hour of churn: peers are killed, started and frozen all the time; the run goes on, unforked and unswollen.

SOAK_MINUTES (default 30) and SOAK_SEED (default: a random one, printed) come from the environment.
"""

from __future__ import annotations

import os
import random
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import pytest
import trio

from tests.support.peer_process import PeerProcess
from tests.support.process_weight import ProcessWeight
from tests.swarm.support.swarm_harness import Swarm, open_swarm

STRIKE_EVERY_S = 2.0  # on average
PEERS_MIN, PEERS_MAX = 2, 7  # alive and not frozen; alive
FROZEN_MAX = 2
FROZEN_S = (1.0, 15.0)
REST_S = 10.0  # before the same peer is frozen again: at times it alone holds the run's state
OWNER_S = 10.0  # after which an owner starts a peer again that the run cannot go on without
PAUSE_MAX_S = 60.0
SAMPLE_EVERY_S = 2.0
WARM_UP_SHARE = 0.15  # of the time: the peers the others come and go around have met everybody by then
RSS_GROWTH_MAX = 0.05  # of the early quarter's median, and
RSS_GROWTH_MAX_BYTES = 12e6  # this much: the allocator's arenas
FILES_GROWTH_MAX = 8  # connections to a few peers more than then
REPORT_EVERY_S = 30.0


@dataclass
class Churn:
    """Strikes a swarm at random. `veterans` are frozen now and then, but never killed."""

    swarm: Swarm
    veterans: list[PeerProcess]
    random: random.Random
    strikes: Counter[str] = field(default_factory=Counter)
    frozen: dict[PeerProcess, float] = field(default_factory=dict)
    resting: dict[PeerProcess, float] = field(default_factory=dict)

    async def run(self) -> None:
        while True:
            await trio.sleep(self.random.expovariate(1 / STRIKE_EVERY_S))
            self._strike()

    async def thaw_in_time(self) -> None:
        while True:
            await trio.sleep(0.1)
            for peer, until in list(self.frozen.items()):
                if trio.current_time() > until:
                    peer.thaw()
                    del self.frozen[peer]
                    self.resting[peer] = trio.current_time() + REST_S

    async def revive(self) -> None:
        """Be the owners: start again the dead peers that the coordinator names, as it asks for, each a while after it
        was first named. By itself it lets no survivor of many go on alone, nor goes back to a round before that of
        members that are all gone."""
        while True:
            await trio.sleep(SAMPLE_EVERY_S)
            last_commit = commit_times(self.swarm)[-1]
            for lost in self.swarm.coordinator.all("quorum_lost"):
                if last_commit < lost.at < time.time() - OWNER_S:
                    self._revive(lost.fields["away"])

    def _revive(self, away: list[str]) -> None:
        names = {fact.fields["peer"]: fact.fields["name"] for fact in self.swarm.coordinator.all("member_joined")}
        for peer in (self.swarm.peers[names[peer]] for peer in away):
            if not peer.alive:
                self.swarm.restart(peer)
                self.strikes["revive"] += 1

    def _strike(self) -> None:
        alive = list(self.swarm.living())
        awake = [peer for peer in alive if peer not in self.frozen]
        victims = [peer for peer in alive if peer not in self.veterans]
        choices = []
        if len(alive) < PEERS_MAX:
            choices += ["start"] * (PEERS_MAX - len(alive))
        if len(awake) > PEERS_MIN and victims:
            choices += ["kill"] * (len(awake) - PEERS_MIN)
            if len(self.frozen) < FROZEN_MAX:
                choices.append("freeze")
        self._do(self.random.choice(choices), awake, victims)

    def _do(self, strike: str, awake: list[PeerProcess], victims: list[PeerProcess]) -> None:
        dead = [peer for peer in self.swarm.peers.values() if not peer.alive]
        if strike == "start" and dead and self.random.random() < 0.7:
            strike = "restart"
            self.swarm.restart(self.random.choice(dead))
        elif strike == "start":
            self.swarm.join(f"p{len(self.swarm.peers)}")
        elif strike == "kill":
            victim = self.random.choice(victims)
            self.frozen.pop(victim, None)
            victim.kill()
        else:
            rested = [peer for peer in awake if self.resting.get(peer, 0.0) < trio.current_time()]
            if not rested:
                return
            victim = self.random.choice(rested)
            victim.freeze()
            self.frozen[victim] = trio.current_time() + self.random.uniform(*FROZEN_S)
        self.strikes[strike] += 1


def commit_times(swarm: Swarm) -> list[float]:
    """When each round was first reported as committed by anybody."""
    first: dict[tuple[int, int], float] = {}
    for peer in swarm.peers.values():
        for fact in peer.commits:
            place = (fact.fields["term"], fact.fields["round"])
            first[place] = min(fact.at, first.get(place, fact.at))
    return sorted(first.values())


def longest_pause(times: list[float]) -> float:
    """The one that is going on counts too."""
    return max((b - a for a, b in pairwise([*times, time.time()])), default=float("inf"))


def counters(swarm: Swarm, name: str) -> object:
    """The last that a peer has told of them: what only grows has leaked."""
    lasting = {peer.name: peer for peer in (swarm.coordinator, *swarm.peers.values())}
    told = lasting[name].all("connections_counted")
    return told[-1].fields["counts"] if told else "not told yet"


def report(churn: Churn, weights: dict[str, ProcessWeight]) -> Iterator[str]:
    times = commit_times(churn.swarm)
    terms = max((term for term, _ in churn.swarm.hashes()), default=0)
    pause, strikes = longest_pause(times), dict(churn.strikes)
    yield f"{len(times)} commits, {terms} terms, longest pause {pause:.1f} s, strikes {strikes}"
    for name, weight in weights.items():
        early, late = weight.early_and_late(weight.rss, WARM_UP_SHARE)
        few, many = weight.early_and_late(weight.files, WARM_UP_SHARE)
        yield f"  {name}: memory {early / 1e6:.1f} -> {late / 1e6:.1f} MB, open files {few:g} -> {many:g}"
        yield f"    counters of its connections: {counters(churn.swarm, name)}"


@pytest.mark.soak
@pytest.mark.process
async def test_churn(tmp_path: Path) -> None:
    minutes = float(os.environ.get("SOAK_MINUTES", "30"))
    seed = int(os.environ.get("SOAK_SEED", random.SystemRandom().randrange(10**6)))
    print(f"\n{minutes:g} minutes of churn; repeat these strikes with SOAK_SEED={seed}", flush=True)
    async with open_swarm(tmp_path) as swarm:
        veterans = [swarm.join("veteran")]
        swarm.join("p1")
        await swarm.committed(2)
        churn = Churn(swarm, veterans, random.Random(seed))
        lasting = [swarm.coordinator, *veterans]
        weights = {peer.name: ProcessWeight() for peer in lasting}
        end = trio.current_time() + 60 * minutes
        next_report = trio.current_time() + REPORT_EVERY_S
        async with trio.open_nursery() as strikes:
            strikes.start_soon(churn.run)
            strikes.start_soon(churn.thaw_in_time)
            strikes.start_soon(churn.revive)
            while trio.current_time() < end:
                await trio.sleep(SAMPLE_EVERY_S)
                for peer in lasting:
                    weights[peer.name].sample(peer.process.pid)
                swarm.check_agreement()
                if trio.current_time() > next_report:
                    next_report += REPORT_EVERY_S
                    print("\n".join(report(churn, weights)), flush=True)
            strikes.cancel_scope.cancel()
        for peer in list(churn.frozen):
            peer.thaw()
        print("\n".join(report(churn, weights)), flush=True)
        swarm.check_agreement()
        assert longest_pause(commit_times(swarm)) <= PAUSE_MAX_S, swarm.transcript()
        for name, weight in weights.items():
            early, late = weight.early_and_late(weight.rss, WARM_UP_SHARE)
            assert late - early <= max(RSS_GROWTH_MAX * early, RSS_GROWTH_MAX_BYTES), f"{name}'s memory grows"
            few, many = weight.early_and_late(weight.files, WARM_UP_SHARE)
            assert many - few <= FILES_GROWTH_MAX, f"{name}'s open files grow"
