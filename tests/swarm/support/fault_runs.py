"""What must hold after a peer was struck, wherever and however."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count

import trio

from tests.swarm.support.swarm_harness import PeerProcess, Swarm

FREEZE_COSTS_S = 15.0
ROUND_TAKES_S = 5.0  # at the most, once the frozen are left out


@dataclass(frozen=True)
class Fault:
    """`signal`: kill or stop, at a point of `peer.faults`, in the first round >= `round` that gets there."""

    signal: str
    point: str
    round: int = 0

    def __str__(self) -> str:
        return f"{self.signal}:{self.point}:{self.round}"

    async def strikes(self, victim: PeerProcess, timeout_s: float = 300.0) -> None:
        """Until it has."""
        if self.signal == "kill":
            assert await victim.wait_exit(timeout_s) == -9, victim.scenario()
        else:
            await victim.wait_stopped(timeout_s)


async def strikes_a_donor(swarm: Swarm, fault: Fault, donor: PeerProcess) -> None:
    """Joiners come, one after another, until one asks `donor`: a small state may come whole from the others."""
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_joiners_come, swarm)
        await fault.strikes(donor)
        nursery.cancel_scope.cancel()


async def _joiners_come(swarm: Swarm) -> None:
    for number in count():
        joiner = swarm.join(f"joiner{number}")
        await joiner.wait_for("state_fetched")
        joiner.interrupt()  # a crowd would take the processor from the others
        await joiner.wait_exit()


class Onlooker:
    """Counts what the `healthy` lose to one strike, from now on. `timed`: and how long it takes them, which is for a
    machine that does nothing else."""

    def __init__(self, swarm: Swarm, healthy: Sequence[PeerProcess], timed: bool) -> None:
        self._swarm = swarm
        self._healthy = healthy
        self._timed = timed
        self._discarded = [len(peer.all("round_discarded")) for peer in healthy]

    async def more_rounds(self, count: int = 2) -> None:
        """Until all the healthy have committed `count` further rounds."""
        await self._swarm.committed(max(peer.round for peer in self._healthy) + count, *self._healthy)

    async def check_the_others_go_on(self, victims: Sequence[PeerProcess]) -> None:
        """Call it right after the strike. The frozen among the victims are thawed, and must come back, at the end."""
        struck_at = time.time()
        await self.more_rounds()
        for peer, before in zip(self._healthy, self._discarded, strict=True):
            assert len(peer.all("round_discarded")) - before <= 1, peer.scenario()
            assert not self._timed or peer.longest_pause(struck_at) <= FREEZE_COSTS_S, peer.scenario()
        frozen = [victim for victim in victims if victim.alive]
        if frozen and self._timed:
            await self._check_nobody_waits_twice()
        for victim in frozen:
            victim.thaw()
            await victim.wait_for("round_committed", since=victim.mark())
        self._swarm.check_agreement()
        self._swarm.check_chain()

    async def _check_nobody_waits_twice(self) -> None:
        """Whoever is waited for again costs every round; a machine that stands still for once costs one."""
        since = time.time()
        await self.more_rounds(3)
        for peer in self._healthy:
            assert all(s <= ROUND_TAKES_S for s in sorted(peer.pauses(since))[:-1]), f"delayed again\n{peer.scenario()}"
