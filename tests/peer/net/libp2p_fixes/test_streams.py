"""Calls on the short way beside the library's layers, and streams that do not take it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest
import trio
from libp2p.exceptions import BaseLibp2pError
from libp2p.network.connection.swarm_connection import SwarmConn
from libp2p.network.stream.net_stream import NetStream

from peer.errors import ConnectionLost
from peer.events import EventLog
from peer.identity import Identity
from peer.net.host import Host, open_host
from peer.net.libp2p_fixes import streams, yamux
from peer.net.libp2p_fixes.noise import NoiseTransport
from peer.net.method import Call, Method
from peer.net.stream_channel import GREETING
from peer.net.wire import ReplyHeader, RequestHeader


class Number(msgspec.Struct, frozen=True):
    value: int


ECHO = Method("test/echo", Number, Number)
STALL = Method("test/stall", Number, Number)


class Served:
    """Two connected hosts; the second answers."""

    def __init__(self, caller: Host, server: Host) -> None:
        self.caller, self.server = caller, server
        self.entered = trio.Event()
        self.released = trio.Event()
        server.rpc.register(ECHO, self._echo)
        server.rpc.register(STALL, self._stall)

    @property
    def connection(self) -> Any:
        """The caller's only connection."""
        (connection,) = self.caller.libp2p.get_network().get_connections()
        return connection

    @property
    def accepted(self) -> Any:
        """The server's end of it."""
        (connection,) = self.server.libp2p.get_network().get_connections()
        return connection

    async def echoes(self) -> bool:
        reply = await self.caller.rpc.call(self.server.peer_id, ECHO, Number(3), timeout_s=60)
        return reply.body == Number(3)

    async def _echo(self, call: Call[Number]) -> Number:
        return call.body

    async def _stall(self, call: Call[Number]) -> Number:
        self.entered.set()
        await self.released.wait()
        return call.body


@asynccontextmanager
async def two_hosts() -> AsyncIterator[Served]:
    hosts = [open_host(identity=Identity.generate(), events=EventLog(), bulk_port=None) for _ in range(2)]
    async with hosts[0] as caller, hosts[1] as server:
        await caller.connect_address(server.addresses[0], timeout_s=60)
        yield Served(caller, server)


def request(method: str, number: int) -> bytes:
    body = msgspec.Raw(msgspec.msgpack.encode(Number(number)))
    header = msgspec.msgpack.encode(RequestHeader(method, 0, 60_000, body))
    return len(header).to_bytes(4, "big") + header


async def ends(stream: Any) -> bool:
    """Return True once a stream is at its end."""
    with trio.fail_after(300):
        try:
            while await stream.read(4096):
                pass
        except BaseLibp2pError:
            return True
    return False


async def test_a_call_takes_one_write_each_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Opening, greeting, request and the end of the call before leave together, and so do greeting, answer and end."""
    calls, writes = 50, 0
    write = NoiseTransport.write_msg

    async def counted(transport: NoiseTransport, message: Any) -> None:
        nonlocal writes
        writes += 1
        await write(transport, message)

    async with two_hosts() as hosts:
        assert await hosts.echoes()
        monkeypatch.setattr(NoiseTransport, "write_msg", counted)
        for _ in range(calls):
            assert await hosts.echoes()
    assert writes <= 2 * calls + 10, f"{writes} writes for {calls} calls"  # a few for heartbeats and the goodbye


async def test_a_call_passes_by_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    async with two_hosts() as hosts:
        assert await hosts.echoes()

        def refuse(*_: Any) -> None:
            raise AssertionError("a call makes one of the library's streams")

        monkeypatch.setattr(NetStream, "__init__", refuse)
        assert await hosts.echoes()


async def test_open_calls_are_streams_of_their_connection() -> None:
    """The library's pruner spares a connection that has some."""
    async with two_hosts() as hosts, trio.open_nursery() as nursery:
        assert await hosts.echoes()

        async def stall() -> None:
            await hosts.caller.rpc.call(hosts.server.peer_id, STALL, Number(1), timeout_s=60)

        nursery.start_soon(stall)
        await hosts.entered.wait()
        assert hosts.connection.get_streams() and hosts.accepted.get_streams()
        hosts.released.set()


@pytest.mark.parametrize("cut", [1, 20, len(GREETING) - 1])
async def test_a_greeting_in_two_frames_takes_the_library_s_way(cut: int) -> None:
    async with two_hosts() as hosts:
        stream = await hosts.connection.new_stream()
        await stream.write(GREETING[:cut])
        got = b""
        with trio.fail_after(300):
            while len(got) < 20:  # the library's greeting: it has seen the first frame alone
                got += await stream.read(4096)
            await stream.write(GREETING[cut:] + request(ECHO.name, 3))
            while Number(3) != _answer(got):
                got += await stream.read(4096)


def _answer(got: bytes) -> Number | None:
    header = got[len(GREETING) + 4 :]
    if not header or not got.startswith(GREETING):
        return None
    return msgspec.msgpack.decode(msgspec.msgpack.decode(header, type=ReplyHeader).body, type=Number)


async def test_a_silent_stream_is_reset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(yamux, "HALF_OPEN_MAX_S", 0.1)
    monkeypatch.setattr(yamux, "PING_INTERVAL_S", 0.1)
    async with two_hosts() as hosts:
        assert await ends(await hosts.connection.new_stream())
        assert await hosts.echoes()


async def test_a_stream_with_half_a_greeting_is_reset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "GREETING_S", 0.1)
    async with two_hosts() as hosts:
        stream = await hosts.connection.new_stream()
        await stream.write(GREETING[:5])
        assert await ends(stream)
        assert await hosts.echoes()


async def test_an_error_while_serving_ends_the_stream_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    async with two_hosts() as hosts:

        async def fail(*_: Any) -> None:
            raise RuntimeError("a bug of ours")

        with monkeypatch.context() as patch:
            patch.setattr(hosts.server.rpc.server, "serve", fail)
            with pytest.raises(ConnectionLost):
                await hosts.caller.rpc.call(hosts.server.peer_id, ECHO, Number(3), timeout_s=60)
        assert await hosts.echoes()


async def test_streams_of_all_peers_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    async with two_hosts() as hosts, trio.open_nursery() as nursery:
        assert await hosts.echoes()

        async def stall() -> None:
            await hosts.caller.rpc.call(hosts.server.peer_id, STALL, Number(1), timeout_s=60)

        nursery.start_soon(stall)
        await hosts.entered.wait()
        monkeypatch.setattr(streams, "STREAMS_MAX", 1)
        with pytest.raises(ConnectionLost):
            await hosts.caller.rpc.call(hosts.server.peer_id, ECHO, Number(3), timeout_s=60)
        hosts.released.set()


async def test_streams_opened_before_the_connection_has_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stock sets the state of all streams then, which those of the short way do not have."""
    start = SwarmConn.start

    async def late(connection: Any) -> None:
        stream = await connection.muxed_conn.open_stream()
        await start(connection)
        stream.abandon()

    monkeypatch.setattr(SwarmConn, "start", late)
    async with two_hosts() as hosts:
        assert await hosts.echoes()
