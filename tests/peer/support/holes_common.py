"""Hosts of plain py-libp2p for the hole scenarios, with and without the fixes."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import trio
from libp2p import new_host
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.custom_types import TProtocol
from libp2p.exceptions import BaseLibp2pError
from multiaddr import Multiaddr

from peer.net.libp2p_fixes import harden

LOOPBACK = Multiaddr("/ip4/127.0.0.1/tcp/0")
ECHO = TProtocol("/echo")
GREETING = b"\x13/multistream/1.0.0\n"


@asynccontextmanager
async def running_host(fixed: bool, listen: Multiaddr = LOOPBACK, **options: Any) -> AsyncIterator[Any]:
    """A host with an echo service."""
    host = new_host(key_pair=options.pop("key_pair", None) or create_new_key_pair(), listen_addrs=[listen], **options)
    if fixed:
        harden(host)
    host.set_stream_handler(ECHO, echo)
    async with host.run(listen_addrs=[listen]):
        yield host


async def echo(stream: Any) -> None:
    await stream.write(await stream.read(100))
    await stream.close()


async def connect(client: Any, server: Any) -> Any:
    """Connect `client` to `server` without the library's dialling by peer id."""
    return await client.get_network().dial_addr(address_of(server), server.get_id())


async def accepted(server: Any) -> Any:
    """Return the only connection of `server`, which may have it a little later than the dialler."""
    with trio.fail_after(60):
        while not server.get_network().get_connections():
            await trio.sleep(0.02)
    (connection,) = server.get_network().get_connections()
    return connection


async def accepted_from(server: Any, client: Any) -> None:
    """Return once `server` has the connection of `client`."""
    with trio.fail_after(60):
        while not server.get_network().get_connections(client.get_id()):
            await trio.sleep(0.02)


def address_of(host: Any) -> Multiaddr:
    return Multiaddr(str(host.get_addrs()[0]).split("/p2p/")[0])


def timeout_s(fixed: bool, stock_s: float) -> float:
    """Return how long to wait for a result: `stock_s` if it never comes, else long enough for a busy machine."""
    return 60.0 if fixed else stock_s


async def serves(server: Any, fixed: bool) -> bool:
    """Return whether a new peer gets its echo."""
    async with running_host(fixed) as client:
        with suppress(BaseLibp2pError), trio.move_on_after(timeout_s(fixed, 4)):
            await connect(client, server)
            stream = await client.new_stream(server.get_id(), [ECHO])
            await stream.write(b"hello")
            return bool(await stream.read(100) == b"hello")
    return False
