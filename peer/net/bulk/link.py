"""Many calls over one TLS connection, payload after payload.

With one connection a call, the connection is idle while its call waits and slow when the answer comes: its congestion
window must grow again (RFC 5681, 4.1) while other calls take the link. Here all calls to a peer share one connection,
one payload at a time. It stays warm while there is work, and every payload arrives as early as it can.

    piece     u64 call | u8 kind (0 data, 1 the call's first data, 2 the call is given up) | u32 size | bytes

Data is never empty, and a piece that gives a call up always is.

Small pieces are read at once, up to 64 KiB a call. A big piece stays on the connection until its call reads it,
straight into its final buffer. All later pieces wait, so payloads take no memory that their calls have not claimed. A
payload is sent without interruption, so no half-read one waits behind another. A call that reads nothing for
`STANDSTILL_S`, because there is no memory for it, is given up, so that it no longer delays the others.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager, suppress
from itertools import count
from typing import Final

import trio

from peer.errors import ConnectionLost, ProtocolViolation
from peer.net.bulk.tls import TlsSocket
from peer.net.rate_limit import Meter
from peer.net.wire import SMALL_BYTES, Buffer, Channel

CALLS_MAX: Final = 256  # under way on one connection: more than a host allows a peer
STANDSTILL_S: Final = 15.0  # shorter than the kernel's timeout for a connection on which the other side cannot send
GIVE_UP_S: Final = 120.0  # without a byte sent while calls are to be given up: the other side reads nothing
PIECE_BYTES: Final = 512 << 10  # a piece that is begun is sent to its end, also if its call ends meanwhile
_PREFIX: Final = struct.Struct("!QBI")
_DATA, _FIRST, _GIVEN_UP = 0, 1, 2
_HEAD_BYTES: Final = (1 << 14) - _PREFIX.size  # sent with the prefix in one TLS record

Serve = Callable[[Channel], Awaitable[bool]]
Penalize = Callable[[str, str], None]


class BulkStream(Channel):
    """One call over a connection."""

    bulk = True

    def __init__(self, link: BulkConnection, number: int, begun: bool) -> None:
        self.peer = link.peer
        self._link = link
        self._number = number
        self._begun = begun
        self._inbox = bytearray()
        self._on_link = 0  # unread bytes of the connection's current piece, if it is ours
        self._is_taking = False
        self._over = False  # one side or both have ended the call
        self._changed = trio.lowlevel.ParkingLot()

    async def send(self, data: Buffer) -> None:
        view = memoryview(data).cast("B")
        for start in range(0, len(view), PIECE_BYTES):
            if self._over:
                raise ConnectionLost(f"{self.peer} ended the call")
            kind, self._begun = _DATA if self._begun else _FIRST, True
            await self._link.write(self._number, kind, view[start : start + PIECE_BYTES])

    def turn(self) -> AbstractAsyncContextManager[None]:
        return self._link.turn

    async def receive(self, max_bytes: int) -> Buffer:
        await self._arrived()
        buffer = memoryview(bytearray(min(max_bytes, len(self._inbox) or self._on_link)))
        return buffer[: await self.receive_into(buffer)]

    async def receive_into(self, view: memoryview) -> int:
        await self._arrived()
        if self._inbox:
            size = min(len(view), len(self._inbox))
            view[:size] = self._inbox[:size]
            del self._inbox[:size]
            return size
        self._is_taking = True
        size = await self._link.read(view[: self._on_link])
        self._on_link -= size
        self._changed.unpark_all()
        return size

    def finish(self) -> None:
        self._end()

    def abandon(self) -> None:
        if self._begun and not self._over:
            self._link.give_up(self._number)
        self._end()

    async def take(self, size: int) -> int:
        """Take a piece of `size` bytes, which the connection has reached. Returns the bytes that are left of it, once
        it is read or the call is over."""
        if self._over:
            return size
        if len(self._inbox) + size <= SMALL_BYTES:
            await self._put_in_inbox(size)
            return 0
        self._on_link, self._is_taking = size, False
        self._changed.unpark_all()
        looks = 0
        while self._on_link and not self._over:
            with trio.move_on_after(STANDSTILL_S / 2) as timeout:
                await self._changed.park()
            looks += timeout.cancelled_caught and not self._is_taking
            if looks == 2:  # one timeout may come from our own standstill
                self._link.give_up(self._number)
                self.lost()
        left, self._on_link = self._on_link, 0
        return left

    async def _put_in_inbox(self, size: int) -> None:
        """Read a small piece as it arrives: there is a deadline for headers."""
        piece = memoryview(bytearray(size))
        while size:
            count = await self._link.read(piece[:size])
            self._inbox += piece[:count]
            size -= count
            self._changed.unpark_all()

    def lost(self) -> None:
        """End the call: the other side has given it up, or the connection has ended."""
        self._over = True
        self._changed.unpark_all()

    def _end(self) -> None:
        self.lost()
        self._link.forget(self._number)

    async def _arrived(self) -> None:
        while not self._inbox and not self._on_link:
            if self._over:
                raise ConnectionLost(f"{self.peer} ended the call")
            await self._changed.park()


class BulkConnection:
    """The calls over one connection with `peer`: ours, begun by `channel`, or the other side's, answered by `serve`.

    `penalize` is called with a peer that breaks the protocol, and how it did."""

    def __init__(
        self, nursery: trio.Nursery, peer: str, tls: TlsSocket, meter: Meter, penalize: Penalize, serve: Serve | None
    ) -> None:
        self.peer: Final = peer
        self.turn: Final = trio.Lock()
        """Held to send a big payload."""
        self.idle_since: float | None = trio.current_time()
        """None while a call is under way."""
        self._nursery = nursery
        self.tls: Final = tls
        self._meter = meter
        self._penalize = penalize
        self._serve = serve
        self._calls: dict[int, BulkStream] = {}
        self._numbers = count()
        self._giving_up = 0
        self._writing = trio.Semaphore(1)  # held for one piece; another task may complete a piece and release it
        self._fewer = trio.lowlevel.ParkingLot()
        self._leaving = self._ended = False

    @property
    def is_open(self) -> bool:
        """Whether calls may be begun."""
        return not self._leaving and not self._ended

    def channel(self) -> BulkStream | None:
        """Open a channel for a call of ours. Returns None if too many are under way."""
        return self._add(next(self._numbers), begun=False) if len(self._calls) < CALLS_MAX else None

    async def run(self) -> None:
        """Read until the connection ends, then end its calls."""
        prefix = memoryview(bytearray(_PREFIX.size))
        try:
            while True:
                await self.read_all(prefix)
                await self._read_piece(*_PREFIX.unpack(prefix))
        except ConnectionLost:
            pass
        except ProtocolViolation as error:
            self._penalize(self.peer, str(error))
        finally:
            self.close()

    def close(self) -> None:
        """End the connection and its calls now."""
        self._ended = True
        self.tls.close()
        for call in self._calls.values():
            call.lost()

    def leave(self) -> None:
        """End the connection when the calls under way have ended."""
        self._leaving = True
        if not self._calls:
            self.close()

    def forget(self, number: int) -> None:
        """Drop a call that is over on our side. Data that still arrives for it is discarded."""
        if self._calls.pop(number, None) is not None:
            self._fewer.unpark_all()
            if not self._calls:
                self.idle_since = trio.current_time()
                if self._leaving:
                    self.close()

    def give_up(self, number: int) -> None:
        """Tell the other side that a call is over."""
        if not self._ended:
            self._giving_up += 1
            self._nursery.start_soon(self._give_up, number)

    async def write(self, number: int, kind: int, data: memoryview) -> None:
        """Send one piece. If cancelled in the middle, the rest is still sent, because other pieces follow."""
        await self._writing.acquire()
        head = _PREFIX.pack(number, kind, len(data)) + data[:_HEAD_BYTES]
        parts = deque(part for part in (memoryview(head), data[_HEAD_BYTES:]) if part)
        try:
            await self._send(parts)
        except trio.Cancelled:
            if self._ended:
                self._writing.release()
            else:
                self._nursery.start_soon(self._send_rest, deque(memoryview(bytes(part)) for part in parts))
            raise
        except ConnectionLost:
            self.close()  # a part of the piece may have been sent
            self._writing.release()
            raise
        self._writing.release()
        await trio.lowlevel.checkpoint()

    async def read(self, view: memoryview) -> int:
        """Fill `view` from the front with what has arrived, at least one byte, and return the count.

        If the connection has ended, ends all its calls and raises ConnectionLost."""
        try:
            return await self.tls.receive_into(view, expected=len(view))
        except ConnectionLost:
            self.close()
            raise

    async def read_all(self, view: memoryview) -> None:
        ready = 0
        while ready < len(view):
            ready += await self.read(view[ready:])

    async def _read_piece(self, number: int, kind: int, size: int) -> None:
        call = self._calls.get(number)
        # empty data is never sent: each piece would cost microseconds here and 13 bytes there
        if size > PIECE_BYTES or kind > _GIVEN_UP or (size == 0) != (kind == _GIVEN_UP):
            raise ProtocolViolation(f"a bulk piece of kind {kind} and {size} bytes")
        if kind == _FIRST and (call is not None or self._serve is None):
            raise ProtocolViolation("a bulk call that was begun before, or may not be begun here")
        if kind == _FIRST:
            call = await self._begin(number)
        if kind == _GIVEN_UP and call is not None:
            call.lost()
        if kind != _GIVEN_UP:
            await self._throw_away(size if call is None else await call.take(size))

    async def _throw_away(self, size: int) -> None:
        """Read and drop bytes, counted and under the download cap."""
        scratch = memoryview(bytearray(min(size, self._meter.download.piece_bytes(SMALL_BYTES))))
        while size:
            count = await self.read(scratch[:size])
            size -= count
            self._meter.received(self.peer, count)
            await self._meter.download.take(count)

    async def _begin(self, number: int) -> BulkStream:
        """Answer a call of the other side."""
        assert self._serve is not None
        while len(self._calls) + self._giving_up >= CALLS_MAX:
            await self._fewer.park()
        call = self._add(number, begun=True)
        self._nursery.start_soon(self._serve, call)
        return call

    def _add(self, number: int, begun: bool) -> BulkStream:
        self.idle_since = None
        call = self._calls[number] = BulkStream(self, number, begun)
        return call

    async def _give_up(self, number: int) -> None:
        try:
            with suppress(ConnectionLost):
                await self.write(number, _GIVEN_UP, memoryview(b""))
        finally:
            self._giving_up -= 1
            self._fewer.unpark_all()

    async def _send(self, parts: deque[memoryview]) -> None:
        """Send all of `parts`, and remove from it what was sent, so that another task can send the rest."""
        while parts:
            parts[0] = parts[0][self.tls.send_now(parts[0]) or await self._send_some(parts[0]) :]
            if not parts[0]:
                parts.popleft()

    async def _send_some(self, data: memoryview) -> int:
        """Send the beginning of `data` once the other side takes more, and return the count, which may be 0."""
        sent = 0
        with trio.move_on_after(GIVE_UP_S) as timeout:
            sent = await self.tls.send_some(data)
        if timeout.cancelled_caught and self._giving_up:
            self.close()
        return sent

    async def _send_rest(self, parts: deque[memoryview]) -> None:
        try:
            await self._send(parts)
        except ConnectionLost:
            self.close()
        finally:
            self._writing.release()
