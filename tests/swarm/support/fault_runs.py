"""What must hold after a fault at any peer and at any point."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count

import trio

from tests.support.peer_process import PeerProcess
from tests.swarm.support.swarm_harness import Swarm

FREEZE_COSTS_S = 15.0
ROUND_TAKES_S = 5.0  # at most, once the frozen peers are left out


@dataclass(frozen=True)
class Fault:
    """A fault: `signal` (kill or stop) at a point of `peer.faults`, in the first round >= `round` that reaches it."""

    signal: str
    point: str
    round: int = 0

    def __str__(self) -> str:
        return f"{self.signal}:{self.point}:{self.round}"

    async def strikes(self, victim: PeerProcess, timeout_s: float = 300.0) -> None:
        """Wait until the fault has hit the victim."""
        if self.signal == "kill":
            assert await victim.wait_exit(timeout_s) == -9, victim.transcript()
        else:
            await victim.wait_stopped(timeout_s)


async def strikes_a_donor(swarm: Swarm, fault: Fault, donor: PeerProcess) -> None:
    """Start joiners one after another until one asks `donor`: others may serve a small state completely."""
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_joiners_come, swarm)
        await fault.strikes(donor)
        nursery.cancel_scope.cancel()


async def _joiners_come(swarm: Swarm) -> None:
    for number in count():
        joiner = swarm.join(f"joiner{number}")
        await joiner.wait_for("state_fetched")
        joiner.interrupt()  # many joiners would slow the other peers
        await joiner.wait_exit()


class Onlooker:
    """Counts what the `healthy` peers lose to one fault. With `timed` it also checks how long that takes, which needs
    an otherwise idle machine."""

    def __init__(self, swarm: Swarm, healthy: Sequence[PeerProcess], timed: bool) -> None:
        self._swarm = swarm
        self._healthy = healthy
        self._timed = timed
        self._discarded = [len(peer.all("round_discarded")) for peer in healthy]

    async def more_rounds(self, count: int = 2) -> None:
        """Wait until all healthy peers have committed `count` more rounds."""
        await self._swarm.committed(max(peer.round for peer in self._healthy) + count, *self._healthy)

    async def check_the_others_go_on(self, victims: Sequence[PeerProcess]) -> None:
        """Check right after the fault that the others go on. Frozen victims are thawed and must come back."""
        struck_at = time.time()
        await self.more_rounds()
        for peer, before in zip(self._healthy, self._discarded, strict=True):
            assert len(peer.all("round_discarded")) - before <= 1, peer.transcript()
            assert not self._timed or peer.longest_pause(struck_at) <= FREEZE_COSTS_S, peer.transcript()
        frozen = [victim for victim in victims if victim.alive]
        if frozen and self._timed:
            await self._check_no_second_delay()
        for victim in frozen:
            victim.thaw()
            await victim.wait_for("round_committed", since=victim.mark())
        self._swarm.check_agreement()

    async def _check_no_second_delay(self) -> None:
        """A peer that is waited for again delays every round; a machine that stands still once delays one."""
        since = time.time()
        await self.more_rounds(3)
        for peer in self._healthy:
            assert all(s <= ROUND_TAKES_S for s in sorted(peer.pauses(since))[:-1]), (
                f"delayed again\n{peer.transcript()}"
            )
