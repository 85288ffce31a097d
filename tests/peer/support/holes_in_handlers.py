"""Scenarios of hostile bytes for a stream handler or the negotiation (holes 1, 2, 3)."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import trio
from libp2p.custom_types import TProtocol
from libp2p.exceptions import BaseLibp2pError
from libp2p.pubsub.gossipsub import GossipSub
from libp2p.pubsub.pubsub import Pubsub
from libp2p.tools.anyio_service import background_trio_service

from tests.peer.support.holes_common import GREETING, connect, running_host, serves

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
