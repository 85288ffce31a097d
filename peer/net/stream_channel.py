"""A call's byte stream over py-libp2p: one Yamux stream a call, without waiting for the protocol negotiation."""

from __future__ import annotations

from typing import Final

import trio
from libp2p.exceptions import BaseLibp2pError

from peer.errors import ConnectionLost
from peer.net.libp2p_fixes.yamux_stream import YamuxStream
from peer.net.wire import Buffer, Channel

PROTOCOL: Final = "/barnraise/1/rpc"
LOST: Final = (BaseLibp2pError, OSError, trio.BrokenResourceError, trio.ClosedResourceError)
"""Exceptions of the library when a stream or its connection has ended."""


def _line(text: str) -> bytes:
    return bytes([len(text) + 1]) + text.encode() + b"\n"


def greeting_of(protocol: str) -> bytes:
    """Return the two lines with which a stream of that protocol begins."""
    return _line("/multistream/1.0.0") + _line(protocol)


GREETING: Final = greeting_of(PROTOCOL)
"""The two lines of multistream-select 1.0 that both sides send. Ours come with the first bytes, the request or the
answer, and we do not wait for the other's (as in go-libp2p's lazy negotiation), so a call takes one round trip instead
of three."""


class StreamChannel(Channel):
    """One libp2p stream. `owes_greeting`: ours is yet to be sent, `expects_greeting`: the other's is yet to come."""

    def __init__(
        self,
        peer: str,
        stream: YamuxStream,
        *,
        owes_greeting: bool,
        expects_greeting: bool,
        greeting: bytes = GREETING,
    ) -> None:
        self.peer = peer
        self._greeting = greeting
        self._stream = stream
        self._owes_greeting = owes_greeting
        self._expects_greeting = expects_greeting

    async def send(self, data: Buffer) -> None:
        if self._owes_greeting:
            self._owes_greeting = False
            data = self._greeting + data
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
            return await self._stream.read_into(view)
        except LOST as error:
            raise ConnectionLost(f"the connection to {self.peer} ended while receiving") from error

    async def _receive_greeting(self) -> bytes:
        got = b""
        while len(got) < len(self._greeting):
            got += await self._read(4096)
            if not self._greeting.startswith(got[: len(self._greeting)]):
                raise ConnectionLost(f"{self.peer} does not speak our protocol: it is no Barnraise peer")
        return got[len(self._greeting) :]

    async def _read(self, max_bytes: int) -> bytes:
        try:
            return await self._stream.read(max_bytes)
        except LOST as error:
            raise ConnectionLost(f"the connection to {self.peer} ended while receiving") from error

    def finish(self) -> None:
        self._stream.finish()  # if the other side does not close soon, our Yamux resets the stream

    def abandon(self) -> None:
        self._stream.abandon()
