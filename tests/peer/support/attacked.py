"""A host in a process of its own under attack, seen by an honest peer in this one and by another in a third."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from libp2p.peer.id import ID
from multiaddr import Multiaddr

from peer.events import EventLog
from peer.identity import Identity
from peer.net.host import Host, open_host
from tests.peer.support.honest import HonestCaller, honest_caller
from tests.peer.support.host_child import COST, ECHO, Cost, Number
from tests.support.forking.children import executed, open_child


@asynccontextmanager
async def a_host() -> AsyncIterator[Host]:
    async with open_host(identity=Identity.generate(), events=EventLog()) as host:
        yield host


class Attacked:
    """The host under attack: its address, what it has used, how fast it answers an honest peer."""

    def __init__(self, address: str, honest: Host, caller: HonestCaller) -> None:
        self.address, _, self.peer_id = address.partition("/p2p/")
        self.port = int(self.address.split("/")[4])
        self._full_address = address
        self._honest = honest
        self.caller = caller

    async def cost(self) -> Cost:
        return (await self._honest.rpc.call(self.peer_id, COST, Number(0), timeout_s=60)).body

    async def cost_of(self, attack: Callable[[], Awaitable[None]]) -> Cost:
        """Return what an attack cost, beyond what it takes to ask for it."""
        before = await self.cost()
        await attack()
        after = await self.cost()
        return Cost(
            after.cpu_s - before.cpu_s,
            after.resident_bytes - before.resident_bytes,
            after.files - before.files,
            after.kept_addresses,
        )

    async def dial(self, attacker: Host) -> Any:
        """Return an authenticated connection of `attacker`, below its rpc."""
        network: Any = attacker.libp2p.get_network()
        return await network.dial_addr(Multiaddr(self.address), ID.from_base58(self.peer_id))

    async def still_serves(self) -> None:
        """Check that a new peer is served."""
        async with a_host() as newcomer:
            await newcomer.connect_address(self._full_address, timeout_s=60)
            assert (await newcomer.rpc.call(self.peer_id, ECHO, Number(7), timeout_s=60)).body == Number(8)


@asynccontextmanager
async def attacked_host() -> AsyncIterator[Attacked]:
    """Run a host in a child process, and an honest peer of it here."""
    async with AsyncExitStack() as stack:
        child = await stack.enter_async_context(open_child("tests.peer.support.host_child", start=executed))
        address = await child.line()
        honest = await stack.enter_async_context(a_host())
        await honest.connect_address(address, timeout_s=60)
        caller = await stack.enter_async_context(honest_caller(address))
        attacked = Attacked(address, honest, caller)
        await attacked.still_serves()  # warm
        yield attacked
