"""Eight real peers on hosts of their own while anything happens: kills, freezes, cuts of every kind, lost packets.

PEERS (8); MINUTES (30) of it; SOAK_SEED repeats the strikes.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import pytest
import trio

from tests.support.cuts import COORDINATOR, Cut, between, towards
from tests.support.lan_swarm import BACK_S, LanSwarm, now_s, open_lan_swarm
from tests.support.peer_process import PeerProcess
from tests.support.scorecard import scored

PEERS = int(os.environ.get("PEERS", "8"))
MINUTES = float(os.environ.get("MINUTES", "30"))
STRIKE_EVERY_S = 15.0  # on average; a strike is over before the next
STRUCK_S = (2.0, 20.0)
PAUSE_MAX_S = 60.0
STRIKES = (
    "kill",
    "freeze",
    "cut one off",
    "halve",
    "one is not heard",
    "two do not hear each other",
    "lose packets",
)


@dataclass
class Strikes:
    """Strikes at random, one after the other."""

    swarm: LanSwarm
    random: random.Random
    count: Counter[str] = field(default_factory=Counter)

    async def run(self, seconds: float) -> None:
        """Strike for so long; the last strike is over, and the peers that it has killed run again."""
        end = trio.current_time() + seconds
        while trio.current_time() < end:
            await trio.sleep(self.random.expovariate(1 / STRIKE_EVERY_S))
            await self._strike(self.random.choice(STRIKES))

    async def _strike(self, strike: str) -> None:
        self.count[strike] += 1
        struck_s = self.random.uniform(*STRUCK_S)
        victims = self.random.sample(self.swarm.peers, 2)
        if strike == "kill":
            await self._kill(victims, struck_s)
        elif strike == "freeze":
            for victim in victims:
                victim.freeze()
            await trio.sleep(struck_s)
            for victim in victims:
                victim.thaw()
        else:
            loss = self.random.uniform(0.02, 0.1) if strike == "lose packets" else 0.0
            await self.swarm.cut(*self._cuts(strike, [victim.name for victim in victims]), loss=loss)
            await trio.sleep(struck_s)
            await self.swarm.heal()

    async def _kill(self, victims: list[PeerProcess], struck_s: float) -> None:
        for victim in victims:
            victim.kill()
        await trio.sleep(struck_s)
        for victim in victims:
            since = victim.mark()
            self.swarm.swarm.restart(victim)
            await victim.wait_for("run_entered", since=since)  # a process takes its time to start

    def _cuts(self, strike: str, victims: list[str]) -> list[Cut]:
        everybody = [COORDINATOR, *self.swarm.names]
        first, second = victims
        match strike:
            case "cut one off":
                return between([first], [name for name in everybody if name != first])
            case "halve":
                half = self.random.sample(everybody, len(everybody) // 2)
                return between(half, [name for name in everybody if name not in half])
            case "one is not heard":
                return towards(first, everybody)
            case "two do not hear each other":
                return between([first], [second])
        return []


@pytest.mark.soak
@pytest.mark.process
async def test_churn_of_peers_and_links(tmp_path: Path) -> None:
    seed = int(os.environ.get("SOAK_SEED", random.SystemRandom().randrange(10**6)))
    print(f"\n{MINUTES:g} minutes; repeat these strikes with SOAK_SEED={seed}", flush=True)
    with scored("churn of peers and links") as card:
        async with open_lan_swarm(tmp_path, PEERS) as swarm:
            began = now_s()
            strikes = Strikes(swarm, random.Random(seed))
            await strikes.run(60 * MINUTES)
            over_at = now_s()
            card.at_most("seconds to the first commit of all", await swarm.first_commit_of_all(over_at), BACK_S)
            card.note("seconds to a commit with all members", await swarm.all_members(over_at))
            times = [began, *(commit.at for commit in swarm.commits(began))]
            card.note("minutes", MINUTES)
            card.note("strikes", strikes.count.total())
            card.note("rounds", len(times) - 1)
            card.at_most("longest pause of all, seconds", max(b - a for a, b in pairwise(times)), PAUSE_MAX_S)
            card.at_most("terms", len(swarm.terms()), 1)
            swarm.check()
