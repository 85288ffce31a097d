"""Scenarios of hostile bytes for a stream handler or the negotiation."""

from __future__ import annotations

import time
from contextlib import suppress
from typing import Any

import trio
from libp2p.custom_types import TProtocol
from libp2p.exceptions import BaseLibp2pError
from libp2p.identity.identify.pb.identify_pb2 import Identify
from libp2p.identity.identify_push.identify_push import ID_PUSH
from libp2p.identity.update import _safe_parse_multiaddr_cached
from libp2p.pubsub.gossipsub import GossipSub
from libp2p.pubsub.pubsub import Pubsub
from libp2p.tools.anyio_service import background_trio_service
from libp2p.utils.varint import encode_uvarint

from tests.peer.support.holes_common import GREETING, address_of, connect, running_host, serves
from tests.peer.support.key_bombs import handshake, prime_bomb

_NAME_BYTES = 64 << 20
_TAKEN_MAX = 4 << 20


async def handler_raises(fixed: bool) -> str:
    """A bug in one stream's handler ends the whole node."""

    async def buggy(stream: Any) -> None:
        raise RuntimeError("a bug in a handler")

    async with running_host(fixed) as victim, running_host(fixed) as attacker:
        victim.set_stream_handler(TProtocol("/buggy"), buggy)
        await connect(attacker, victim)
        await _until_it_ends(await attacker.new_stream(victim.get_id(), [TProtocol("/buggy")]))
        return "" if await serves(victim, fixed) else "no service after a handler raised"


async def name_not_utf8(fixed: bool) -> str:
    """Five bytes in place of a protocol name end the whole node."""
    async with running_host(fixed) as victim, running_host(fixed) as attacker:
        stream = await (await connect(attacker, victim)).new_stream()
        await stream.write(GREETING + b"\x05\xff\xfe\xfd\xfc\n")
        await _until_it_ends(stream)
        return "" if await serves(victim, fixed) else "no service after a name that is not UTF-8"


async def pubsub_garbage(fixed: bool) -> str:
    """Garbage for the pub/sub protocol ends the whole node."""
    async with running_host(fixed) as victim, running_host(fixed) as attacker:
        meshsub = TProtocol("/meshsub/1.0.0")
        async with background_trio_service(Pubsub(victim, GossipSub([meshsub], 6, 4, 8))) as _:
            await connect(attacker, victim)
            stream = await attacker.new_stream(victim.get_id(), [meshsub])
            await stream.write(b"\x05\xff\xff\xff\xff\xff" * 50)
            await _until_it_ends(stream)
            return "" if await serves(victim, fixed) else "no service after garbage for pub/sub"


async def endless_name(fixed: bool) -> str:
    """A protocol name of any announced length is read into memory."""
    async with running_host(fixed) as victim, running_host(fixed) as attacker:
        stream = await (await connect(attacker, victim)).new_stream()
        length = bytes([0x80 | _NAME_BYTES & 0x7F, 0x80 | _NAME_BYTES >> 7 & 0x7F, 0x80 | _NAME_BYTES >> 14 & 0x7F])
        await stream.write(GREETING + length + bytes([_NAME_BYTES >> 21]))
        sent = 0
        with suppress(BaseLibp2pError), trio.move_on_after(60):
            while sent < _TAKEN_MAX:
                await stream.write(bytes(1 << 20))
                sent += 1 << 20
        return f"{sent} bytes of a protocol name were taken" if sent >= _TAKEN_MAX else ""


async def _until_it_ends(stream: Any) -> None:
    with suppress(BaseLibp2pError), trio.move_on_after(60):
        while await stream.read(4096):
            pass


async def identify_kept(fixed: bool) -> str:
    """What peers push as their addresses is kept for ever, by a cache of the whole process."""
    async with running_host(fixed) as victim, running_host(fixed) as attacker:
        connection = await connect(attacker, victim)
        with suppress(BaseLibp2pError), trio.move_on_after(60):
            stream = await connection.new_stream()
            message = Identify(listen_addrs=[bytes(1 << 16)]).SerializeToString()
            await stream.write(GREETING + bytes([len(ID_PUSH) + 1]) + ID_PUSH.encode() + b"\n")
            await stream.write(encode_uvarint(len(message)) + message)
            await stream.close_write()
            await _until_it_ends(stream)
        served = await serves(victim, fixed)
    kept = _safe_parse_multiaddr_cached.cache_info().currsize
    return "" if served and not kept else f"{kept} addresses are kept"


async def rsa_private_key(fixed: bool) -> str:
    """A private RSA key shown as a public one holds the event loop for seconds."""
    async with running_host(fixed) as victim:
        port = int(address_of(victim).value_for_protocol("tcp") or 0)
        before = time.process_time()
        await handshake(port, prime_bomb())
        cost_s = time.process_time() - before
    return f"one handshake cost {cost_s:.1f} s" if cost_s > 0.5 else ""
