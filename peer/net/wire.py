"""Frames of one call: a length-prefixed msgpack header, then raw payload bytes. The answer has the same shape.

    request   u32 size | [method, payload size, deadline in ms, body] | payload
    reply     u32 size | [error code or "", message, payload size, body] | payload

Sizes are checked before anything is read or allocated. A payload is read into one preallocated buffer. Big payloads are
sent in pieces of 1 MiB (the size at which py-libp2p costs least). Deadlines are the caller's: every await can be
cancelled.
"""

from __future__ import annotations

import struct
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import Annotated, ClassVar, Final, TypeVar

import msgspec
import trio

from peer.buffers import allocate
from peer.decoding import MALFORMED, told
from peer.errors import ConnectionLost, ProtocolViolation, TooLarge
from peer.net.rate_limit import Meter

PIECE_BYTES: Final = 1 << 20
SMALL_BYTES: Final = 64 << 10  # header and payload up to this size leave in a single write
HEADER_BYTES: Final = 16 << 10
"""The largest header of a method that declares no other, and of a request before the method is known."""
LARGE_HEADER_BYTES: Final = 1 << 20
"""The largest that a method may declare: for heads, plans and rosters, which grow with members and slices."""
_NAME_AHEAD_BYTES: Final = 260  # hold the method of a request: at most 255 characters behind 3 bytes
_SIZE: Final = struct.Struct("!I")

Buffer = bytes | bytearray | memoryview
PayloadBytes = Annotated[int, msgspec.Meta(ge=0, le=1 << 53)]
Header = TypeVar("Header", "RequestHeader", "ReplyHeader")


class RequestHeader(msgspec.Struct, frozen=True, array_like=True):
    """First frame of a call."""

    method: Annotated[str, msgspec.Meta(max_length=128)]
    payload_bytes: PayloadBytes
    timeout_ms: Annotated[int, msgspec.Meta(ge=-(1 << 62), le=1 << 62)]
    """The rest of the caller's deadline: clocks are never compared."""
    body: msgspec.Raw


class ReplyHeader(msgspec.Struct, frozen=True, array_like=True):
    """First frame of an answer."""

    code: Annotated[str, msgspec.Meta(max_length=128)]
    """Empty for success, else the name of the error."""
    message: Annotated[str, msgspec.Meta(max_length=1 << 16)]
    payload_bytes: PayloadBytes
    body: msgspec.Raw


def _first_name(encoded: bytearray) -> str:
    """Return the string that comes first in a msgpack array of four. Raises what is in MALFORMED."""
    long = encoded[1] == 0xD9  # a length byte follows; else the low bits of this byte are the length
    if encoded[0] != 0x94 or not (long or encoded[1] & 0xE0 == 0xA0):
        raise msgspec.DecodeError("expected an array of four that begins with a short string")
    end = 3 + encoded[2] if long else 2 + (encoded[1] & 0x1F)
    return msgspec.msgpack.decode(encoded[1:end], type=str)


class Channel(ABC):
    """The two-way byte stream of one call with an authenticated peer.

    Exactly one of `finish` and `abandon` ends it; neither blocks.
    """

    peer: str
    bulk: ClassVar[bool] = False
    """Whether it belongs to a connection for payloads."""

    @abstractmethod
    async def send(self, data: Buffer) -> None:
        """Write everything. Raises ConnectionLost if the stream or its connection has ended."""

    def turn(self) -> AbstractAsyncContextManager[None]:
        """Hold the right to send a big payload inside the block."""
        return nullcontext()

    @abstractmethod
    async def receive(self, max_bytes: int) -> Buffer:
        """Return 1 to `max_bytes` bytes. Raises ConnectionLost at the end of the stream (a reset looks the same)."""

    @abstractmethod
    async def receive_into(self, view: memoryview) -> int:
        """Fill `view` from the front and return the count, at least 1. The caller continues until `view` is full.

        Raises as `receive`.
        """

    @abstractmethod
    def finish(self) -> None:
        """End a call that both sides have completed."""

    @abstractmethod
    def abandon(self) -> None:
        """Give up the call: the other side sees the stream end."""


class Frames:
    """Headers and payloads over one channel, counted and rate-capped by `meter`."""

    def __init__(self, channel: Channel, meter: Meter, header_max_bytes: int = HEADER_BYTES) -> None:
        self._channel = channel
        self._peer = channel.peer
        self._meter = meter
        self.header_max_bytes = header_max_bytes
        """The largest header that is sent or received."""
        self._ahead = bytearray()  # bytes read beyond a header: its first read takes what is there

    async def send(
        self, header: RequestHeader | ReplyHeader, payload: memoryview, advance: Callable[[int], None] | None = None
    ) -> None:
        """Write one header and its payload, a flat byte view. Raises TooLarge before anything is sent.

        `advance` is called with the number of payload bytes that have left.
        """
        encoded = msgspec.msgpack.encode(header)
        frame = _SIZE.pack(len(encoded)) + encoded
        if len(frame) > self.header_max_bytes:
            raise TooLarge(f"a header of {len(frame)} bytes is over the limit of {self.header_max_bytes}")
        self._meter.upload.charge(len(frame))
        if len(frame) + payload.nbytes <= SMALL_BYTES:
            self._meter.upload.charge(payload.nbytes)
            frame += payload
            await self._channel.send(frame)
            self._meter.sent(self._peer, len(frame), self._channel.bulk)
            return
        async with self._channel.turn():
            await self._channel.send(frame)  # only now: a peer that has the header waits for the payload
            self._meter.sent(self._peer, len(frame), self._channel.bulk)
            await self._send_pieces(payload, advance)

    async def _send_pieces(self, payload: memoryview, advance: Callable[[int], None] | None) -> None:
        step = self._meter.upload.piece_bytes(PIECE_BYTES)
        for start in range(0, payload.nbytes, step):
            piece = payload[start : start + step]
            await self._meter.upload.take(piece.nbytes)
            await self._channel.send(piece)
            self._meter.sent(self._peer, piece.nbytes, self._channel.bulk)
            if advance is not None:
                advance(piece.nbytes)

    async def header_bytes(self) -> int:
        """Return the size of the header that comes next."""
        await self._read_ahead(_SIZE.size)
        return int(_SIZE.unpack_from(self._ahead)[0])

    async def method_ahead(self) -> str:
        """Return the method of a large request from its first bytes. Raises ProtocolViolation if they name none."""
        await self._read_ahead(_SIZE.size + _NAME_AHEAD_BYTES)
        try:
            return _first_name(self._ahead[_SIZE.size :])
        except MALFORMED as error:
            raise ProtocolViolation(f"a header that names no method: {error}") from error

    async def receive_header(self, type_: type[Header]) -> Header:
        """Read and check one header. Raises ProtocolViolation if it is oversize or malformed."""
        size = await self.header_bytes()
        if size > self.header_max_bytes:
            raise ProtocolViolation(f"a header of {size} bytes, over the limit of {self.header_max_bytes}")
        await self._read_ahead(_SIZE.size + size)
        encoded = bytes(self._ahead[_SIZE.size : _SIZE.size + size])
        del self._ahead[: _SIZE.size + size]
        try:
            header = msgspec.msgpack.decode(encoded, type=type_)
        except MALFORMED as error:
            raise ProtocolViolation(f"a header that is no {type_.__name__}: {told(error)}") from error
        return header

    async def receive_payload(
        self, size_bytes: int, idle_s: float | None = None, advance: Callable[[int], None] | None = None
    ) -> memoryview:
        """Return exactly `size_bytes` bytes in one buffer. The caller has checked the size.

        `advance` is called with the number of bytes that have arrived.

        Raises ConnectionLost after a pause of more than `idle_s`.
        """
        view = allocate(size_bytes)
        ready = min(len(self._ahead), size_bytes)
        view[:ready] = self._ahead[:ready]
        del self._ahead[:ready]
        if advance is not None:
            advance(ready)
        if ready == size_bytes:
            return view
        started, ahead = time.perf_counter(), ready
        with trio.CancelScope() as idle:
            while ready < size_bytes:
                if idle_s is not None:
                    idle.deadline = trio.current_time() + idle_s
                step = self._meter.download.piece_bytes(PIECE_BYTES)
                count = await self._channel.receive_into(view[ready : ready + step])
                ready += count
                if advance is not None:
                    advance(count)
                idle.deadline = float("inf")  # a wait for our own download cap is not the peer's pause
                await self._count(count)
        if idle.cancelled_caught:
            raise ConnectionLost(f"{self._peer} paused for more than {idle_s:g} s at {ready} of {size_bytes} bytes")
        self._meter.read(self._peer, size_bytes - ahead, time.perf_counter() - started)
        return view

    async def ended(self) -> None:
        """Return when the other side ends the channel. Raises ProtocolViolation if it sends more bytes."""
        if not self._ahead:
            try:
                self._ahead += await self._channel.receive(1)
            except ConnectionLost:
                return
        raise ProtocolViolation("bytes after the end of a request")

    async def discard(self) -> None:
        """Read and drop bytes until the other side ends the channel."""
        self._ahead.clear()
        try:
            while True:
                await self._receive(PIECE_BYTES)
        except ConnectionLost:
            return

    async def _read_ahead(self, size_bytes: int) -> None:
        """Read at least this many bytes. Only the first read may take more: bytes ahead are memory of no budget."""
        while len(self._ahead) < size_bytes:
            self._ahead += await self._receive(size_bytes - len(self._ahead) if self._ahead else HEADER_BYTES)

    async def _receive(self, max_bytes: int) -> Buffer:
        chunk = await self._channel.receive(self._meter.download.piece_bytes(max_bytes))
        await self._count(len(chunk))
        return chunk

    async def _count(self, size_bytes: int) -> None:
        self._meter.received(self._peer, size_bytes)
        await self._meter.download.take(size_bytes)
