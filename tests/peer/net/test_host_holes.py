"""Faults of py-libp2p as a user of our host sees them mended. Circuits are in `tests/processes/test_nat.py`."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager

import msgspec
import pytest
import trio

from peer.errors import ConfigError, DialError
from peer.events import EventLog
from peer.identity import Identity
from peer.net.host import Host, open_host
from peer.net.libp2p_fixes import abort_connection, apply_fixes
from peer.net.method import Call, Method
from peer.net.reach import Reach
from tests.support.ports import free_port, refusing_port


class Note(msgspec.Struct, frozen=True):
    text: str


ECHO: Method[Note, Note] = Method("test/echo", Note, Note)


@asynccontextmanager
async def a_host(identity: Identity | None = None, port: int = 0) -> AsyncIterator[Host]:
    async def echo(call: Call[Note]) -> Note:
        return call.body

    config = open_host(
        identity=identity or Identity.generate(), events=EventLog(), reach=Reach((f"/ip4/127.0.0.1/tcp/{port}",))
    )
    async with config as host:
        host.rpc.register(ECHO, echo)
        yield host


async def test_hole_9_a_peer_that_was_down_is_dialled_again_at_once() -> None:
    identity, port = Identity.generate(), free_port()
    async with a_host() as client:
        client.book.add(identity.peer_id, [f"/ip4/127.0.0.1/tcp/{port}"])
        with pytest.raises(DialError) as refused:
            await client.connect(identity.peer_id, timeout_s=60)
        assert refused.value.reason == "refused"
        async with a_host(identity, port):
            await client.connect(identity.peer_id, timeout_s=60)
            assert identity.peer_id in client.connected


async def test_hole_10_every_address_is_tried() -> None:
    async with a_host() as server, a_host() as client:
        with ExitStack() as refusing:
            dead = [f"/ip4/127.0.0.1/tcp/{refusing.enter_context(refusing_port())}" for _ in range(3)]
            client.book.add(server.peer_id, [*dead, *server.addresses])
            await client.connect(server.peer_id, timeout_s=60)
        reply = await client.rpc.call(server.peer_id, ECHO, Note("hello"), timeout_s=60)
        assert reply.body == Note("hello")


async def test_hole_12_a_host_that_ends_closes_its_sockets() -> None:
    async with a_host() as server:
        async with a_host() as client:
            await client.connect_address(server.addresses[0], timeout_s=60)
            (connection,) = server.libp2p.get_network().get_connections()
        with trio.fail_after(60):
            await connection.muxed_conn.event_closed.wait()
            while client.peer_id in server.connected:
                await trio.sleep(0.01)


async def test_hole_8_an_aborted_connection_fails_its_calls_at_once() -> None:
    begun, never = trio.Event(), trio.Event()

    async def hang(call: Call[Note]) -> Note:
        begun.set()
        await never.wait()
        return call.body

    hanging: Method[Note, Note] = Method("test/hang", Note, Note)
    async with a_host() as server, a_host() as client, trio.open_nursery() as nursery:
        server.rpc.register(hanging, hang)
        await client.connect_address(server.addresses[0], timeout_s=60)
        ended = trio.Event()

        async def call() -> None:
            with pytest.raises(Exception, match="ended"):
                await client.rpc.call(server.peer_id, hanging, Note(""), timeout_s=600)
            ended.set()

        nursery.start_soon(call)
        with trio.fail_after(60):
            await begun.wait()
        for connection in client.libp2p.get_network().get_connections():
            await abort_connection(connection)
        with trio.fail_after(60):
            await ended.wait()


def test_another_version_of_libp2p_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("peer.net.libp2p_fixes._applied", False)
    monkeypatch.setattr("peer.net.libp2p_fixes.metadata.version", lambda name: "0.9.0")
    with pytest.raises(ConfigError, match=r"pip install libp2p==0\.8\.1"):
        apply_fixes()
