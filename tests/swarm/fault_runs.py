"""What must hold after a peer was struck, wherever and however."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from tests.swarm.swarm_harness import PeerProcess, Swarm

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

    async def strikes(self, victim: PeerProcess, timeout_s: float = 120.0) -> None:
        """Until it has."""
        if self.signal == "kill":
            assert await victim.wait_exit(timeout_s) == -9, victim.story()
        else:
            await victim.wait_stopped(timeout_s)


class Onlooker:
    """Counts what the `healthy` lose to one strike, from now on."""

    def __init__(self, swarm: Swarm, healthy: Sequence[PeerProcess]) -> None:
        self._swarm = swarm
        self._healthy = healthy
        self._discarded = [len(peer.all("round_discarded")) for peer in healthy]

    async def more_rounds(self, count: int = 2) -> None:
        """Until all the healthy have committed `count` further rounds."""
        await self._swarm.committed(max(peer.round for peer in self._healthy) + count, *self._healthy)

    async def check_the_others_go_on(self, victims: Sequence[PeerProcess]) -> None:
        """Call it right after the strike. The frozen among the victims are thawed, and must come back, at the end."""
        struck_at = time.time()
        await self.more_rounds()
        for peer, before in zip(self._healthy, self._discarded, strict=True):
            assert len(peer.all("round_discarded")) - before <= 1, peer.story()
            assert peer.longest_pause(struck_at) <= FREEZE_COSTS_S, peer.story()
        frozen = [victim for victim in victims if victim.alive]
        if frozen:
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
            assert all(s <= ROUND_TAKES_S for s in sorted(peer.pauses(since))[:-1]), f"delayed again\n{peer.story()}"
