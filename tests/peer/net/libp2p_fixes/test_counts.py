"""What ends is counted no longer: after handshakes, dials, connections and streams that were cancelled all is at 0.

The caps are lowered, the library's own too, so that a count which does not go down is reached at once.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import libp2p.rcmgr
import pytest
import trio
import trio.testing
from libp2p.custom_types import TProtocol
from libp2p.peer.id import ID
from libp2p.rcmgr.manager import ResourceLimits, ResourceManager

from peer.errors import DialError
from peer.events import Event, EventLog
from peer.identity import Identity
from peer.net.connection_counts import TELL_S, ConnectionCounts
from peer.net.host import Host, open_host
from peer.net.libp2p_fixes import inbound_limits
from peer.net.libp2p_fixes.peer_cleanup import OnConnections
from peer.net.limits import NetLimits
from tests.peer.net.test_rpc import ECHO, Number, echo
from tests.support.silence import connect_here_and_there, dial_silently, emptied, silent_port

CONNECTIONS = 30
BEYOND = 70


@pytest.fixture(autouse=True)
def small_caps(monkeypatch: pytest.MonkeyPatch) -> None:
    def small() -> ResourceManager:
        return ResourceManager(limits=ResourceLimits(max_connections=CONNECTIONS))

    monkeypatch.setattr(libp2p.rcmgr, "new_resource_manager", small)
    monkeypatch.setattr(inbound_limits, "HANDSHAKES_PER_GROUP_MAX", 1)  # each newer one cancels the one before


@asynccontextmanager
async def a_host(events: EventLog | None = None, **limits: Any) -> AsyncIterator[Host]:
    caps = NetLimits(connections=CONNECTIONS, **limits)
    async with open_host(identity=Identity.generate(), events=events or EventLog(), limits=caps) as host:
        host.rpc.register(ECHO, echo)
        yield host


async def test_silent_sockets_beyond_every_cap_leave_nothing_counted() -> None:
    async with a_host() as victim, a_host() as other:
        for _ in range(4):  # a cap that is reached has some refused at once, which leave nothing counted
            await dial_silently(victim, BEYOND)
        await connect_here_and_there(victim, other)
        await emptied(victim)
        await emptied(other)


async def test_dials_that_lose_a_race_leave_nothing_counted() -> None:
    async with a_host(dial_stagger_s=0.0) as dialler, a_host() as other:
        with silent_port() as port:
            dialler.book.add(other.peer_id, [f"/ip4/127.0.0.1/tcp/{port}", *other.addresses])
            for _ in range(BEYOND // 2):
                await dialler.connect(other.peer_id, timeout_s=60)
                await dialler.disconnect(other.peer_id)
        await connect_here_and_there(dialler, other)
        await emptied(dialler)
        await emptied(other)


async def test_dials_that_time_out_leave_nothing_counted() -> None:
    async with a_host(dial_timeout_s=0.05) as dialler, a_host() as other:
        with silent_port() as port:

            async def dial() -> None:
                with pytest.raises(DialError, match="no answer in time"):
                    await dialler.connect_address(
                        f"/ip4/127.0.0.1/tcp/{port}/p2p/{Identity.generate().peer_id}", timeout_s=60
                    )

            for _ in range(2):
                async with trio.open_nursery() as nursery:
                    for _ in range(CONNECTIONS):
                        nursery.start_soon(dial)
        await emptied(dialler)
        await connect_here_and_there(dialler, other, dials_back=False)  # its own dials have no time to succeed
        await emptied(other)


async def test_connections_whose_close_is_cancelled_are_forgotten() -> None:
    async with a_host() as one, a_host() as other:
        gone: list[ID] = []
        network = one.libp2p.get_network()
        network.register_notifee(OnConnections(lambda peer: None, gone.append))
        for _ in range(CONNECTIONS + 1):
            await one.connect_address(other.addresses[0], timeout_s=60)
            (connection,) = network.get_connections()
            with trio.CancelScope() as cancelled:
                cancelled.cancel()
                await connection.close()
            assert network.get_connections() == []
            assert str(gone.pop()) == other.peer_id and not gone
        await connect_here_and_there(one, other)
        await emptied(one)
        await emptied(other)


async def test_streams_whose_opening_is_cancelled_are_forgotten() -> None:
    waiting = trio.Event()

    async def hang(stream: Any) -> None:
        waiting.set()
        await trio.sleep_forever()

    class Slow(OnConnections):
        async def opened_stream(self, network: Any, stream: Any) -> None:
            waiting.set()
            await trio.sleep_forever()

    async with a_host() as one, a_host() as other:
        await one.connect_address(other.addresses[0], timeout_s=60)
        other.libp2p.get_network().set_stream_handler(hang)  # no answer to the name of a protocol
        network = one.libp2p.get_network()
        (connection,) = network.get_connections()
        slow = Slow(lambda peer: None, lambda peer: None)
        for step in ("told to the notifees", "negotiated"):
            waiting = trio.Event()
            if step == "told to the notifees":
                network.register_notifee(slow)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(one.libp2p.new_stream, connection.muxed_conn.peer_id, [TProtocol("/test")])
                with trio.fail_after(60):
                    await waiting.wait()
                nursery.cancel_scope.cancel()
            network.remove_notifee(slow)
            assert not connection.streams and not connection.get_streams(), step


async def test_a_peer_that_is_full_dials_nobody_and_says_why() -> None:
    told: list[Event] = []
    events = EventLog()
    async with a_host() as other, a_host() as third:
        caps = NetLimits(connections=1)
        config = open_host(identity=Identity.generate(), events=events, limits=caps)
        async with config as full:
            with events.subscribed(told.append):
                await full.connect_address(other.addresses[0], timeout_s=60)
                with pytest.raises(DialError, match="1 connections are open"):
                    await full.connect_address(third.addresses[0], timeout_s=60)
                with pytest.raises(DialError):
                    await third.connect_address(full.addresses[0], timeout_s=60)
            assert [event.fields for event in told if event.name == "connections_refused"] == [
                {"counts": {"connections": 1}}
            ]
            assert full.connected == {other.peer_id}


async def test_silent_sockets_that_give_way_are_told_in_one_event() -> None:
    told: list[Event] = []
    events = EventLog()
    async with a_host(events) as victim:
        with events.subscribed(told.append):
            await dial_silently(victim, BEYOND)
    assert [event.fields for event in told if event.name == "connections_refused"] == [{"counts": {"handshakes": 1}}]


async def test_refusals_are_told_at_once_then_once_a_minute_by_cap(autojump_clock: trio.testing.MockClock) -> None:
    told: list[Event] = []
    events = EventLog()
    counts = ConnectionCounts(events, (lambda: {"connections": 3},), trio.current_time)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(counts.run)
        with events.subscribed(told.append):
            for _ in range(1000):
                counts.refuse("handshakes")
            counts.refuse("inbound")
            await trio.sleep(3.5 * TELL_S)  # of the mock clock
        nursery.cancel_scope.cancel()
    assert [event.fields["counts"] for event in told if event.name == "connections_refused"] == [
        {"handshakes": 1},
        {"handshakes": 999, "inbound": 1},
    ]
    counted = [event.fields["counts"] for event in told if event.name == "connections_counted"]
    assert counted == 3 * [{"connections": 3}]


async def test_a_call_after_all_that_is_answered() -> None:
    """The counters are those of a working host: they are not 0 while something is under way."""
    async with a_host() as one, a_host() as other:
        await one.connect_address(other.addresses[0], timeout_s=60)
        assert one.counts.now()["connections"] == other.counts.now()["connections"] == 1
        assert other.counts.now()["inbound"] == 1
        assert (await one.rpc.call(other.peer_id, ECHO, Number(1), timeout_s=60)).body == Number(2)
