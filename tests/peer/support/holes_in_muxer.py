"""Scenarios for the Yamux multiplexer over memory streams and a virtual clock."""

from __future__ import annotations

import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import trio
import trio.testing
from libp2p.connection_types import ConnectionType
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.exceptions import BaseLibp2pError
from libp2p.peer.id import ID
from libp2p.stream_muxer import muxer_multistream

HEADER = struct.Struct("!BBHII")
DATA, WINDOW_UPDATE, PING, GO_AWAY = range(4)
SYN, ACK, FIN, RST = 1, 2, 4, 8
WINDOW = 256 * 1024
PEER = ID.from_pubkey(create_new_key_pair().public_key)


class MemoryConn:
    """The secured connection below a multiplexer. `halt()` makes the next write stop half way until `resume`."""

    def __init__(self, stream: Any, is_initiator: bool) -> None:
        self.stream = stream
        self.is_initiator = is_initiator
        self.halted = trio.Event()
        self.resume = trio.Event()
        self.resume.set()

    def halt(self) -> None:
        self.halted, self.resume = trio.Event(), trio.Event()

    async def write(self, data: Any) -> None:
        half = 0 if self.resume.is_set() else len(data) // 2
        if half:
            await self.stream.send_all(data[:half])
            self.halted.set()
            await self.resume.wait()
        await self.stream.send_all(data[half:])

    async def read(self, n: int | None = None) -> bytes:
        return bytes(await self.stream.receive_some(n))

    async def close(self) -> None:
        await self.stream.aclose()

    def get_remote_address(self) -> None:
        return None

    def get_transport_addresses(self) -> list[Any]:
        return []

    def get_connection_type(self) -> ConnectionType:
        return ConnectionType.DIRECT


@asynccontextmanager
async def muxer(conn: MemoryConn) -> AsyncIterator[Any]:
    """Run the stock or the fixed multiplexer."""
    yamux: Any = vars(muxer_multistream)["Yamux"]  # which of the two, `peer.net.libp2p_fixes` says
    mux = yamux(conn, PEER, is_initiator=conn.is_initiator)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(mux.start)
        await mux.event_started.wait()
        yield mux
        nursery.cancel_scope.cancel()


def conn_pair() -> tuple[MemoryConn, MemoryConn]:
    ours, theirs = trio.testing.memory_stream_pair()
    return MemoryConn(ours, True), MemoryConn(theirs, False)


async def slow_reader(fixed: bool) -> str:
    """A write ends after 5 s without window, before its caller's deadline."""
    left, right = conn_pair()
    total = 4 * WINDOW
    async with muxer(left) as sender, muxer(right) as receiver:
        stream = await sender.open_stream()
        await stream.write(b"x")
        accepted = await receiver.accept_stream()

        async def read_late() -> None:
            await trio.sleep(60)
            got = -1
            with suppress(BaseLibp2pError):
                while got < total:
                    got += len(await accepted.read(65536))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(read_late)
            try:
                await stream.write(bytes(total))
            except BaseLibp2pError as error:
                nursery.cancel_scope.cancel()
                return f"the write ended early: {error}"
    return ""


async def window_flood(fixed: bool) -> str:
    """Data beyond the window is kept, without end."""
    left, right = conn_pair()
    async with muxer(right) as victim:
        await left.write(HEADER.pack(0, WINDOW_UPDATE, SYN, 1, 0) + HEADER.pack(0, DATA, 0, 1, 1) + b"x")
        stream = await victim.accept_stream()
        for _ in range(64):
            with suppress(trio.BrokenResourceError):
                await left.write(HEADER.pack(0, DATA, 0, 1, 65536) + bytes(65536))
        with trio.move_on_after(10):
            await victim.event_closed.wait()
            return ""
        return f"{len(await stream.read(-1))} bytes were kept for a window of {WINDOW}"


async def cancelled_write(fixed: bool) -> str:
    """A task cancelled while it writes tears a frame, and with it the connection that all calls share."""
    left, right = conn_pair()
    async with muxer(left) as sender, muxer(right) as receiver:
        doomed = await sender.open_stream()
        await doomed.write(b"x")
        await receiver.accept_stream()
        left.halt()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(doomed.write, bytes(1000))
            await left.halted.wait()
            nursery.cancel_scope.cancel()
        left.resume.set()
        with trio.move_on_after(30):
            other = await sender.open_stream()
            await other.write(b"unharmed")
            if await (await receiver.accept_stream()).read(100) == b"unharmed":
                return ""
    return "no other stream works after a write was cancelled"


async def silent_link(fixed: bool) -> str:
    """A peer that never answers again is never noticed."""
    left, _right = conn_pair()
    async with muxer(left) as mux:
        stream = await mux.open_stream()
        with trio.move_on_after(300):
            try:
                await stream.read(1)
            except BaseLibp2pError:
                return ""
    return "a read on a dead link waits for more than 300 s"


async def stuck_close(fixed: bool) -> str:
    """A connection whose peer takes no bytes cannot be closed."""
    left, _right = conn_pair()
    async with muxer(left) as mux:
        stream = await mux.open_stream()
        left.halt()
        async with trio.open_nursery() as nursery:

            async def write() -> None:
                with suppress(BaseLibp2pError):
                    await stream.write(bytes(1000))

            nursery.start_soon(write)
            await left.halted.wait()
            with trio.move_on_after(30):
                await mux.close()
                return ""
            nursery.cancel_scope.cancel()
    return "close() waits for more than 30 s behind a stuck write"


async def streams_257(fixed: bool) -> str:
    """Opening one stream more than 256 waits without end."""
    left, right = conn_pair()
    async with muxer(left) as mux, muxer(right) as receiver, trio.open_nursery() as nursery:

        async def accept() -> None:
            while True:
                await receiver.accept_stream()

        nursery.start_soon(accept)
        for _ in range(256):
            await (await mux.open_stream()).write(b"x")
        with trio.move_on_after(300) as waiting, suppress(BaseLibp2pError):
            await mux.open_stream()
        nursery.cancel_scope.cancel()
    return "opening stream 257 waits for more than 300 s" if waiting.cancelled_caught else ""
