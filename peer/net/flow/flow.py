"""A flow: one long-lived two-way stream of messages with another peer, for all that the two have to say to each other.

A call costs headers, tasks and a deadline. A flow has one reader, one writer and one timer; what is sent while it is
idle goes to the socket at once. Small messages pass large ones, which go in pieces. While it is held it asks for signs
of life: a killed peer ends the connection, and a ping over the control connection finds a frozen one in 0.6 s.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

import msgspec
import trio

from peer.bounds import smoothed
from peer.buffers import allocate
from peer.decoding import MALFORMED, told
from peer.errors import BarnraiseError, ConnectionLost, ProtocolViolation
from peer.net.admissions import Admissions
from peer.net.flow import frames
from peer.net.flow.frames import Frame, FrameBuffer
from peer.net.limits import ByteBudget
from peer.net.rate_limit import Meter
from peer.net.wire import Buffer

BEAT_S: Final = 0.15
QUIET_S: Final = 0.35  # of silence, before a ping; at least two beats
QUIET_RTTS: Final = 3.0
PROBE_S: Final = 0.15  # for the ping, and a round trip
SILENCE_MAX_S: Final = 3.0  # of a peer that answers pings: this connection passes nothing any more
UNSENT_MAX: Final = 4 << 20  # bytes of small messages that wait for a peer which does not read
BATCH_BYTES: Final = 64 << 10  # of small messages, written together
_CLOCK: Final = struct.Struct("!d")
_SMOOTHING: Final = 0.2
_BEATS_KEPT: Final = 32
_LATE_S: Final = 0.05  # by so much a late tick shows that our own loop stood still


class FlowWire(Protocol):
    """The connection under a flow. All methods raise ConnectionLost once it has ended."""

    def send_now(self, view: memoryview) -> int:
        """Write what can be written at once, and return the count."""

    async def send_some(self, view: memoryview) -> int:
        """Write the beginning of `view` and return the count; the next write begins with what is left of it."""

    async def receive_into(self, view: memoryview) -> int:
        """Fill `view` from the front, at least one byte, and return the count."""

    def close(self) -> None:
        """End the connection now."""


class FlowHandler(Protocol):
    """Takes what comes over the flows of one host."""

    types: Any
    """The type, or union of types, of the messages."""
    payload_max: int
    """Bytes of a payload at most."""

    async def on_message(self, flow: Flow, message: Any, payload: memoryview) -> None:
        """Take a message; the next one of this flow waits meanwhile. Raises `ProtocolViolation` for one that no honest
        peer sends: it is penalized, and ends the flow."""

    def on_end(self, flow: Flow, reason: str) -> None:
        """Take note that a flow has ended."""


@dataclass(frozen=True)
class FlowParts:
    """State shared by all flows of a host."""

    meter: Meter
    budget: ByteBudget
    """The memory of large messages on their way here."""
    admissions: Admissions
    penalize: Callable[[str, str], None]
    ping: Callable[[str, float], Awaitable[bool]]
    """Whether a peer answers over its control connection within some seconds."""
    prefix: Callable[[str], str]
    """The address prefix at which a peer is seen."""


@dataclass
class _Large:
    """A large message on its way out."""

    parts: deque[memoryview]
    sent: trio.Event = field(default_factory=trio.Event)

    def piece(self) -> bytes:
        """Take the next piece's frame."""
        taken, room = list[memoryview](), frames.PIECE_BYTES
        left = sum(map(len, self.parts))
        if frames.PIECE_BYTES < left < frames.PIECE_BYTES + frames.PREFIX.size:
            room -= frames.PREFIX.size  # no piece is smaller than a prefix
        while self.parts and room:
            part = self.parts.popleft()
            taken.append(part[:room])
            if len(part) > room:
                self.parts.appendleft(part[room:])
            room -= len(taken[-1])
        return frames.pack(frames.PIECE, b"", b"".join(taken))


class Flow:
    """The flow with one peer. `run` reads and writes until it ends."""

    def __init__(self, peer: str, wire: FlowWire, handler: FlowHandler, parts: FlowParts) -> None:
        self.peer: Final = peer
        self.prefix: Final = parts.prefix(peer)
        self.is_member: Final = parts.admissions.allows(peer, "member")
        """Whether the peer takes part; a client only reads."""
        self.rtt_s = 0.0
        """The smoothed time of a beat there and back; 0 before the first."""
        self.round_trips: Final[deque[float]] = deque(maxlen=_BEATS_KEPT)
        """The times of the last beats, in seconds."""
        self.ended: Final = trio.Event()
        self.reason = ""
        """Why it has ended."""
        self.last_used = trio.current_time()
        self._wire, self._handler, self._parts = wire, handler, parts
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(handler.types)
        self._buffer = FrameBuffer()
        self._batch = memoryview(b"")  # what the writer is at
        self._waiting: deque[bytes] = deque()
        self._waiting_bytes = self._holders = 0
        self._large: deque[_Large] = deque()
        self._wake, self._held = trio.Event(), trio.Event()
        self._rights_end = parts.admissions.ends(peer)  # as last known: the grant goes with the last libp2p connection
        self._heard_at = trio.current_time()
        self._scope = trio.CancelScope()

    @property
    def is_open(self) -> bool:
        return not self.ended.is_set()

    @property
    def silent_s(self) -> float:
        """For how long nothing has come."""
        return trio.current_time() - self._heard_at

    @property
    def idle_since(self) -> float | None:
        """When it was last used, in trio's time; None while someone holds it."""
        return None if self._holders else self.last_used

    # -- sending -------------------------------------------------------------------------------------------------------

    def send(self, message: msgspec.Struct, payload: Buffer = b"") -> None:
        """Send a small message, without waiting. Raises ConnectionLost if the flow has ended, or the peer does not
        read what it is sent, which ends it; ValueError if the message is not small."""
        head = self._encoder.encode(message)
        if len(head) > frames.HEAD_BYTES_MAX or len(payload) > frames.SMALL_BYTES_MAX:
            raise ValueError(f"a message of {len(head)} and {len(payload)} bytes is not small: use send_large")
        self.last_used = trio.current_time()
        self._put(frames.pack(frames.MESSAGE, head, payload))

    async def send_large(self, message: msgspec.Struct, payload: Buffer) -> None:
        """Send a message of any size that the peer takes, behind other large ones; return once it has left. Raises as
        `send`."""
        head, view = self._encoder.encode(message), memoryview(payload).cast("B")
        if len(head) > frames.HEAD_BYTES_MAX or view.nbytes > self._handler.payload_max:
            raise ValueError(f"a message of {len(head)} and {view.nbytes} bytes is over the limit")
        self._check_open()
        prefix = frames.PREFIX.pack(frames.MESSAGE, len(head), view.nbytes)
        large = _Large(deque([memoryview(prefix + head), view]))
        self._large.append(large)
        self._wake.set()
        await large.sent.wait()
        self._check_open()

    def _check_open(self) -> None:
        if not self.is_open:
            raise ConnectionLost(f"the flow with {self.peer} has ended: {self.reason}")

    def _put(self, frame: bytes) -> None:
        self._check_open()
        self._count_sent(len(frame))
        view = memoryview(frame)
        if not self._batch and not self._waiting:
            try:
                while view and (count := self._wire.send_now(view)):
                    view = view[count:]
            except ConnectionLost as error:
                self.close(str(error))
                raise
            self._batch = view
        else:
            self._waiting.append(frame)
            self._waiting_bytes += len(frame)
            if self._waiting_bytes > UNSENT_MAX:
                self.close("it does not read what it is sent")
                self._check_open()
        if self._batch or self._waiting:
            self._wake.set()

    def _count_sent(self, size_bytes: int) -> None:
        self._parts.meter.upload.charge(size_bytes)
        self._parts.meter.sent(self.peer, size_bytes)

    async def _write(self) -> None:
        while True:
            if not self._batch and not await self._next_batch():
                self._wake = trio.Event()
                await self._wake.wait()
                continue
            while self._batch:
                self._batch = self._batch[await self._wire.send_some(self._batch) :]
            await trio.lowlevel.checkpoint()  # a fast link would let a large message go through in one turn

    async def _next_batch(self) -> bool:
        """Take what is to be written next: small messages first. Return whether there is anything."""
        if self._waiting:
            batch, size = [], 0
            while self._waiting and size < BATCH_BYTES:
                batch.append(self._waiting.popleft())
                size += len(batch[-1])
            self._waiting_bytes -= size
            self._batch = memoryview(b"".join(batch))
        elif self._large:
            large = self._large[0]
            if not large.parts:
                self._large.popleft().sent.set()
                return True
            await self._parts.meter.upload.take(0)
            if self._batch or self._waiting:
                return True  # small ones that came meanwhile
            piece = large.piece()
            self._count_sent(len(piece))
            self._batch = memoryview(piece)
        return bool(self._batch)

    # -- receiving -----------------------------------------------------------------------------------------------------

    async def _read(self) -> None:
        while True:
            kind, head, payload = await self._next_frame()
            if kind == frames.PIECE:
                await self._receive_large(payload)
            else:
                await self._take(kind, head, payload)

    async def _next_frame(self) -> Frame:
        """Return the next frame; it is valid until the one after it is asked for."""
        while True:
            frame = self._buffer.next()
            if frame is not None:
                return frame
            count = await self._wire.receive_into(self._buffer.room())
            self._buffer.filled(count)
            self._heard_at = trio.current_time()
            self._parts.meter.received(self.peer, count)
            await self._parts.meter.download.take(count)

    async def _take(self, kind: int, head: memoryview, payload: memoryview) -> None:
        if kind == frames.QUESTION:
            self._put(frames.pack(frames.ANSWER, b"", payload))
        elif kind == frames.ANSWER:
            rtt_s: float = trio.current_time() - _CLOCK.unpack(payload)[0]
            if 0 <= rtt_s < SILENCE_MAX_S:  # also refuses NaN
                self.round_trips.append(rtt_s)
                self.rtt_s = smoothed(self.rtt_s or None, rtt_s, _SMOOTHING)
        else:
            await self._hand_over(self._decode(head), memoryview(bytes(payload)))

    async def _receive_large(self, first: memoryview) -> None:
        head_bytes, payload_bytes = frames.large_sizes(first, self._handler.payload_max)
        size = head_bytes + payload_bytes
        piece, ready = bytes(first[frames.PREFIX.size :]), 0  # waiting for memory may end the frame's life
        async with self._parts.budget.claim(self.peer, size) as claim:
            room = allocate(size)
            while True:
                if ready + len(piece) > size:
                    raise ProtocolViolation("a large message is longer than it says")
                room[ready : ready + len(piece)] = piece
                ready += len(piece)
                claim.advance(len(piece))
                if ready == size:
                    break
                kind, head, payload = await self._next_frame()
                while kind != frames.PIECE:
                    await self._take(kind, head, payload)
                    kind, head, payload = await self._next_frame()
                piece = bytes(payload)
            await self._hand_over(self._decode(room[:head_bytes]), room[head_bytes:])

    def _decode(self, head: memoryview) -> Any:
        try:
            return self._decoder.decode(head)
        except MALFORMED as error:
            raise ProtocolViolation(f"a message that is none: {told(error)}") from error

    async def _hand_over(self, message: Any, payload: memoryview) -> None:
        self._check_rights()
        self.last_used = trio.current_time()
        await self._handler.on_message(self, message, payload)

    # -- life ----------------------------------------------------------------------------------------------------------

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Keep the flow open inside the block, and watch whether the peer is alive."""
        self._holders += 1
        self._heard_at = max(self._heard_at, trio.current_time()) if self._holders == 1 else self._heard_at
        self._held.set()
        try:
            yield
        finally:
            self._holders -= 1
            self.last_used = trio.current_time()

    def end_without_rights(self) -> None:
        """End the flow if the peer has lost its rights."""
        try:
            self._check_rights()
        except ConnectionLost as error:
            self.close(str(error))

    def _check_rights(self) -> None:
        """Raise ConnectionLost for a peer that is banned, or whose credential has ended without being renewed."""
        admissions = self._parts.admissions
        if admissions.is_barred(self.peer):
            raise ConnectionLost("the peer is banned from this run")
        self._rights_end = admissions.ends(self.peer, self._rights_end)
        if admissions.is_over(self._rights_end):
            raise ConnectionLost("the peer's credential has ended")

    async def run(self) -> None:
        """Read, write and watch until the flow ends."""
        with self._scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._guarded, self._write)
                nursery.start_soon(self._guarded, self._watch)
                await self._guarded(self._read)
        self.close("this peer closes it")

    async def _guarded(self, task: Callable[[], Awaitable[None]]) -> None:
        """Run a task whose errors end the flow."""
        try:
            await task()
        except ProtocolViolation as error:
            self._parts.penalize(self.peer, str(error))
            self.close(str(error))
        except BarnraiseError as error:
            self.close(str(error))

    def close(self, reason: str) -> None:
        """End the flow now."""
        if self.ended.is_set():
            return
        self.reason = reason
        self.ended.set()
        self._wire.close()
        for large in self._large:
            large.sent.set()
        self._scope.cancel()
        self._handler.on_end(self, reason)

    async def _watch(self) -> None:
        """Ask for signs of life while someone holds the flow."""
        while True:
            if not self._holders:
                self._held = trio.Event()
                await self._held.wait()
                continue
            due = trio.current_time() + BEAT_S
            self._put(frames.pack(frames.QUESTION, b"", _CLOCK.pack(trio.current_time())))
            await trio.sleep_until(due)
            self._forgive(trio.current_time() - due)
            silent_s = self.silent_s
            if silent_s > max(QUIET_S, QUIET_RTTS * self.rtt_s + QUIET_S / 2):
                await self._probe(silent_s)

    async def _probe(self, silent_s: float) -> None:
        """Find out whether a silent peer is alive; end the flow if not."""
        heard_at, wait_s = self._heard_at, PROBE_S + self.rtt_s
        due = trio.current_time() + wait_s
        alive = await self._parts.ping(self.peer, wait_s)
        if self._heard_at > heard_at:
            return
        late = self._forgive(trio.current_time() - due) and silent_s <= SILENCE_MAX_S  # each may be, on a busy machine
        if not alive and not late:
            self.close("it does not answer")
        elif silent_s > SILENCE_MAX_S:
            self.close("the connection passes nothing any more")

    def _forgive(self, late_s: float) -> bool:
        """Do not count time in which our own loop was frozen. Return whether it was."""
        if late_s > _LATE_S:
            self._heard_at = min(trio.current_time(), self._heard_at + late_s)
        return late_s > _LATE_S
