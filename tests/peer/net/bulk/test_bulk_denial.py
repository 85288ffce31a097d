"""Sockets that do nothing keep no peer off the bulk transport."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import pytest
import trio

from peer.net.bulk.transport import OFFER, OfferRequest
from peer.net.host import Host
from tests.peer.net.bulk.test_bulk import SIZE, bulk_connections, generous_timeouts, offer_of, pair
from tests.peer.net.test_rpc import ECHO, Number

__all__ = ["generous_timeouts"]

IDLE_SOCKETS = 40
RENEWED_EVERY_S = 1.0
CONNECTS = 10


@asynccontextmanager
async def idle_sockets(port: int) -> AsyncIterator[None]:
    """Hold forty idle sockets to a port, and renew them each second, inside the block."""
    held = trio.Event()

    async def hold() -> None:
        while True:
            async with AsyncExitStack() as sockets:
                for _ in range(IDLE_SOCKETS):
                    await sockets.enter_async_context(await trio.open_tcp_stream("127.0.0.1", port))
                held.set()
                await trio.sleep(RENEWED_EVERY_S)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(hold)
        await held.wait()
        yield
        nursery.cancel_scope.cancel()


async def takes_bulk_transport(caller: Host, called: Host) -> bool:
    """Whether a payload goes by a new connection of the bulk transport."""
    caller._bulk.abort(called.peer_id)
    with trio.fail_after(300):
        while bulk_connections(caller, called.peer_id) or bulk_connections(called, caller.peer_id):
            await trio.sleep(0.01)
    reply = await caller.rpc.call(called.peer_id, ECHO, Number(1), bytes(SIZE), timeout_s=60, bulk=True)
    assert reply.payload.nbytes == SIZE
    return bool(bulk_connections(caller, called.peer_id))


async def test_idle_sockets_from_the_same_address_deny_nothing() -> None:
    async with pair() as (a, b, _):
        port = (await offer_of(a, b)).port  # stays open: sockets from this address are not closed at once
        async with idle_sockets(port):
            connected = 0
            for _ in range(CONNECTS):
                connected += await takes_bulk_transport(a, b)
                await trio.sleep(RENEWED_EVERY_S / 4)
        assert connected >= CONNECTS - 1


@pytest.mark.parametrize("address", ["127.0.0.24", "127.0.1.1"], ids=["same network", "another network"])
async def test_sockets_from_where_no_offer_was_made_are_closed_at_once(address: str) -> None:
    async with pair() as (a, b, _):
        offer = await offer_of(a, b)
        stream = await trio.open_tcp_stream("127.0.0.1", offer.port, local_address=address)
        async with stream:
            with trio.move_on_after(60 if address == "127.0.1.1" else 0.3) as waiting:
                assert await stream.receive_some(1) == b""
            assert waiting.cancelled_caught is (address == "127.0.0.24")


async def test_without_an_open_offer_every_socket_is_closed_at_once() -> None:
    async with pair() as (a, b, _):
        assert await takes_bulk_transport(a, b)  # by the only offer
        async with await trio.open_tcp_stream("127.0.0.1", b._bulk._port) as stream:
            with trio.fail_after(300):
                assert await stream.receive_some(1) == b""


async def test_no_offer_is_made_to_a_stranger_of_a_run() -> None:
    async with pair() as (a, b, _):
        b.admissions.guard()
        with pytest.raises(Exception, match="introduce yourself"):
            await a.rpc.call(b.peer_id, OFFER, OfferRequest(), timeout_s=60)
        b.admissions.grant(a.peer_id, "client", trusted=False)
        assert (await offer_of(a, b)).port
