"""The Yamux multiplexer (https://github.com/hashicorp/yamux/blob/master/spec.md), in place of the one of 0.8.1.

The stock one lets a peer overrun its window until our memory is gone. It tears a frame when a writing task is
cancelled (7), never notices a dead link (8), and waits without end to open a 257th stream. Here:

- the read loop checks every frame against the window granted and ends the connection of a peer that overruns it;
- one task per connection does all writing (`send_queue`), so a caller may be cancelled anywhere and frames stay whole;
- received data is bounded per stream, connection and process, and so are the answers that a peer makes us queue;
- three unanswered pings end the connection, and closing takes at most `GOODBYE_S`;
- a peer that opens streams for nothing is dropped (`yamux_inbound`).

The read loop never waits for a write, so a peer that does not read cannot stop us from reading.
"""

from __future__ import annotations

import inspect
import logging
import struct
import weakref
from collections.abc import Awaitable, Callable
from typing import Any, ClassVar, Final

import trio
from libp2p.abc import IMuxedConn, ISecureConn
from libp2p.connection_types import ConnectionType
from libp2p.exceptions import BaseLibp2pError
from libp2p.peer.id import ID
from libp2p.stream_muxer import muxer_multistream
from libp2p.stream_muxer.exceptions import MuxedConnUnavailable
from multiaddr import Multiaddr

from peer.net.libp2p_fixes.send_queue import SendQueue
from peer.net.libp2p_fixes.yamux_inbound import InboundStreams, YamuxViolation
from peer.net.libp2p_fixes.yamux_outbound import STREAMS_OUT_MAX, OutboundSlots
from peer.net.libp2p_fixes.yamux_stream import WINDOW_INITIAL, YamuxStream
from peer.net.strangers.allowances import allowances_of
from peer.net.strangers.turns import turns_of

logger = logging.getLogger(__name__)

_HEADER: Final = struct.Struct("!BBHII")  # version, type, flags, stream id, length
_DATA, _WINDOW_UPDATE, _PING, _GO_AWAY = range(4)
_SYN, _ACK, _FIN, _RST = 1, 2, 4, 8

STREAMS_IN_MAX: Final = 1024  # more than a peer may open at once: it frees its slot when its own side closes
GROWTH_MAX: Final = 32 << 20  # bytes of window beyond the initial, all streams of a connection together
BUFFERED_MAX: Final = GROWTH_MAX + STREAMS_OUT_MAX * WINDOW_INITIAL  # the most that an honest peer can make us hold
PROCESS_BUFFERED_MAX: Final = 512 << 20
PING_INTERVAL_S: Final = 15.0
PINGS_UNANSWERED_MAX: Final = 3
HALF_OPEN_MAX_S: Final = 60.0
GOODBYE_S: Final = 0.5


def apply() -> None:
    """Make every connection of this process use this multiplexer."""
    muxer_multistream.Yamux = Yamux  # type: ignore[attr-defined,assignment]


class Yamux(IMuxedConn):
    """One multiplexed connection, a replacement for libp2p's class. `start()` runs it and returns when it is over."""

    _live: ClassVar[weakref.WeakSet[Yamux]] = weakref.WeakSet()
    _process_buffered: ClassVar[int] = 0

    def __init__(
        self,
        secured_conn: ISecureConn,
        peer_id: ID,
        is_initiator: bool | None = None,
        on_close: Callable[[], Awaitable[Any]] | None = None,
    ) -> None:
        self.secured_conn = secured_conn
        self.peer_id = peer_id
        self.on_close = on_close
        self.swarm: Any = None  # libp2p sets it
        self.event_started = trio.Event()
        self.event_closed = trio.Event()
        self._initiator = secured_conn.is_initiator if is_initiator is None else is_initiator
        self._next_stream_id = 1 if self._initiator else 2  # odd ids for the side that dialled
        self._streams: dict[int, YamuxStream] = {}
        self._slots = OutboundSlots()
        self._inbound_streams = 0
        self._accepted_in, self._accepted_out = trio.open_memory_channel[YamuxStream](STREAMS_IN_MAX)
        self._scope = trio.CancelScope()
        self._closing = False
        self._buffered = 0
        self._growth_left = GROWTH_MAX
        self._still_coming = 0  # bytes that the peer may have sent on streams that we have reset since
        self.send_queue = SendQueue(self._on_overflow)
        self._inbound = InboundStreams()
        self.last_used = trio.current_time()
        self._heard = False
        self._ping_id = 0
        self._ping_sent_at = 0.0
        self._rtt_s = 0.0

    # -- what libp2p calls ---------------------------------------------------------------------------------------

    @property
    def is_initiator(self) -> bool:
        return self._initiator

    @property
    def is_established(self) -> bool:
        return self.event_started.is_set() and not self._closing

    @property
    def is_closed(self) -> bool:
        return self.event_closed.is_set()

    def rtt(self) -> float:
        """Return the smoothed round trip in seconds, 0.0 before the first answer."""
        return self._rtt_s

    def get_transport_addresses(self) -> list[Multiaddr]:
        return self.secured_conn.get_transport_addresses()

    def get_connection_type(self) -> ConnectionType:
        return self.secured_conn.get_connection_type()

    def get_remote_address(self) -> tuple[str, int] | None:
        return self.secured_conn.get_remote_address()

    async def start(self) -> None:
        """Run the connection until it ends. Never raises through the peer's fault."""
        Yamux._live.add(self)
        try:
            with self._scope:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._until_it_fails, self._read_loop)
                    nursery.start_soon(self._until_it_fails, self._write_loop)
                    nursery.start_soon(self._keepalive)
                    self.event_started.set()
        finally:
            # Also at the shutdown of the host, when stock 0.8.1 leaves the socket open.
            with trio.CancelScope(shield=True):
                await self._finish()

    async def open_stream(self) -> YamuxStream:
        """Open an outgoing stream. Raises MuxedStreamError if 256 stay open for `OPEN_WAIT_S`."""
        await self._slots.acquire()
        if self._closing:
            self._slots.release()
            raise MuxedConnUnavailable("the connection is closed")
        self.last_used = trio.current_time()
        stream = YamuxStream(self._next_stream_id, self, is_initiator=True)
        self._next_stream_id += 2
        self._streams[stream.stream_id] = stream
        self._send_control(_WINDOW_UPDATE, _SYN, stream.stream_id, 0)
        return stream

    async def accept_stream(self) -> YamuxStream:
        """Return the next stream that the peer opens. Raises MuxedConnUnavailable when the connection ends."""
        try:
            stream = await self._accepted_out.receive()
        except trio.EndOfChannel:
            raise MuxedConnUnavailable("the connection is closed") from None
        if self.swarm is not None and not self._initiator:
            await turns_of(self.swarm).take_for(self)
        return stream

    async def close(self, error_code: int = 0) -> None:
        """Say goodbye, send the queued frames, and end the connection within `GOODBYE_S`."""
        if not self.event_started.is_set():
            await self._finish()
            return
        if not self._closing:
            self._closing = True
            self.send_queue.put(_HEADER.pack(0, _GO_AWAY, 0, 0, error_code))
            self.send_queue.close()
            with trio.move_on_after(GOODBYE_S):
                await self.send_queue.wait_drained()
            self._scope.cancel()
        await self.event_closed.wait()

    def abort(self) -> None:
        """End the connection now, without goodbye, even if a write to the peer is stuck."""
        self._closing = True
        self.send_queue.close()
        self._scope.cancel()

    # -- what the streams call; none of these waits ----------------------------------------------------------------

    def send_data(self, stream_id: int, body: memoryview) -> None:
        # The one copy on the way out: the caller may change its buffer once write() returns.
        self.send_queue.put(b"".join((_HEADER.pack(0, _DATA, 0, stream_id, len(body)), body)))

    def send_fin(self, stream_id: int) -> None:
        self.send_queue.put(_HEADER.pack(0, _WINDOW_UPDATE, _FIN, stream_id, 0))  # behind the stream's data

    def send_reset(self, stream_id: int) -> None:
        self.send_queue.put(_HEADER.pack(0, _WINDOW_UPDATE, _RST, stream_id, 0))

    def send_window_update(self, stream_id: int, increment: int) -> None:
        self._send_control(_WINDOW_UPDATE, 0, stream_id, increment)

    def extend_window(self, wanted: int) -> int:
        """Take up to `wanted` bytes of extra receive window from the connection's budget; returns how many."""
        granted = min(wanted, self._growth_left)
        self._growth_left -= granted
        return granted

    def charge(self, count: int) -> None:
        """Count `count` more (or fewer) received bytes that wait to be read. Ends the connection over its limit."""
        if self.is_closed:
            return
        self._buffered += count
        Yamux._process_buffered += count
        if self._buffered > BUFFERED_MAX:
            raise YamuxViolation(f"{self._buffered} bytes wait unread on this connection")
        if count > 0 and Yamux._process_buffered > PROCESS_BUFFERED_MAX:
            fullest = max(Yamux._live, key=lambda conn: conn._buffered)
            logger.debug("dropping the connection to %s: %d unread bytes", fullest.peer_id, fullest._buffered)
            fullest.abort()

    def settle(self, stream: YamuxStream) -> None:
        """Free a stream's slot once we are done writing, and its entry once both sides are."""
        if stream.holds_slot and stream.send_closed:
            stream.holds_slot = False
            self._slots.release()
        if stream.is_closed and self._streams.pop(stream.stream_id, None) is not None:
            self.last_used = trio.current_time()
            self._inbound.settled(stream)
            self._growth_left += stream.window_target - WINDOW_INITIAL
            self._inbound_streams -= not stream.is_initiator
            self._still_coming += 0 if stream.got_fin else stream.recv_window

    def _send_control(self, kind: int, flags: int, stream_id: int, length: int) -> None:
        self.send_queue.put_control(_HEADER.pack(0, kind, flags, stream_id, length))

    def _on_overflow(self) -> None:
        logger.debug("dropping the connection to %s: the peer does not read our answers", self.peer_id)
        self.abort()

    async def _write_loop(self) -> None:
        await self.send_queue.run(self.secured_conn.write)

    # -- receiving -----------------------------------------------------------------------------------------------

    async def _read_loop(self) -> None:
        header = b""  # a part of a header that has arrived
        stream: YamuxStream | None = None
        body_left = flags = 0
        while True:
            chunk = await self.secured_conn.read(None)  # one Noise message
            if not chunk:
                return
            self._heard = True
            view = memoryview(header + chunk if header else chunk)
            header = b""
            at, end = 0, len(view)
            while at < end:
                if body_left:
                    piece = view[at : at + body_left]
                    at += len(piece)
                    body_left -= len(piece)
                    if stream is not None:
                        stream.receive(piece)
                elif end - at < _HEADER.size:
                    header = bytes(view[at:])
                    break
                else:
                    version, kind, flags, stream_id, length = _HEADER.unpack_from(view, at)
                    at += _HEADER.size
                    if version or kind > _GO_AWAY:
                        raise YamuxViolation(f"frame of version {version}, type {kind}")
                    if kind == _GO_AWAY:
                        return
                    if kind == _PING:
                        self._on_ping(flags, length)
                        continue
                    stream = self._accept(stream_id) if flags & _SYN else self._streams.get(stream_id)
                    body_left = self._on_stream_frame(stream, kind, length)
                if not body_left and stream is not None and flags & (_FIN | _RST):
                    self._on_end(stream, flags)

    def _on_stream_frame(self, stream: YamuxStream | None, kind: int, length: int) -> int:
        """Apply a header. Returns the length of the body that follows it."""
        if kind == _WINDOW_UPDATE:
            if stream is not None:
                stream.receive_window(length)
            return 0
        allowed = self._still_coming if stream is None else stream.recv_window
        if length > allowed:
            raise YamuxViolation(f"{length} bytes sent into a window of {allowed}")
        if stream is None:
            self._still_coming -= length  # skipped
        else:
            stream.recv_window -= length
            if length and self._inbound.settled(stream):
                self._hand_over(stream)
        return length

    def _on_end(self, stream: YamuxStream, flags: int) -> None:
        if flags & _RST:
            if not stream.is_initiator and not stream.is_answered:
                self._inbound.waste()
            stream.end_by_reset()
        else:
            if self._inbound.settled(stream):
                self._hand_over(stream)
            stream.receive_fin()

    def _accept(self, stream_id: int) -> YamuxStream | None:
        """Return the stream that a SYN opens. Resets it and returns None if the peer has too many open."""
        if stream_id == 0 or stream_id % 2 == self._next_stream_id % 2 or stream_id in self._streams:
            raise YamuxViolation(f"SYN for stream {stream_id}")
        full = self._inbound_streams >= STREAMS_IN_MAX or self._closing
        if full or (self.swarm is not None and not allowances_of(self.swarm).take_call(self)):
            self._refuse(stream_id)
            if not full:
                self._inbound.refuse()
            return None
        stream = YamuxStream(stream_id, self, is_initiator=False)
        self._streams[stream_id] = stream
        self.last_used = stream.left_at = trio.current_time()  # as good as left, until it speaks
        self._inbound_streams += 1
        self.send_queue.put_aside(_HEADER.pack(0, _WINDOW_UPDATE, _ACK, stream_id, 0))  # leaves with our first answer
        if (silent := self._inbound.opened(stream)) is not None:
            self._drop(silent)
            self._inbound.waste()
        return stream

    def _hand_over(self, stream: YamuxStream) -> None:
        """Give a stream that begins to speak to its handler: a silent one costs no task."""
        stream.left_at = None
        try:
            self._accepted_in.send_nowait(stream)
        except trio.WouldBlock:  # opened and closed faster than we accept them
            self._drop(stream)

    def _drop(self, stream: YamuxStream) -> None:
        self.send_reset(stream.stream_id)
        stream.end_by_reset()

    def _refuse(self, stream_id: int) -> None:
        self._still_coming += WINDOW_INITIAL
        self._send_control(_WINDOW_UPDATE, _RST, stream_id, 0)

    def _on_ping(self, flags: int, nonce: int) -> None:
        if flags & _SYN:
            self._send_control(_PING, _ACK, 0, nonce)
        elif nonce == self._ping_id:
            rtt = trio.current_time() - self._ping_sent_at
            self._rtt_s = rtt if self._rtt_s == 0.0 else (self._rtt_s + rtt) / 2

    # -- life and death ------------------------------------------------------------------------------------------

    async def _until_it_fails(self, loop: Callable[[], Awaitable[None]]) -> None:
        """Run one loop. Its end, also by an exception, ends the connection and nothing else.

        The swarm runs connections in the nursery of the whole node: what a peer's bytes can cause must stop here."""
        try:
            await loop()
        except (BaseLibp2pError, OSError, EOFError, trio.BrokenResourceError, trio.ClosedResourceError) as error:
            logger.debug("connection to %s ended: %r", self.peer_id, error)
        except Exception:
            logger.warning("connection to %s dropped", self.peer_id, exc_info=True)
        self._scope.cancel()

    async def _keepalive(self) -> None:
        """Ping, end a connection that stopped answering, and reset streams the peer never closes."""
        unanswered = 0
        while unanswered < PINGS_UNANSWERED_MAX:
            self._heard = False
            self._ping_id += 1
            self._ping_sent_at = trio.current_time()
            self._send_control(_PING, _SYN, 0, self._ping_id)
            await trio.sleep(PING_INTERVAL_S)
            unanswered = 0 if self._heard else unanswered + 1
            self._sweep()
        logger.debug("connection to %s ended: %d pings without an answer", self.peer_id, unanswered)
        self._scope.cancel()

    def _sweep(self) -> None:
        """Reset streams that we finished long ago and that the peer does not close, and those that stay silent."""
        expired = trio.current_time() - HALF_OPEN_MAX_S
        for stream in [s for s in self._streams.values() if s.left_at is not None and s.left_at < expired]:
            self._drop(stream)

    async def _finish(self) -> None:
        if self.event_closed.is_set():
            return
        self._closing = True
        self._accepted_in.close()
        Yamux._process_buffered -= self._buffered
        Yamux._live.discard(self)
        self.event_closed.set()
        for stream in list(self._streams.values()):
            stream.end_by_reset()
        self.send_queue.clear()
        with trio.move_on_after(GOODBYE_S):
            try:
                await self.secured_conn.close()
            except (BaseLibp2pError, OSError, trio.BrokenResourceError, trio.ClosedResourceError) as error:
                logger.debug("closing the connection to %s: %r", self.peer_id, error)
        if self.on_close is not None and inspect.isawaitable(done := self.on_close()):
            await done
