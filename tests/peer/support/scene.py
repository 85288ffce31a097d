"""A victim, attackers and an honest caller, each a process of its own: what the victim's memory and calls come to."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import trio

from peer.events import EventLog
from peer.net.host import Host, open_host
from tests.peer.support.honest import HonestCaller, Latency, honest_caller
from tests.peer.support.victim_child import FIGURES, HONEST, SLICE, TAKE, Figures, Text
from tests.support.forking.children import executed, open_child


class Scene:
    """The honest caller, and what it sees of the victim."""

    def __init__(self, host: Host, address: str, caller: HonestCaller) -> None:
        self.host, self.address, self.caller = host, address, caller
        self.victim = address.rpartition("/")[2]
        self.most = 0
        """The most resident memory seen."""

    async def figures(self) -> Figures:
        reply = await self.host.rpc.call(self.victim, FIGURES, Text(), timeout_s=60)
        self.most = max(self.most, reply.body.resident)
        return reply.body

    async def take_s(self) -> float:
        """Send one slice; return the seconds it took."""
        began = trio.current_time()
        await self.host.rpc.call(self.victim, TAKE, Text(), bytes(SLICE), timeout_s=60)
        return trio.current_time() - began

    @asynccontextmanager
    async def under(
        self, kind: str, peers: int, calls: int, module: str = "tests.peer.support.attack_child"
    ) -> AsyncIterator[Latency]:
        """Yield once the attackers hold all they can, with the latency of honest calls while they took it."""
        arguments = (self.address, kind, str(peers), str(calls))
        async with open_child(module, *arguments) as attackers:
            yield await self.caller.latency(attackers.line)


@asynccontextmanager
async def scene(*arguments: str, module: str = "tests.peer.support.victim_child") -> AsyncIterator[Scene]:
    """Run a victim, and connect honest callers to it."""
    async with (
        open_child(module, *arguments, start=executed) as victim,
        open_host(identity=HONEST, events=EventLog()) as host,
    ):
        address = await victim.line()
        await host.connect_address(address, timeout_s=60)
        async with honest_caller(address) as caller:
            yield Scene(host, address, caller)
