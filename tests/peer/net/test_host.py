from __future__ import annotations

import socket
from contextlib import AbstractAsyncContextManager
from dataclasses import replace

import pytest
import trio

from peer.errors import ConfigError, ConnectionLost, DialError, ResourceError
from peer.events import EventLog
from peer.identity import Identity
from peer.net.host import Host, open_host
from peer.net.limits import NetLimits
from peer.net.reach import LOCAL, Reach
from tests.peer.net.test_rpc import ECHO, Number, echo
from tests.peer.support.holes_common import address_of, running_host
from tests.support.ports import free_port, refusing_port

QUICK = NetLimits(dial_timeout_s=1.0)  # for silent peers only: one that answers may take longer on a busy machine


def new_host(**changes: object) -> AbstractAsyncContextManager[Host]:
    values: dict[str, object] = {"identity": Identity.generate(), "events": EventLog()}
    return open_host(**{**values, **changes})  # type: ignore[arg-type]


async def test_hosts_know_each_other_after_connecting() -> None:
    async with new_host() as a, new_host() as b:
        assert await a.connect_address(b.addresses[0], timeout_s=60) == b.peer_id
        assert a.connected == {b.peer_id} and b.connected == {a.peer_id}
        assert [f"{address}/p2p/{a.peer_id}" for address in b.book.get(a.peer_id)] == list(a.addresses)
        await a.disconnect(b.peer_id)
        assert a.connected == frozenset()
        await b.connect(a.peer_id, timeout_s=60)
        assert b.connected == {a.peer_id}


@pytest.mark.parametrize("beside_others", [False, True])
async def test_an_error_of_a_host_that_is_cancelled_is_not_lost(beside_others: bool) -> None:
    """What could not be saved when a user left must reach the user."""
    ready = trio.Event()

    async def run() -> None:
        async with new_host(), trio.open_nursery() as nursery:
            if beside_others:
                nursery.start_soon(trio.sleep_forever)
            try:
                ready.set()
                await trio.sleep_forever()
            finally:
                raise ResourceError("the disk is full")

    with pytest.RaisesGroup(ResourceError, flatten_subgroups=True):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(run)
            await ready.wait()
            nursery.cancel_scope.cancel()


async def test_every_address_is_tried_in_any_order() -> None:
    with refusing_port() as port:
        async with new_host() as a, new_host() as b:
            dead = f"/ip4/127.0.0.1/tcp/{port}"
            silent = "/ip4/203.0.113.1/tcp/9"
            a.book.add(b.peer_id, [dead, silent, *b.addresses])
            await a.connect(b.peer_id, timeout_s=60)
            assert a.connected == {b.peer_id}


async def test_concurrent_calls_share_one_dial() -> None:
    async with new_host() as a, new_host() as b:
        b.rpc.register(ECHO, echo)
        a.book.add(b.peer_id, b.addresses)
        async with trio.open_nursery() as nursery:
            for _ in range(20):
                nursery.start_soon(lambda: a.rpc.call(b.peer_id, ECHO, Number(1), timeout_s=60))
        assert len(a.libp2p.get_network().get_connections()) == 1


async def test_dialling_each_other_at_once_works() -> None:
    async with new_host() as a, new_host() as b:
        for host in (a, b):
            host.rpc.register(ECHO, echo)
        a.book.add(b.peer_id, b.addresses)
        b.book.add(a.peer_id, a.addresses)
        async with trio.open_nursery() as nursery:
            for one, other in ((a, b), (b, a)):
                nursery.start_soon(lambda one=one, other=other: one.connect(other.peer_id, timeout_s=60))
        for one, other in ((a, b), (b, a)):
            for bulk in (False, True):
                reply = await one.rpc.call(other.peer_id, ECHO, Number(1), bytes(1 << 20), timeout_s=60, bulk=bulk)
                assert reply.body == Number(2)


async def test_refused_wrong_peer_and_silent_addresses_are_told_apart() -> None:
    async with new_host() as a, new_host() as b:
        stranger = Identity.generate().peer_id
        where = b.addresses[0].partition("/p2p/")[0]
        with pytest.raises(DialError, match="another peer answers") as caught:
            await a.connect_address(f"{where}/p2p/{stranger}", timeout_s=60)
        assert caught.value.reason == "wrong_peer"
        with refusing_port() as port, pytest.raises(DialError, match="nothing listens") as caught:
            await a.connect_address(f"/ip4/127.0.0.1/tcp/{port}/p2p/{stranger}", timeout_s=60)
        assert caught.value.reason == "refused"
        with socket.socket() as mute:
            mute.bind(("127.0.0.1", 0))
            mute.listen()
            mute_address = f"/ip4/127.0.0.1/tcp/{mute.getsockname()[1]}/p2p/{stranger}"
            with pytest.raises(DialError, match="no answer in time") as caught:
                async with new_host(limits=QUICK) as hasty:
                    await hasty.connect_address(mute_address, timeout_s=60)
            assert caught.value.reason == "timeout"
            with pytest.raises(DialError) as caught:
                await a.connect_address(mute_address, timeout_s=0.2)
            assert caught.value.reason == "timeout"
        with pytest.raises(DialError, match="no address") as caught:
            await a.connect(stranger, timeout_s=60)
        assert caught.value.reason == "unreachable"
        with pytest.raises(DialError):
            await a.rpc.call(stranger, ECHO, Number(1), timeout_s=60)
        with pytest.raises(ConfigError, match="/p2p/"):
            await a.connect_address(where, timeout_s=5)


async def test_a_peer_that_was_down_is_reached_as_soon_as_it_is_up() -> None:
    identity, port = Identity.generate(), free_port()
    listen = (f"/ip4/127.0.0.1/tcp/{port}",)
    async with new_host() as a:
        a.book.add(identity.peer_id, listen)
        with pytest.raises(DialError):
            await a.connect(identity.peer_id, timeout_s=60)
        for _ in range(2):  # also after a restart of the peer, over the connection that died with it
            async with new_host(identity=identity, reach=Reach(listen)) as b:
                b.rpc.register(ECHO, echo)
                assert (await a.rpc.call(b.peer_id, ECHO, Number(1), timeout_s=60)).body == Number(2)


async def test_closing_a_host_closes_its_sockets() -> None:
    async with new_host() as a:
        async with new_host() as b:
            await a.connect_address(b.addresses[0], timeout_s=60)
            port = int(b.addresses[0].split("/")[4])
        with trio.fail_after(300):
            while a.connected:
                await trio.testing.wait_all_tasks_blocked(0.01)
        with pytest.raises(ConnectionRefusedError), socket.socket() as probe:
            probe.connect(("127.0.0.1", port))


async def test_a_port_in_use_is_a_resource_error() -> None:
    async with new_host() as a:
        taken = a.addresses[0].partition("/p2p/")[0]
        with pytest.raises(ResourceError, match="in use"):
            async with new_host(reach=Reach((taken,))):
                pass
    with pytest.raises(ResourceError, match="--listen"):
        async with new_host(reach=Reach(("/ip4/203.0.113.1/tcp/0",))):
            pass
    with pytest.raises(ConfigError, match="--listen"):
        async with new_host(reach=Reach(("localhost:4001",))):
            pass


async def test_errors_inside_the_block_come_out_as_they_are() -> None:
    with pytest.raises(ConnectionLost, match="mine"):
        async with new_host():
            raise ConnectionLost("mine")


async def test_a_wildcard_listen_announces_real_addresses() -> None:
    async with new_host(reach=Reach()) as a, new_host() as b:
        assert a.addresses and not any("0.0.0.0" in address or "/tcp/0/" in address for address in a.addresses)
        await b.connect_address(a.addresses[0], timeout_s=60)
    announced = "/ip4/203.0.113.7/tcp/4001"
    async with new_host(reach=replace(LOCAL, announce=(announced,))) as c:
        assert c.addresses == (f"{announced}/p2p/{c.peer_id}",)


async def test_bulk_has_a_connection_of_its_own() -> None:
    async with new_host() as a, new_host() as b:
        b.rpc.register(ECHO, echo)
        await a.connect_address(b.addresses[0], timeout_s=60)
        await a.rpc.call(b.peer_id, ECHO, Number(1), bytes(1 << 20), timeout_s=60, bulk=True)
        assert len(sockets_between(a, b)) >= 2


def sockets_between(a: Host, b: Host) -> list[object]:
    return list(a.libp2p.get_network().get_connections()) + list(b.libp2p.get_network().get_connections())


async def test_a_dialled_peer_learns_how_to_dial_back() -> None:
    async with new_host() as a, new_host() as b:
        b.rpc.register(ECHO, echo)
        a.book.add(b.peer_id, b.addresses)
        await a.rpc.call(b.peer_id, ECHO, Number(1), timeout_s=60)
        with trio.fail_after(300):
            while not b.book.get(a.peer_id):
                await trio.lowlevel.checkpoint()


async def test_a_libp2p_host_that_is_no_barnraise_peer_is_told_apart() -> None:
    async with new_host() as a, running_host(fixed=True) as other:
        peer = await a.connect_address(f"{address_of(other)}/p2p/{other.get_id()}", timeout_s=60)
        with pytest.raises(ConnectionLost, match="no Barnraise peer"):
            await a.rpc.call(peer, ECHO, Number(1), timeout_s=60)
