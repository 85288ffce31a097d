"""Identify: served by relays only, not pushed, and asked of relays only.

Stock 0.8.1 asks every peer to identify itself, and takes what any peer pushes: messages of 1 MiB, with a public key, a
thousand addresses that a cache of the process never drops, and any number of protocols. Our peers exchange their
addresses by `net/hello`. One fact is left that only identify provides: the address at which a relay, which speaks none
of our protocols, sees us. Hole punching needs it.
"""

from __future__ import annotations

import logging
from ipaddress import IPv6Address, ip_address
from typing import Any, Final

import trio
from google.protobuf.message import DecodeError
from libp2p.exceptions import BaseLibp2pError
from libp2p.identity.identify.identify import ID as IDENTIFY
from libp2p.identity.identify.pb.identify_pb2 import Identify
from libp2p.identity.identify_push.identify_push import ID_PUSH as PUSH
from libp2p.utils.varint import encode_varint_prefixed, read_varint_prefixed_bytes_limited
from multiaddr import Multiaddr
from multiaddr.exceptions import Error as MultiaddrError

logger = logging.getLogger(__name__)

MESSAGE_BYTES_MAX: Final = 8 * 1024
ADDRESS_BYTES_MAX: Final = 256
_ASK_S: Final = 3.0
_FAILED: Final = (
    *(BaseLibp2pError, OSError, ValueError, trio.BrokenResourceError, trio.ClosedResourceError),
    *(DecodeError, MultiaddrError),
)


def drop_identify(host: Any) -> None:
    """Make this host neither answer nor send identify messages."""
    host.remove_stream_handler(IDENTIFY)
    host.remove_stream_handler(PUSH)
    host._schedule_identify = _ask_no_peer
    host._push_identify_to_all_peers = _push_nothing


def tell_observed_address(host: Any, *protocols: str) -> None:
    """Make this host, a relay that speaks `protocols`, tell every peer that asks where it sees it."""

    async def answer(stream: Any) -> None:
        with trio.move_on_after(_ASK_S) as asked:
            seen = _multiaddr(stream.muxed_conn.get_remote_address())
            message = Identify(
                public_key=host.get_public_key().serialize(), observed_addr=seen, protocols=(IDENTIFY, *protocols)
            )
            await stream.write(encode_varint_prefixed(message.SerializeToString()))
            await stream.close()
        if asked.cancelled_caught:
            await stream.reset()

    host.set_stream_handler(IDENTIFY, answer)


def _multiaddr(remote: tuple[str, int] | None) -> bytes:
    if remote is None:
        return b""
    ip = ip_address(remote[0].partition("%")[0])
    if isinstance(ip, IPv6Address) and ip.ipv4_mapped is not None:
        ip = ip.ipv4_mapped
    return bytes(Multiaddr(f"/ip{ip.version}/{ip}/tcp/{remote[1]}").to_bytes())


async def learn_observed_address(host: Any, connection: Any) -> None:
    """Ask the relay at the other end of this connection where it sees us, for hole punching. A failure does no harm."""
    with trio.move_on_after(_ASK_S):
        try:
            observed = await _ask(host, connection.muxed_conn.peer_id)
            if 0 < len(observed) <= ADDRESS_BYTES_MAX:
                local = host.get_transport_addrs()
                host._observed_addr_manager.record_observation(connection, Multiaddr(observed), local)
        except _FAILED as error:
            logger.debug("%s does not say where it sees us: %r", connection.muxed_conn.peer_id, error)


async def _ask(host: Any, peer: Any) -> bytes:
    """Return the observed address of an identify message. The rest of it is ignored."""
    stream = await host.new_stream(peer, [IDENTIFY])
    try:
        message = Identify.FromString(await read_varint_prefixed_bytes_limited(stream, MESSAGE_BYTES_MAX))
    finally:
        with trio.CancelScope(shield=True):
            await stream.reset()
    return bytes(message.observed_addr)


def _ask_no_peer(peer: Any, *, reason: str) -> None:
    """Replace the library's request to every new peer."""


async def _push_nothing() -> None:
    """Replace the library's push to all peers."""
