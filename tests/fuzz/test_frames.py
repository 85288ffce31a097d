"""Mutated frames: of calls and answers, of the connection for payloads, and of a worker's socket.

Time is virtual, so that a wait by design takes none: what is measured is the CPU that bytes cost.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import trio
from trio.testing import MockClock

from peer.errors import ConnectionLost, NetworkError, ProtocolViolation, WorkerError
from peer.events import Event, EventLog
from peer.ipc.messages import ControlFrames, WorkerEvent, WorkerReply
from peer.ipc.stage_spec import Moved, Taken
from peer.ipc.train_messages import InnerResult
from peer.net.admissions import Admissions
from peer.net.bulk.link import BulkConnection
from peer.net.limits import NetLimits
from peer.net.method import Call, Method
from peer.net.rate_limit import Meter, TokenBucket
from peer.net.rpc import Rpc
from peer.net.rpc_server import RpcServer
from peer.net.wire import Buffer, Channel, ReplyHeader, RequestHeader
from peer.worker.process import MessageStream
from tests.fuzz.support.guard import MUTATIONS, LongestStep, Trial, chance_for, no_growth
from tests.fuzz.support.instances import Instances
from tests.fuzz.support.mutations import of_bytes, of_msgpack
from tests.fuzz.support.wire_types import worker_types

PAYLOAD_MAX = 1 << 16
PEER = "12D3KooWAKhkAdXivmieYgVT2kua7NQoihkERuY4cyDDCWd3z9tm"
SIZE = struct.Struct("!I")
PIECE = struct.Struct("!QBI")


class Note(msgspec.Struct, frozen=True):
    text: str


ECHO = Method("test/echo", Note, Note, request_payload_max=PAYLOAD_MAX, reply_payload_max=PAYLOAD_MAX)


class Recorded(Channel):
    """A channel from which the given bytes come, in pieces, and then the end."""

    def __init__(self, data: bytes, chance: random.Random) -> None:
        self.peer, self._left, self._chance = PEER, memoryview(data), chance

    async def send(self, data: Buffer) -> None:
        await trio.lowlevel.checkpoint()

    async def receive(self, max_bytes: int) -> Buffer:
        await trio.lowlevel.checkpoint()
        if not self._left:
            raise ConnectionLost("the end")
        size = min(max_bytes, len(self._left), self._chance.choice([1, 100, 1 << 20]))
        piece, self._left = self._left[:size], self._left[size:]
        return bytes(piece)

    async def receive_into(self, view: memoryview) -> int:
        data = await self.receive(len(view))
        view[: len(data)] = data
        return len(data)

    def finish(self) -> None:
        """No other side waits."""

    def abandon(self) -> None:
        """No other side waits."""


async def echo(call: Call[Note]) -> tuple[Note, memoryview]:
    return call.body, call.payload


def meter() -> Meter:
    return Meter(TokenBucket(None), TokenBucket(None))


def server() -> tuple[RpcServer, list[Event]]:
    log, events = EventLog(), list[Event]()
    log._subscribers.append(events.append)
    answering = RpcServer(NetLimits(), meter(), log, Admissions())
    answering.add(ECHO, echo)
    return answering, events


def requests() -> list[bytes]:
    """Return some valid requests, as frames."""
    found = []
    for text, payload in (("", b""), ("hello", b"x" * 10), ("é" * 300, b"y" * PAYLOAD_MAX)):
        body = msgspec.Raw(msgspec.msgpack.encode(Note(text)))
        found.append((RequestHeader(ECHO.name, len(payload), 1000, body), payload))
    return [framed(msgspec.msgpack.encode(header)) + payload for header, payload in found]


def framed(header: bytes) -> bytes:
    return SIZE.pack(len(header)) + header


def mutated(chance: random.Random, frames: list[bytes]) -> bytes:
    """Return a mutated frame: of its bytes, or of the header inside."""
    one, other = chance.choice(frames), chance.choice(frames)
    if chance.random() < 0.3:
        return of_bytes(chance, one, other)
    size = SIZE.size + SIZE.unpack(one[: SIZE.size])[0]
    return framed(of_msgpack(chance, one[SIZE.size : size], other[SIZE.size : size])) + one[size:]


def under_virtual_time(
    name: str, count: int, make: Callable[[random.Random], bytes], work: Callable[[bytes], Awaitable[object]]
) -> Trial:
    """Run `work` on so many mutations."""
    chance, step = chance_for(name), LongestStep()
    trial = Trial(name, (NetworkError, ProtocolViolation), lambda: step.seconds)

    def run(data: bytes) -> None:
        trio.run(work, data, clock=MockClock(autojump_threshold=0), instruments=[step])

    with no_growth():
        for number in range(count):
            trial.run(number, make(chance), run)
    return trial


@pytest.mark.parametrize("count", MUTATIONS)
def test_requests(count: int) -> None:
    valid, (answering, events) = requests(), server()
    chance = random.Random(0)

    async def serve(data: bytes) -> None:
        await answering.serve(Recorded(data, chance))

    under_virtual_time("requests", count, lambda chance: mutated(chance, valid), serve)
    assert not [event for event in events if event.name == "bug"]
    assert [event for event in events if event.name == "peer_penalized"]
    assert all(len(str(event.fields)) < 1000 for event in events), "a peer fills the log"


@pytest.mark.parametrize("count", MUTATIONS)
def test_answers(count: int) -> None:
    body = msgspec.Raw(msgspec.msgpack.encode(Note("here")))
    valid = [
        framed(msgspec.msgpack.encode(ReplyHeader(code, message, len(payload), body))) + payload
        for code, message, payload in (("", "", b""), ("", "", b"z" * 5000), ("Busy", "try again", b""))
    ]
    chance = random.Random(0)
    data = b""

    async def channel(peer: str, bulk: bool) -> Channel:
        return Recorded(data, chance)

    rpc = Rpc("me", SimpleNamespace(open=channel), NetLimits(), meter(), EventLog())

    async def call(answer: bytes) -> None:
        nonlocal data
        data = answer
        assert isinstance((await rpc.call(PEER, ECHO, Note("there?"), timeout_s=10)).body, Note)

    trial = under_virtual_time("answers", count, lambda chance: mutated(chance, valid), call)
    assert trial.refused


class RecordedTls:
    """A TLS connection from which the given bytes come, and then the end."""

    def __init__(self, data: bytes) -> None:
        self._left = memoryview(data)

    async def receive_into(self, view: memoryview, expected: int) -> int:
        await trio.lowlevel.checkpoint()
        if not self._left:
            await trio.sleep(1)  # calls that have all their bytes answer meanwhile
            raise ConnectionLost("the end")
        size = min(len(view), len(self._left))
        view[:size], self._left = self._left[:size], self._left[size:]
        return size

    def send_now(self, data: memoryview) -> int:
        return len(data) // 2  # the rest waits

    async def send_some(self, data: memoryview) -> int:
        await trio.lowlevel.checkpoint()
        return len(data)

    def close(self) -> None:
        self._left = memoryview(b"")


@pytest.mark.parametrize("count", MUTATIONS)
def test_pieces_of_the_bulk_transport(count: int) -> None:
    valid, (answering, events) = requests(), server()
    struck: list[str] = []

    def make(chance: random.Random) -> bytes:
        """Return some calls, cut into pieces, with now and then a false number, kind or size."""
        stream = b""
        for call in range(chance.randint(1, 4)):
            frame = mutated(chance, valid) if chance.random() < 0.5 else chance.choice(valid)
            at = chance.randrange(len(frame) + 1)
            for kind, piece in ((1, frame[:at]), (0, frame[at:]), (2, b"")):
                number, size = call, len(piece)
                if chance.random() < 0.1:
                    number, kind = chance.choice([0, 1, 7, (1 << 64) - 1]), chance.choice([0, 1, 2, 3, 255])
                if chance.random() < 0.05:
                    size = chance.choice([0, size + 1, PAYLOAD_MAX, (1 << 32) - 1])
                stream += PIECE.pack(number, kind, size) + piece
        return of_bytes(chance, stream, stream) if chance.random() < 0.3 else stream

    async def serve(data: bytes) -> None:
        async with trio.open_nursery() as nursery:
            tls: Any = RecordedTls(data)
            link = BulkConnection(nursery, PEER, tls, meter(), lambda _, why: struck.append(why), answering.serve)
            await link.run()
            nursery.cancel_scope.cancel()

    under_virtual_time("pieces", count, make, serve)
    assert struck and not [event for event in events if event.name == "bug"]


@pytest.mark.parametrize("count", MUTATIONS)
def test_messages_of_a_worker(tmp_path: Any, count: int) -> None:
    chance = chance_for("a worker")
    kinds = list(worker_types().values())
    valid = [framed(Instances(chance).encoded(kind)) for kind in kinds for _ in range(3)]

    async def listen(data: bytes) -> None:
        recorded = Recorded(data, chance)

        async def receive_some() -> bytes:
            try:
                return bytes(await recorded.receive(1 << 20))
            except ConnectionLost:
                return b""

        worker = MessageStream(SimpleNamespace(receive_some=receive_some))  # type: ignore[arg-type]
        log = EventLog(tmp_path / "events.jsonl")
        while (message := await worker.receive()) is not None:
            if isinstance(message, WorkerReply):
                for kind in (InnerResult, Moved, Taken, float, bool):
                    try:
                        message.result(kind)
                    except WorkerError as error:
                        assert len(str(error)) < 500
            elif isinstance(message, WorkerEvent):
                log.emit(message.name, **message.fields)
        log.close()

    under_virtual_time("a worker", count, lambda chance: mutated(chance, valid), listen)


def test_a_worker_declares_no_endless_frame() -> None:
    with pytest.raises(ValueError, match="different code"):
        list(ControlFrames().feed(b"\xff\xff\xff\xff"))
