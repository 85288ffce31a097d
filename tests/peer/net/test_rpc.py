from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import msgspec
import pytest
import trio
from libp2p.abc import INetStream
from libp2p.network.stream.exceptions import StreamError
from libp2p.peer.id import ID

from peer.errors import (
    ConnectionLost,
    DeadlineExceeded,
    DialError,
    ProtocolViolation,
    RemoteError,
    RoundDiscarded,
    TooLarge,
)
from peer.events import Event, EventLog
from peer.identity import Identity
from peer.net.host import Host, open_host
from peer.net.limits import NetLimits
from peer.net.method import Call, Method
from peer.net.stream_channel import PROTOCOL
from peer.net.wire import HEADER_BYTES, LARGE_HEADER_BYTES, RequestHeader


class Number(msgspec.Struct, frozen=True):
    value: int


class Text(msgspec.Struct, frozen=True):
    value: str


BIG = 32 << 20
ECHO = Method("test/echo", Number, Number, request_payload_max=BIG, reply_payload_max=BIG)
STALL = Method("test/stall", Number, Number)
FAIL = Method("test/fail", Number, Number)
OPEN = Method("test/open", Number, Number, access="open")
UNSERVED = Method("test/unserved", Number, Number)


async def echo(call: Call[Number]) -> tuple[Number, memoryview]:
    return Number(call.body.value + 1), call.payload


class Facts(list[Event]):
    """The events so far, and a way to wait for the next of a name."""

    def __init__(self, log: EventLog) -> None:
        super().__init__()
        self._news = trio.Event()
        self._subscription = log.subscribed(self._add)
        self._subscription.__enter__()

    def _add(self, event: Event) -> None:
        self.append(event)
        self._news.set()
        self._news = trio.Event()

    async def wait(self, name: str) -> Event:
        with trio.fail_after(300):
            while True:
                for event in self:
                    if event.name == name:
                        return event
                await self._news.wait()


@asynccontextmanager
async def hosts(limits: NetLimits | None = None) -> AsyncIterator[tuple[Host, Host, Facts]]:
    """Two connected hosts, and the events of the second."""
    log = EventLog()
    facts = Facts(log)
    one = open_host(identity=Identity.generate(), events=EventLog())
    two = open_host(identity=Identity.generate(), events=log, limits=limits or NetLimits())
    async with one as a, two as b:
        b.rpc.register(ECHO, echo)
        await a.connect_address(b.addresses[0], timeout_s=60)
        yield a, b, facts


@pytest.mark.parametrize("bulk", [False, True])
@pytest.mark.parametrize("size", [0, 1000, 70_000, 5 << 20])
async def test_a_call_carries_body_and_payload_both_ways(size: int, bulk: bool) -> None:
    payload = bytes(range(256)) * (size // 256) + bytes(size % 256)
    async with hosts() as (a, b, _):
        reply = await a.rpc.call(b.peer_id, ECHO, Number(1), payload, timeout_s=60, bulk=bulk)
        assert reply.body == Number(2)
        assert reply.payload == payload
        assert a.bytes_up >= size and a.bytes_down >= size
        assert b.bytes_by_peer[a.peer_id].bytes_down >= size
        if size > 1 << 20:
            read, seconds = a.received_from(b.peer_id)
            assert size - (1 << 17) <= read <= size and seconds > 0  # without what came with the header


async def test_the_answering_side_can_call_back_over_the_same_connection() -> None:
    async with hosts() as (a, b, _):
        a.rpc.register(ECHO, echo)
        assert (await b.rpc.call(a.peer_id, ECHO, Number(1), timeout_s=60)).body == Number(2)


async def test_many_calls_at_once() -> None:
    async with hosts() as (a, b, _):
        done: list[int] = []

        async def one(number: int) -> None:
            done.append((await a.rpc.call(b.peer_id, ECHO, Number(number), timeout_s=60)).body.value)

        async with trio.open_nursery() as nursery:
            for number in range(300):
                nursery.start_soon(one, number)
        assert sorted(done) == list(range(1, 301))


async def test_a_call_to_oneself_takes_no_socket() -> None:
    async with hosts() as (_, b, _facts):
        assert (await b.rpc.call(b.peer_id, ECHO, Number(1), b"x", timeout_s=60)).payload == b"x"
        with pytest.raises(RemoteError) as caught:
            await b.rpc.call(b.peer_id, UNSERVED, Number(1), timeout_s=60)
        assert caught.value.code == "UnknownMethod"


async def test_errors_of_a_handler_reach_the_caller_by_name() -> None:
    async with hosts() as (a, b, facts):
        problem: list[Exception] = [RoundDiscarded("too late"), ProtocolViolation("bad part"), KeyError("x")]

        async def fail(call: Call[Number]) -> Number:
            raise problem[call.body.value]

        b.rpc.register(FAIL, fail)
        for index, code in enumerate(["RoundDiscarded", "ProtocolViolation", "internal"]):
            with pytest.raises(RemoteError) as caught:
                await a.rpc.call(b.peer_id, FAIL, Number(index), timeout_s=60)
            assert caught.value.code == code
        assert (await facts.wait("peer_penalized")).fields["peer"] == a.peer_id
        assert "KeyError" in str((await facts.wait("bug")).fields["error"])
        assert (await a.rpc.call(b.peer_id, ECHO, Number(1), timeout_s=60)).body == Number(2)


async def test_the_gate_stops_everything_that_is_not_open() -> None:
    async with hosts() as (a, b, _):

        async def answer(call: Call[Number]) -> Number:
            return call.body

        b.rpc.register(OPEN, answer)
        b.admissions.guard()
        for size in (0, BIG):  # a refusal stops a big payload on its way
            with pytest.raises(RemoteError, match="introduce yourself") as caught:
                await a.rpc.call(b.peer_id, ECHO, Number(1), bytes(size), timeout_s=60)
            assert caught.value.code == "NotAdmitted"
        assert b.bytes_by_peer[a.peer_id].bytes_down < BIG
        assert (await a.rpc.call(b.peer_id, OPEN, Number(3), timeout_s=60)).body == Number(3)


@pytest.mark.parametrize("peer", ["", "SomePeer", "0OIl", "12D3KooWSomePeer", "\N{SNOWMAN}"])
async def test_a_call_to_an_invalid_peer_id_fails(peer: str) -> None:
    async with hosts() as (a, _, _):
        with pytest.raises(DialError, match="no peer id"):
            await a.rpc.call(peer, ECHO, Number(1), timeout_s=60)


async def test_an_unknown_method_is_an_error_and_the_connection_lives_on() -> None:
    async with hosts() as (a, b, facts):
        large = Method("test/later", Text, Text, request_payload_max=BIG, header_bytes=256 << 10)
        asked: list[tuple[Method[Any, Any], Any, int]] = [
            (UNSERVED, Number(1), 0),
            (large, Text("x"), BIG),
            (large, Text("x" * 99_999), 1),
        ]
        for method, body, size in asked:
            with pytest.raises(RemoteError) as caught:
                await a.rpc.call(b.peer_id, method, body, bytes(size), timeout_s=60)
            assert caught.value.code == "UnknownMethod"
        assert "peer_penalized" not in {event.name for event in facts}, "a later version may have such methods"
        assert (await a.rpc.call(b.peer_id, ECHO, Number(1), b"x", timeout_s=60)).payload == b"x"


async def test_a_field_of_a_later_version_is_ignored_on_both_sides() -> None:
    class LaterNumber(Number, frozen=True):
        unit: str = "metre"

    later = Method(ECHO.name, LaterNumber, LaterNumber)
    async with hosts() as (a, b, facts):
        assert (await a.rpc.call(b.peer_id, later, LaterNumber(1, "foot"), timeout_s=60)).body == LaterNumber(2)

        async def answer(call: Call[LaterNumber]) -> LaterNumber:
            return LaterNumber(call.body.value, "foot")

        a.rpc.register(later, answer)
        assert (await b.rpc.call(a.peer_id, ECHO, Number(1), timeout_s=60)).body == Number(1)
        assert "peer_penalized" not in {event.name for event in facts}


async def test_methods_registered_in_a_scope_are_withdrawn_at_its_end() -> None:
    async with hosts() as (a, b, facts), trio.open_nursery() as nursery:
        begun, errors = trio.Event(), list[RemoteError]()

        async def stall(call: Call[Number]) -> Number:
            begun.set()
            await trio.sleep_forever()
            return call.body

        async def call_it(caller: Host) -> None:
            with pytest.raises(RemoteError) as caught:
                await caller.rpc.call(b.peer_id, STALL, Number(1), timeout_s=60)
            errors.append(caught.value)

        with trio.fail_after(300):
            with b.rpc.scope():
                b.rpc.register(STALL, stall)
                nursery.start_soon(call_it, a)
                await begun.wait()
            while not errors:
                await trio.lowlevel.checkpoint()
            await call_it(a)
            await call_it(b)
            assert [error.code for error in errors] == ["UnknownMethod"] * 3
            assert (await a.rpc.call(b.peer_id, ECHO, Number(1), b"x", timeout_s=60)).payload == b"x"
        with b.rpc.scope():  # the same method, registered again
            b.rpc.register(STALL, echo)
            assert (await a.rpc.call(b.peer_id, STALL, Number(1), timeout_s=60)).body == Number(2)
        assert "peer_penalized" not in [event.name for event in facts]


async def test_a_deadline_ends_the_call_and_cancels_the_handler() -> None:
    async with hosts() as (a, b, _):
        cancelled = trio.Event()

        async def stall(call: Call[Number]) -> Number:
            try:
                await trio.sleep_forever()
            finally:
                cancelled.set()
            return call.body

        b.rpc.register(STALL, stall)
        await a.rpc.call(b.peer_id, ECHO, Number(1), timeout_s=60)  # the connection is there before the clock runs
        with pytest.raises(DeadlineExceeded, match="test/stall"):
            await a.rpc.call(b.peer_id, STALL, Number(1), timeout_s=5.0)
        with trio.fail_after(300):
            await cancelled.wait()


async def test_a_caller_that_gives_up_cancels_the_handler_at_once() -> None:
    async with hosts() as (a, b, _):
        running, cancelled = trio.Event(), trio.Event()

        async def stall(call: Call[Number]) -> Number:
            running.set()
            try:
                await trio.sleep_forever()
            finally:
                cancelled.set()
            return call.body

        b.rpc.register(STALL, stall)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(lambda: a.rpc.call(b.peer_id, STALL, Number(1), timeout_s=60))
            with trio.fail_after(300):
                await running.wait()
                nursery.cancel_scope.cancel()
        with trio.fail_after(300):
            await cancelled.wait()


async def test_oversize_payloads_are_refused_on_both_sides() -> None:
    async with hosts() as (a, b, facts):
        with pytest.raises(ValueError, match="takes 33554432"):
            await a.rpc.call(b.peer_id, ECHO, Number(1), bytes(BIG + 1), timeout_s=60)
        generous = Method("test/echo", Number, Number, request_payload_max=BIG * 2)
        with pytest.raises(ConnectionLost):
            await a.rpc.call(b.peer_id, generous, Number(1), bytes(BIG + 1), timeout_s=60)
        assert "limit" in str((await facts.wait("peer_penalized")).fields["reason"])
        stingy = Method("test/echo", Number, Number, request_payload_max=BIG, reply_payload_max=10)
        with pytest.raises(ProtocolViolation, match="limit of 10"):
            await a.rpc.call(b.peer_id, stingy, Number(1), bytes(11), timeout_s=60)


@pytest.mark.parametrize("header_bytes", [HEADER_BYTES, LARGE_HEADER_BYTES])
async def test_an_oversize_header_is_an_error_and_the_connection_lives_on(header_bytes: int) -> None:
    repeat = Method("test/repeat", Text, Text, request_payload_max=BIG, header_bytes=header_bytes)
    long = "x" * header_bytes

    async def answer(call: Call[Text]) -> Text:
        return Text(long)

    async with hosts() as (a, b, _):
        b.rpc.register(repeat, answer)
        for size in (0, BIG):  # a big payload is sent by its own task
            with pytest.raises(TooLarge, match=f"limit of {header_bytes}"):
                await a.rpc.call(b.peer_id, repeat, Text(long), bytes(size), timeout_s=60)
            with pytest.raises(RemoteError, match=f"limit of {header_bytes}") as caught:
                await a.rpc.call(b.peer_id, repeat, Text("short"), bytes(size), timeout_s=60)
            assert caught.value.code == "TooLarge"
        assert (await a.rpc.call(b.peer_id, ECHO, Number(1), timeout_s=60)).body == Number(2)


async def test_a_malformed_body_is_penalized() -> None:
    async with hosts() as (a, b, facts):
        wrong = Method("test/echo", Text, Number)
        with pytest.raises(ConnectionLost):
            await a.rpc.call(b.peer_id, wrong, Text("not a number"), timeout_s=60)
        assert "malformed body" in str((await facts.wait("peer_penalized")).fields["reason"])


async def raw_stream(host: Host, peer: str) -> INetStream:
    with trio.fail_after(300):
        return await host.libp2p.new_stream(ID.from_base58(peer), [PROTOCOL])


@pytest.mark.parametrize(
    "garbage",
    [
        b"\xff\xff\xff\xff",
        b"\x00\x00\x00\x02\xc1\xc1",
        b"GET / HTTP/1.1\r\n\r\n" * 10,
        len(msgspec.msgpack.encode(["x" * 70, 0, 5, None])).to_bytes(4, "big")
        + msgspec.msgpack.encode(["\u00ff" * 70, 0, 5, None]),
    ],
)
async def test_garbage_is_penalized_and_nothing_dies(garbage: bytes) -> None:
    async with hosts() as (a, b, facts):
        stream = await raw_stream(a, b.peer_id)
        await stream.write(garbage)
        await facts.wait("peer_penalized")
        assert (await a.rpc.call(b.peer_id, ECHO, Number(1), timeout_s=60)).body == Number(2)


async def test_silence_and_truncation_free_their_slot() -> None:
    limits = NetLimits(header_timeout_s=0.2, payload_idle_s=0.2)
    async with hosts(limits) as (a, b, _):
        silent = await raw_stream(a, b.peer_id)
        paused = await raw_stream(a, b.peer_id)
        body = msgspec.Raw(msgspec.msgpack.encode(Number(1)))
        frame = msgspec.msgpack.encode(RequestHeader("test/echo", 100, 60_000, body))
        with suppress(StreamError):  # the host may have ended the stream already
            await paused.write(len(frame).to_bytes(4, "big") + frame + b"only this")
        for stream in (silent, paused):
            with trio.fail_after(300), pytest.raises(StreamError):
                while await stream.read(100):
                    pass
        b.rpc.server._limits = NetLimits()  # honest peers may be slow
        assert (await a.rpc.call(b.peer_id, ECHO, Number(1), timeout_s=60)).body == Number(2)


async def test_too_many_calls_of_one_peer_are_refused() -> None:
    async with hosts(NetLimits(calls_in_per_peer=2)) as (a, b, _):
        entered: list[int] = []
        both = trio.Event()

        async def stall(call: Call[Number]) -> Number:
            entered.append(call.body.value)
            if len(entered) == 2:
                both.set()
            await trio.sleep_forever()
            return call.body

        async def quiet_call(number: int) -> None:
            await a.rpc.call(b.peer_id, STALL, Number(number), timeout_s=60)

        b.rpc.register(STALL, stall)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(quiet_call, 1)
            nursery.start_soon(quiet_call, 2)
            with trio.fail_after(300):
                await both.wait()
            with pytest.raises(RemoteError) as caught:
                await a.rpc.call(b.peer_id, ECHO, Number(1), timeout_s=60)
            assert caught.value.code == "Busy"
            nursery.cancel_scope.cancel()


async def test_payloads_wait_for_the_memory_budget() -> None:
    async with hosts(NetLimits(payload_bytes_in_flight=4 << 20)) as (a, b, _):
        sizes = [3 << 20] * 5
        replies: list[int] = []

        async def one(size: int) -> None:
            reply = await a.rpc.call(b.peer_id, ECHO, Number(1), bytes(size), timeout_s=60, bulk=True)
            replies.append(reply.payload.nbytes)

        async with trio.open_nursery() as nursery:
            for size in sizes:
                nursery.start_soon(one, size)
        assert replies == sizes
