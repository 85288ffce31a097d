"""Scenarios of connections: accepting, dialling, trusting and closing them, on real sockets of 127.0.0.1."""

from __future__ import annotations

import socket
from contextlib import AsyncExitStack, suppress
from typing import Any

import trio
import trio.testing
from libp2p import create_mplex_muxer_option
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.crypto.keys import KeyPair
from libp2p.custom_types import TProtocol
from libp2p.exceptions import BaseLibp2pError
from libp2p.network.config import ConnectionConfig
from libp2p.peer.id import ID
from libp2p.peer.peerinfo import PeerInfo
from libp2p.security.insecure.transport import PLAINTEXT_PROTOCOL_ID, InsecureTransport
from multiaddr import Multiaddr

from tests.peer.support.holes_common import (
    ECHO,
    accepted,
    accepted_from,
    address_of,
    connect,
    running_host,
    serves,
    timeout_s,
)
from tests.support.ports import free_port, refusing_port

# Stock accepts 10 inbound connections with these.
SMALL = ConnectionConfig(max_connections=30, high_watermark=30, low_watermark=20, min_connections=20)


async def inbound_slots_leak(fixed: bool) -> str:
    """Closed inbound connections keep their slots: after 10 (250 by default) in its lifetime a node is deaf."""
    async with running_host(fixed, connection_config=SMALL) as victim:
        for done in range(14):
            if not await serves(victim, fixed):
                return f"deaf after {done} connections that were all closed again"
    return ""


async def idle_sockets(fixed: bool) -> str:
    """Idle sockets from one address lock all other peers out."""
    async with running_host(fixed, connection_config=SMALL) as victim, AsyncExitStack() as attack:
        port = int(address_of(victim).value_for_protocol("tcp") or 0)
        for _ in range(40):
            await attack.enter_async_context(await trio.open_tcp_stream("127.0.0.1", port))
        return "" if await serves(victim, fixed) else "locked out by 40 idle sockets"


async def no_keepalive(fixed: bool) -> str:
    """The kernel is not asked to notice dead links."""
    async with running_host(fixed) as server, running_host(fixed) as client:
        await connect(client, server)
        options = [_keepalive(await accepted(host)) for host in (server, client)]
    return "" if all(options) else f"SO_KEEPALIVE and TCP_USER_TIMEOUT set on server, client: {options}"


def _keepalive(conn: Any) -> bool:
    sock = conn.muxed_conn.secured_conn.conn.conn.stream.stream.socket
    alive = sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
    timeout_ms = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)
    return bool(alive and timeout_ms)


async def refused_for_a_minute(fixed: bool) -> str:
    """A peer that was down once is not dialled again for 60 s."""
    key = create_new_key_pair()
    info = PeerInfo(ID.from_pubkey(key.public_key), [Multiaddr(f"/ip4/127.0.0.1/tcp/{free_port()}")])
    async with running_host(fixed) as client:
        with suppress(BaseLibp2pError):
            await client.connect(info)
        async with running_host(fixed, listen=info.addrs[0], key_pair=key):
            try:
                with trio.fail_after(60):
                    await client.connect(info)
            except (BaseLibp2pError, trio.TooSlowError) as error:
                return f"refused though the peer is back: {error}"
    return ""


async def one_address_only(fixed: bool) -> str:
    """Only the first of a peer's addresses is tried."""
    async with running_host(fixed) as server, running_host(fixed) as client:
        try:
            with refusing_port() as port, trio.fail_after(60):
                dead = Multiaddr(f"/ip4/127.0.0.1/tcp/{port}")
                await client.connect(PeerInfo(server.get_id(), [dead, address_of(server)]))
        except (BaseLibp2pError, trio.TooSlowError) as error:
            return f"the second address was not tried: {error}"
    return ""


async def sockets_outlive_host(fixed: bool) -> str:
    """After a host has ended, its peers keep dead connections."""
    async with running_host(fixed) as server:
        async with running_host(fixed) as client:
            await connect(client, server)
            conn = await accepted(server)
            await trio.testing.wait_all_tasks_blocked(
                0.5
            )  # a close in the middle of the first exchange would close the connection
            kept = client.get_network().get_connections()  # else garbage collection may close it
        with trio.move_on_after(timeout_s(fixed, 2)):
            await conn.muxed_conn.event_closed.wait()
            return ""
    return f"{len(kept)} connection to a host that has ended stays"


async def forged_identity(fixed: bool) -> str:
    """A dialler chooses plaintext and an unguarded multiplexer, and passes for any peer it names."""
    alice, mallory = create_new_key_pair(), create_new_key_pair()

    class Forged:
        """Alice's public key on Mallory's private one."""

        def get_public_key(self) -> Any:
            return alice.public_key

    transport = InsecureTransport(KeyPair(mallory.private_key, alice.public_key))
    transport.local_private_key = Forged()  # type: ignore[assignment]
    options = {"sec_opt": {TProtocol(PLAINTEXT_PROTOCOL_ID): transport}, "muxer_opt": create_mplex_muxer_option()}
    async with running_host(fixed) as victim, running_host(False, key_pair=mallory, **options) as attacker:
        with suppress(BaseLibp2pError), trio.move_on_after(60):
            await connect(attacker, victim)
            stream = await attacker.new_stream(victim.get_id(), [ECHO])
            await stream.write(b"I am Alice")
            await stream.read(100)
        if victim.get_network().get_connections(ID.from_pubkey(alice.public_key)):
            return "connected as Alice without Alice's key"
    return ""


async def addresses_without_end(fixed: bool) -> str:
    """The number of addresses kept of a peer is unbounded."""
    async with running_host(fixed) as victim, running_host(fixed) as attacker:
        for first in range(1, 901, 20):  # as a peer that punches holes tells them
            told = [Multiaddr(f"/ip4/203.0.113.7/tcp/{port}") for port in range(first, first + 20)]
            victim.get_peerstore().add_addrs(attacker.get_id(), told, 600)
        kept = victim.get_peerstore().addrs(attacker.get_id())
    return f"{len(kept)} addresses of one peer are kept" if len(kept) > 100 else ""


async def strangers_remembered(fixed: bool) -> str:
    """Every peer that was ever connected is kept in memory."""
    async with running_host(fixed) as victim, running_host(fixed) as stays:
        await connect(stays, victim)
        for _ in range(5):
            async with running_host(fixed) as stranger:
                await connect(stranger, victim)
                await accepted_from(victim, stranger)
                with trio.move_on_after(0 if fixed else 1):  # stock asks who it is, and keeps the answer
                    while stranger.get_id() not in victim._identified_peers:
                        await trio.sleep(0.02)
        network, store = victim.get_network(), victim.get_peerstore()
        rightly = {victim.get_id(), stays.get_id()}
        kept: set[ID] = set()
        with trio.move_on_after(timeout_s(fixed, 3)):
            while len(network.connections) > 1 or not kept or kept - rightly:
                await trio.sleep(0.02)
                kept = {*store.peer_ids(), *store.peer_record_map, *network.auto_connector._recent_disconnects}
        if victim.get_id() not in kept or stays.get_id() not in network.connections:
            return "a connected peer, or the host itself, was forgotten"
    return f"{len(kept - rightly)} peers that have gone are remembered" if kept - rightly else ""
