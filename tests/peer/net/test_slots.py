"""Strangers that hold connections of a host keep no member out, and no other stranger."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import pytest
import trio

from peer.events import EventLog
from peer.identity import Identity
from peer.net.host import Host, open_host
from peer.net.libp2p_fixes.inbound_limits import inbound_gate
from peer.net.limits import NetLimits
from peer.net.method import Call, Method
from tests.peer.net.test_rpc import ECHO, Number, echo

ENTER = Method("test/enter", Number, Number, access="open")
HELLO = Method("test/hello", Number, Number, access="open")
CONNECTIONS = 40  # 10 for strangers, 5 of them for 127.0.0.0/24
GROUP = 5
MEMBERS = 20


@asynccontextmanager
async def a_host(limits: NetLimits | None = None) -> AsyncIterator[Host]:
    async with open_host(Identity.generate(), EventLog(), limits=limits or NetLimits()) as host:
        yield host


@pytest.fixture
async def run() -> AsyncIterator[Host]:
    """A host of a run, which trusts the peers that have called `ENTER`."""
    async with a_host(NetLimits(connections=CONNECTIONS)) as host:

        async def enter(call: Call[Number]) -> Number:
            host.admissions.grant(call.peer, "member", trusted=True)
            return call.body

        host.admissions.guard()
        host.rpc.register(ENTER, enter)
        host.rpc.register(HELLO, echo)
        host.rpc.register(ECHO, echo)
        yield host


async def wait_connected(host: Host, peers: list[Host]) -> None:
    """Return once exactly these peers are connected."""
    with trio.fail_after(300):
        while host.connected != {peer.peer_id for peer in peers}:
            await trio.sleep(0.01)


async def test_members_enter_through_slots_full_of_strangers(run: Host) -> None:
    async with AsyncExitStack() as stack:
        strangers = [await stack.enter_async_context(a_host()) for _ in range(GROUP + 2)]
        for stranger in strangers:
            await stranger.connect_address(run.addresses[0], timeout_s=60)
        await wait_connected(run, strangers[2:])
        members = []
        for number in range(MEMBERS):
            member = await stack.enter_async_context(a_host())
            await member.connect_address(run.addresses[0], timeout_s=60)
            await member.rpc.call(run.peer_id, ENTER, Number(number), timeout_s=60)
            members.append(member)
            if number % 2:  # the strangers come back
                await strangers[number % len(strangers)].connect_address(run.addresses[0], timeout_s=60)
        for number, member in enumerate(members):
            assert run.peer_id in member.connected
            reply = await member.rpc.call(run.peer_id, ECHO, Number(number), timeout_s=60)
            assert reply.body == Number(number + 1)
        assert len(run.connected) <= MEMBERS + GROUP


async def test_a_new_stranger_displaces_the_one_idle_the_longest(run: Host) -> None:
    async with AsyncExitStack() as stack:
        strangers = [await stack.enter_async_context(a_host()) for _ in range(GROUP)]
        for stranger in strangers:
            await stranger.connect_address(run.addresses[0], timeout_s=60)
        await strangers[0].rpc.call(run.peer_id, HELLO, Number(0), timeout_s=60)
        newcomer = await stack.enter_async_context(a_host())
        await newcomer.connect_address(run.addresses[0], timeout_s=60)
        await wait_connected(run, [strangers[0], *strangers[2:], newcomer])


async def test_circuits_through_a_relay_share_its_slots(run: Host) -> None:
    class Circuit:
        """A muxed connection that a relay has passed on."""

        def __init__(self, peer: str) -> None:
            self.peer_id = peer
            self.last_used = trio.current_time()
            self.event_closed = trio.Event()

        def abort(self) -> None:
            self.event_closed.set()

    gate = inbound_gate(run.libp2p.get_network())
    circuits = [Circuit(Identity.generate().peer_id) for _ in range(GROUP + 1)]
    with trio.fail_after(300):
        async with trio.open_nursery() as nursery:
            for circuit in circuits:
                nursery.start_soon(gate.hold, circuit, "relay 1")
            while not any(circuit.event_closed.is_set() for circuit in circuits):
                await trio.lowlevel.checkpoint()
            assert sum(circuit.event_closed.is_set() for circuit in circuits) == 1
            nursery.cancel_scope.cancel()
