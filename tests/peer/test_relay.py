from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import trio
from libp2p.connection_types import ConnectionType
from libp2p.peer.id import ID
from libp2p.relay.circuit_v2 import CircuitV2Protocol, RelayLimits
from libp2p.tools.anyio_service import background_trio_service

from peer.errors import DialError
from peer.events import EventLog
from peer.host import Host, HostConfig, open_host
from peer.identity import Identity
from tests.peer.test_rpc import ECHO, Facts, Number, echo

LIMITS = RelayLimits(duration=3600, data=1 << 30, max_circuit_conns=8, max_reservations=8)


@asynccontextmanager
async def relay() -> AsyncIterator[Host]:
    async with (
        open_host(HostConfig(identity=Identity.generate(), events=EventLog())) as host,
        background_trio_service(CircuitV2Protocol(host.libp2p, limits=LIMITS, allow_hop=True)),
    ):
        yield host


@asynccontextmanager
async def hidden(relay_address: str) -> AsyncIterator[tuple[Host, str]]:
    """A host that is known by its circuit address only, and that address."""
    log = EventLog()
    facts = Facts(log)
    identity = Identity.generate()
    async with open_host(HostConfig(identity=identity, events=log, relays=(relay_address,))) as host:
        host.rpc.serve(ECHO, echo)
        await facts.wait("relay_reserved")
        yield host, f"{relay_address}/p2p-circuit/p2p/{identity.peer_id}"


async def test_a_peer_is_reached_through_its_relay() -> None:
    async with relay() as r, hidden(r.addresses[0]) as (b, circuit):
        assert circuit in b.addresses
        async with open_host(HostConfig(identity=Identity.generate(), events=EventLog())) as a:
            with trio.fail_after(20):
                await a.connect_address(circuit, timeout_s=10)
            (connection,) = a.libp2p.get_network().get_connections(ID.from_base58(b.peer_id))[:1]
            assert connection.get_connection_type() == ConnectionType.RELAYED
            reply = await a.rpc.call(b.peer_id, ECHO, Number(1), bytes(1 << 20), timeout_s=10)
            assert reply.payload.nbytes == 1 << 20
            assert circuit.partition("/p2p/" + b.peer_id)[0] in a.book.get(b.peer_id)


async def test_without_a_place_at_the_relay_the_dial_says_so() -> None:
    async with relay() as r, open_host(HostConfig(identity=Identity.generate(), events=EventLog())) as a:
        absent = Identity.generate().peer_id
        with pytest.raises(DialError):
            await a.connect_address(f"{r.addresses[0]}/p2p-circuit/p2p/{absent}", timeout_s=10)


async def test_a_lost_relay_is_no_address_until_it_is_back() -> None:
    log = EventLog()
    facts = Facts(log)
    async with open_host(HostConfig(identity=Identity.generate(), events=log)) as b:
        assert not any("p2p-circuit" in address for address in b.addresses)
    async with relay() as r:
        config = HostConfig(identity=Identity.generate(), events=log, relays=r.addresses)
        async with open_host(config) as b:
            await facts.wait("relay_reserved")
            await r.disconnect(b.peer_id)
            await facts.wait("relay_lost")
            with trio.fail_after(20):
                while not any("p2p-circuit" in address for address in b.addresses):
                    await trio.sleep(0.05)
