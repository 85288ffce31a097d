"""One stream of a Yamux connection: flow control both ways, under the caller's deadline.

It differs from stock 0.8.1 in three ways. A write waits for window as long as its caller lets it (stock gives up
after 5 s). Bytes received before the connection ended can still be read. An unread stream holds at most its window.
"""

from __future__ import annotations

from collections import deque
from types import TracebackType
from typing import Any, Final, Protocol

import trio
from libp2p.abc import IMuxedStream
from libp2p.stream_muxer.exceptions import MuxedStreamClosed, MuxedStreamEOF, MuxedStreamReset

from peer.net.libp2p_fixes.send_queue import SendQueue

WINDOW_INITIAL: Final = 256 * 1024  # bytes, fixed by the protocol
WINDOW_MAX: Final = 16 << 20
# A frame of this body and its header fill exactly one Noise message (65535 less a 16 byte tag).
FRAME_BODY_MAX: Final = 65535 - 16 - 12
# Two names of protocols: what their negotiation alone makes us write.
_NEGOTIATION_MAX: Final = 64
# Smaller pieces are copied together: a view of a few bytes would keep its whole Noise message alive.
_KEEP_VIEW_MIN: Final = 32 * 1024
# A reader that empties half its window faster than this is slowed down by the window: double it.
_FAST_READER_S: Final = 0.05

Buffer = bytes | bytearray | memoryview
_NO_CHUNKS: Final[deque[memoryview | bytearray]] = deque()  # of all silent streams: one of its own takes 768 bytes


class FrameSink(Protocol):
    """The methods that a stream calls on its connection. None of them waits."""

    send_queue: SendQueue

    @property
    def is_established(self) -> bool: ...
    def rtt(self) -> float: ...
    def get_remote_address(self) -> tuple[str, int] | None: ...
    def send_data(self, stream_id: int, body: memoryview) -> None: ...
    def send_fin(self, stream_id: int) -> None: ...
    def send_reset(self, stream_id: int) -> None: ...
    def send_window_update(self, stream_id: int, increment: int) -> None: ...
    def extend_window(self, wanted: int) -> int: ...
    def charge(self, count: int) -> None: ...
    def settle(self, stream: YamuxStream) -> None: ...


class YamuxStream(IMuxedStream):
    """A bidirectional byte stream. One task may read while another writes; concurrent writers take turns."""

    def __init__(self, stream_id: int, sink: FrameSink, is_initiator: bool) -> None:
        self.stream_id = stream_id
        self._sink = sink
        self.muxed_conn: Any = sink  # libp2p's name for the connection
        self.is_initiator = is_initiator
        self.holds_slot = is_initiator  # one of the connection's outgoing streams, until we are done writing
        self.send_closed = False
        self.recv_closed = False
        self.was_reset = False
        self._written = 0
        self.got_fin = False  # nothing is missing: stays true when the stream is reset afterwards
        self.left_at: float | None = None  # when close() was called; a stream left half open is then swept
        self.send_window = WINDOW_INITIAL
        self.recv_window = WINDOW_INITIAL  # what the peer may still send
        self.window_target = WINDOW_INITIAL
        self.buffered = 0
        self._chunks = _NO_CHUNKS
        self._consumed = 0  # bytes read and not yet granted again
        self._granted_at = -1.0
        self._readable = trio.lowlevel.ParkingLot()
        self._writable = trio.lowlevel.ParkingLot()
        self._write_turn = trio.Lock()

    # -- what libp2p and its users call ---------------------------------------------------------------------------

    async def write(self, data: Buffer) -> None:
        """Send all of `data`. Blocks while the peer's window is closed; returns once the connection has taken it.

        May be cancelled at any point without harm to the connection; reset the stream after that.
        Raises MuxedStreamReset (by either side, or the connection is gone) or MuxedStreamClosed (we closed it).
        """
        view = memoryview(data).cast("B")
        try:
            self._write_turn.acquire_nowait()  # no checkpoint: the frame that opened the stream leaves with this one
        except trio.WouldBlock:
            await self._write_turn.acquire()
        try:
            while len(view):
                self._check_writable()
                count = min(len(view), self.send_window, FRAME_BODY_MAX)
                if not count:
                    await self._writable.park()
                    continue
                if self._sink.send_queue.is_full_for(count):
                    await self._sink.send_queue.wait_room()
                    continue
                self.send_window -= count
                self._written += count
                self._sink.send_data(self.stream_id, view[:count])
                view = view[count:]
        finally:
            self._write_turn.release()

    async def read(self, n: int | None = None) -> bytes:
        """Return 1 to `n` bytes (None or -1: all that has arrived), waiting for the first.

        Raises MuxedStreamEOF after the peer's last byte, MuxedStreamReset after a reset or a lost connection.
        """
        if n == 0:
            return b""
        await self._wait_readable()
        wanted = self.buffered if n is None or n < 0 else min(n, self.buffered)
        first = self._chunks[0]
        if len(first) == wanted:
            data = bytes(first)
            self._chunks.popleft()
        else:
            taken = bytearray(wanted)
            self._take_into(memoryview(taken))
            data = bytes(taken)
        self._after_read(wanted)
        return data

    async def read_into(self, buffer: bytearray | memoryview) -> int:
        """Fill `buffer` from the front with what has arrived and return the count, at least 1. Raises as `read`."""
        view = memoryview(buffer).cast("B")
        if not len(view):
            return 0
        await self._wait_readable()
        count = min(len(view), self.buffered)
        self._take_into(view[:count])
        self._after_read(count)
        return count

    async def take_prefix(self, prefix: bytes) -> bool:
        """Wait for bytes, and take `prefix` if one frame brought all of it first; else take nothing. Raises as `read`.

        Returns whether it was taken.
        """
        await self._wait_readable()
        if bytes(self._chunks[0][: len(prefix)]) != prefix:
            return False
        self._take_into(memoryview(bytearray(len(prefix))))
        self._after_read(len(prefix))
        return True

    async def close_write(self) -> None:
        """Finish writing: the peer reads EOF. Reading may continue."""
        self._finish_writing()
        await trio.lowlevel.checkpoint()

    async def close(self) -> None:
        """Finish writing and stop using the stream: if the peer does not close it soon, it is reset."""
        self.finish()
        await trio.lowlevel.checkpoint()

    def finish(self) -> None:
        """Close without waiting."""
        if self.left_at is None:
            self.left_at = trio.current_time()
        self._finish_writing()

    async def reset(self) -> None:
        """End the stream in both directions and drop buffered bytes."""
        self.abandon()
        await trio.lowlevel.checkpoint()

    def abandon(self) -> None:
        """Reset without waiting."""
        if not self.was_reset and not (self.send_closed and self.recv_closed):
            self._sink.send_reset(self.stream_id)
        self.end_by_reset()
        self._drop_buffered()

    @property
    def is_closed(self) -> bool:
        return self.was_reset or (self.send_closed and self.recv_closed)

    @property
    def is_answered(self) -> bool:
        """Whether we have written more than the name of the protocol, or all that we had to say."""
        return self.send_closed or self._written > _NEGOTIATION_MAX

    def set_deadline(self, ttl: int) -> None:
        raise NotImplementedError("deadlines are the caller's cancel scopes: use trio.fail_after")

    def get_remote_address(self) -> tuple[str, int] | None:
        return self._sink.get_remote_address()

    async def __aenter__(self) -> YamuxStream:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    # -- what the connection's read loop calls; none of these waits ----------------------------------------------

    def receive(self, piece: memoryview) -> None:
        """Take a piece of a DATA body. The window has been charged for it."""
        if self.was_reset:
            return
        if self._chunks is _NO_CHUNKS:
            self._chunks = deque()
        self.buffered += len(piece)
        self._sink.charge(len(piece))
        if len(piece) >= _KEEP_VIEW_MIN:
            self._chunks.append(piece)
        elif self._chunks and isinstance(last := self._chunks[-1], bytearray) and len(last) < _KEEP_VIEW_MIN:
            last += piece
        else:
            self._chunks.append(bytearray(piece))
        if self._readable:
            self._readable.unpark_all()

    def receive_window(self, increment: int) -> None:
        self.send_window += increment
        if self._writable:
            self._writable.unpark_all()

    def receive_fin(self) -> None:
        self.recv_closed = self.got_fin = True
        self._readable.unpark_all()
        self._sink.settle(self)

    def end_by_reset(self) -> None:
        """End a stream that either side has reset, or whose connection is gone. Buffered bytes stay readable."""
        self.was_reset = self.send_closed = self.recv_closed = True
        self._readable.unpark_all()
        self._writable.unpark_all()
        self._sink.settle(self)

    def _finish_writing(self) -> None:
        if not self.send_closed:
            self.send_closed = True
            self._sink.send_fin(self.stream_id)
            self._writable.unpark_all()
            self._sink.settle(self)

    # -- flow control --------------------------------------------------------------------------------------------

    def _check_writable(self) -> None:
        if self.was_reset or not self._sink.is_established:
            raise MuxedStreamReset("the stream was reset")
        if self.send_closed:
            raise MuxedStreamClosed("the stream is closed for writing")

    async def _wait_readable(self) -> None:
        if self._chunks:
            await trio.lowlevel.checkpoint()
        while not self._chunks:
            if self.got_fin:
                raise MuxedStreamEOF("the peer closed the stream")
            if self.was_reset:
                raise MuxedStreamReset("the stream was reset")
            await self._readable.park()

    def _take_into(self, view: memoryview) -> None:
        """Move len(view) buffered bytes into `view`. There must be enough."""
        at = 0
        while at < len(view):
            chunk = self._chunks[0]
            count = min(len(chunk), len(view) - at)
            view[at : at + count] = memoryview(chunk)[:count]
            at += count
            if count == len(chunk):
                self._chunks.popleft()
            elif isinstance(chunk, memoryview):
                self._chunks[0] = chunk[count:]
            else:
                del chunk[:count]

    def _after_read(self, count: int) -> None:
        self.buffered -= count
        self._sink.charge(-count)
        if self.recv_closed:
            return
        self._consumed += count
        if self._consumed >= self.window_target // 2:
            self._grant()

    def _grant(self) -> None:
        """Grant the peer the window that was read, and more if the window is what slows it down."""
        now = trio.current_time()
        increment = self._consumed
        if now - self._granted_at < max(_FAST_READER_S, 4 * self._sink.rtt()):
            growth = self._sink.extend_window(min(self.window_target, WINDOW_MAX - self.window_target))
            self.window_target += growth
            increment += growth
        self._granted_at = now
        self._consumed = 0
        self.recv_window += increment
        self._sink.send_window_update(self.stream_id, increment)

    def _drop_buffered(self) -> None:
        self._sink.charge(-self.buffered)
        self.buffered = 0
        self._chunks.clear()
