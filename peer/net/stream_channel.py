"""A call's byte stream over py-libp2p: one Yamux stream a call, without waiting for the protocol negotiation."""

from __future__ import annotations

from contextlib import suppress
from typing import Any, Final

import trio
from libp2p.exceptions import BaseLibp2pError

from peer.errors import ConnectionLost
from peer.net.wire import Buffer, Channel

PROTOCOL: Final = "/barnraise/1/rpc"
LOST: Final = (BaseLibp2pError, OSError, trio.BrokenResourceError, trio.ClosedResourceError)
"""What the library raises when a stream or its connection has ended."""


def _line(text: str) -> bytes:
    return bytes([len(text) + 1]) + text.encode() + b"\n"


# multistream-select 1.0: both sides send these two lines. We do not wait for the other's (as in go-libp2p's lazy
# negotiation), so a call takes one round trip instead of three.
_GREETING: Final = _line("/multistream/1.0.0") + _line(PROTOCOL)


class StreamChannel(Channel):
    """One libp2p stream. `dialled`: we opened it, so we send the greeting and expect its echo."""

    def __init__(self, peer: str, stream: Any, nursery: trio.Nursery, dialled: bool) -> None:
        self.peer = peer
        self._stream = stream
        self._nursery = nursery
        self._owes_greeting = dialled
        self._expects_greeting = dialled

    async def send(self, data: Buffer) -> None:
        if self._owes_greeting:
            self._owes_greeting = False
            data = _GREETING + bytes(data)
        try:
            await self._stream.write(data)
        except LOST as error:
            raise ConnectionLost(f"the connection to {self.peer} ended while sending") from error

    async def receive(self, max_bytes: int) -> Buffer:
        if self._expects_greeting:
            rest = await self._receive_greeting()
            self._expects_greeting = False
            if rest:
                return rest
        return await self._read(max_bytes)

    async def receive_into(self, view: memoryview) -> int:
        if self._expects_greeting:
            raise AssertionError("a payload is read after its header")
        try:
            count: int = await self._stream.muxed_stream.read_into(view)
        except LOST as error:
            raise ConnectionLost(f"the connection to {self.peer} ended while receiving") from error
        return count

    async def _receive_greeting(self) -> bytes:
        got = b""
        while len(got) < len(_GREETING):
            got += await self._read(4096)
            if not _GREETING.startswith(got[: len(_GREETING)]):
                raise ConnectionLost(f"{self.peer} does not speak {PROTOCOL}: it is no Barnraise peer")
        return got[len(_GREETING) :]

    async def _read(self, max_bytes: int) -> bytes:
        try:
            data: bytes = await self._stream.read(max_bytes)
        except LOST as error:
            raise ConnectionLost(f"the connection to {self.peer} ended while receiving") from error
        if not data:
            raise ConnectionLost(f"the connection to {self.peer} ended while receiving")
        return data

    def finish(self) -> None:
        self._nursery.start_soon(self._close)

    def abandon(self) -> None:
        self._nursery.start_soon(self._reset)

    async def _close(self) -> None:
        with suppress(*LOST):
            await self._stream.close()  # if the other side does not close soon, our Yamux resets the stream

    async def _reset(self) -> None:
        with suppress(*LOST):
            await self._stream.reset()
