"""Many calls over one connection: the end of one does not disturb the others."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from random import Random

import msgspec
import pytest
import trio

from peer.errors import ConnectionLost, NetworkError, RemoteError
from peer.events import EventLog
from peer.identity import Identity
from peer.net.bulk.link import CALLS_MAX, PIECE_BYTES, BulkConnection
from peer.net.bulk.tls import TlsSocket, client_context
from peer.net.bulk.transport import OFFER, OfferRequest
from peer.net.host import Host, open_host
from peer.net.limits import NetLimits
from peer.net.method import Call, Method
from peer.net.wire import SMALL_BYTES, RequestHeader
from tests.peer.net.test_rpc import BIG, ECHO, STALL, Facts, Number, echo

SIZE = 3 << 20
BULKY = Method("test/bulky", Number, Number, reply_payload_max=BIG)
LARGE = Method("test/large", Number, Number, request_payload_max=BIG)


@pytest.fixture(autouse=True)
def generous_timeouts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("peer.net.bulk.transport._HANDSHAKE_S", 60.0)
    monkeypatch.setattr("peer.net.bulk.transport._DIAL_S", 60.0)


@asynccontextmanager
async def pair(limits: NetLimits | None = None, upload: float | None = None) -> AsyncIterator[tuple[Host, Host, Facts]]:
    """Two connected hosts, of which the second echoes, and its events."""
    log = EventLog()
    facts = Facts(log)
    one = open_host(identity=Identity.generate(), events=EventLog(), caps=(upload, None))
    two = open_host(identity=Identity.generate(), events=log, limits=limits or NetLimits())
    async with one as a, two as b:
        b.rpc.register(ECHO, echo)
        await a.connect_address(b.addresses[0], timeout_s=60)
        yield a, b, facts


class Held:
    """A handler that answers on command."""

    def __init__(self) -> None:
        self.begun, self.answer, self.ended = trio.Event(), trio.Event(), trio.Event()

    async def __call__(self, call: Call[Number]) -> Number:
        self.begun.set()
        try:
            await self.answer.wait()
        finally:
            self.ended.set()
        return call.body


async def ask(a: Host, b: Host, number: int, size: int = SIZE) -> None:
    payload = Random(number).randbytes(size)
    reply = await a.rpc.call(b.peer_id, ECHO, Number(number), payload, timeout_s=120, bulk=True)
    assert reply.body == Number(number + 1)
    assert reply.payload == payload


def link_of(a: Host, b: Host) -> BulkConnection:
    (link,) = a._bulk._links[b.peer_id]
    return link


async def none_under_way(*links: BulkConnection) -> None:
    with trio.fail_after(300):
        while any(link.idle_since is None for link in links):
            await trio.lowlevel.checkpoint()


@pytest.mark.parametrize("seed", range(4))
async def test_cancelled_calls_do_not_disturb_the_others(seed: int) -> None:
    random = Random(seed)
    sizes = [0, 1, SMALL_BYTES, SMALL_BYTES + 1, PIECE_BYTES - 40, PIECE_BYTES, 2 * PIECE_BYTES + 1, SIZE]
    async with pair() as (a, b, facts):
        await ask(a, b, 0, 1)
        link = link_of(a, b)
        answered = 0

        async def one(number: int, size: int, ticks: int | None) -> None:
            nonlocal answered
            async with trio.open_nursery() as nursery:
                if ticks is not None:
                    nursery.start_soon(cancel_after, ticks, nursery.cancel_scope)
                await ask(a, b, number, size)
                answered += 1
                nursery.cancel_scope.cancel()

        async def cancel_after(ticks: int, scope: trio.CancelScope) -> None:
            for _ in range(ticks):
                await trio.lowlevel.checkpoint()
            scope.cancel()

        async with trio.open_nursery() as nursery:
            for number in range(60):
                ticks = random.choice([None, random.randrange(300)])
                nursery.start_soon(one, number, random.choice(sizes), ticks)
        assert answered >= 15, "all calls that were not cancelled"
        await ask(a, b, 61)
        assert link_of(a, b) is link
        await none_under_way(link, link_of(b, a))
        assert not [event for event in facts if event.name in ("peer_penalized", "bug")]


async def test_giving_up_a_call_cancels_its_handler() -> None:
    held = Held()
    async with pair() as (a, b, _):
        b.rpc.register(STALL, held)
        with trio.fail_after(300):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(lambda: a.rpc.call(b.peer_id, STALL, Number(1), timeout_s=60, bulk=True))
                await held.begun.wait()
                nursery.cancel_scope.cancel()
            await held.ended.wait()
        await ask(a, b, 1)
        await none_under_way(link_of(a, b), link_of(b, a))


async def test_a_call_cut_off_in_a_slow_payload_keeps_the_connection() -> None:
    async with pair(upload=float(4 << 20)) as (a, b, _):
        await ask(a, b, 0, 1)
        link = link_of(a, b)
        before = b.bytes_down
        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask, a, b, 1, BIG)
            with trio.fail_after(300):
                while b.bytes_down - before < 2 * PIECE_BYTES:
                    await trio.sleep(0.01)
            nursery.cancel_scope.cancel()
        await ask(a, b, 2, SMALL_BYTES)
        assert link_of(a, b) is link


async def test_payloads_wait_on_the_connection_for_memory() -> None:
    most = 0

    async def measure(call: Call[Number]) -> Number:
        nonlocal most
        most = max(most, sum(b.rpc.server._budget._held.values()))
        await trio.sleep(0.01)
        return Number(len(call.payload))

    async with pair(NetLimits(payload_bytes_in_flight=2 * SIZE)) as (a, b, _):
        b.rpc.register(LARGE, measure)

        async def one(size: int) -> None:
            reply = await a.rpc.call(b.peer_id, LARGE, Number(1), bytes(size), timeout_s=120, bulk=True)
            assert reply.body == Number(size)

        async with trio.open_nursery() as nursery:
            for _ in range(12):
                nursery.start_soon(one, SIZE)
                nursery.start_soon(one, SMALL_BYTES)
        assert most == SIZE, "half of the budget is one peer's"


async def test_a_payload_that_waits_for_memory_does_not_block_its_holder() -> None:
    async def measure(call: Call[Number]) -> Number:
        return Number(len(call.payload))

    async with pair(NetLimits(payload_bytes_in_flight=2 * SIZE), upload=float(2 << 20)) as (a, b, _):
        b.rpc.register(LARGE, measure)

        async def one(size: int) -> None:
            reply = await a.rpc.call(b.peer_id, LARGE, Number(1), bytes(size), timeout_s=120, bulk=True)
            assert reply.body == Number(size)

        async with trio.open_nursery() as nursery:
            before = b.bytes_down
            nursery.start_soon(one, SIZE)
            with trio.fail_after(300):
                while b.bytes_down - before < PIECE_BYTES:
                    await trio.sleep(0.01)
            for size in (SMALL_BYTES - 100, SMALL_BYTES, SMALL_BYTES + 1):
                nursery.start_soon(one, size)


async def test_a_call_without_memory_delays_the_others_for_a_limited_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("peer.net.bulk.link.STANDSTILL_S", 2.0)
    held = Held()
    async with pair(NetLimits(payload_bytes_in_flight=2 * SIZE)) as (a, b, _):
        b.rpc.register(LARGE, held)

        async def one() -> None:
            reply = await a.rpc.call(b.peer_id, LARGE, Number(1), bytes(SIZE), timeout_s=120, bulk=True)
            assert reply.body == Number(1)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(one)
            await held.begun.wait()
            with pytest.raises(ConnectionLost):
                await a.rpc.call(b.peer_id, LARGE, Number(2), bytes(SIZE), timeout_s=120, bulk=True)
            await ask(a, b, 3, 0)
            held.answer.set()
        await ask(a, b, 4)


async def test_a_refusal_overtakes_its_payload_and_other_calls_go_on() -> None:
    async with pair() as (a, b, _):
        async with trio.open_nursery() as nursery:
            for number in range(8):
                nursery.start_soon(ask, a, b, number)
                with pytest.raises(RemoteError, match="does not serve"):
                    await a.rpc.call(b.peer_id, LARGE, Number(1), bytes(BIG), timeout_s=60, bulk=True)
        await none_under_way(link_of(a, b), link_of(b, a))


async def test_a_lost_connection_ends_its_calls_and_is_replaced() -> None:
    held = Held()
    async with pair() as (a, b, _):
        b.rpc.register(STALL, held)

        async def lose() -> None:
            with pytest.raises(ConnectionLost):
                await a.rpc.call(b.peer_id, STALL, Number(1), timeout_s=120, bulk=True)

        with trio.fail_after(300):
            async with trio.open_nursery() as nursery:
                for _ in range(5):
                    nursery.start_soon(lose)
                await held.begun.wait()
                link_of(b, a).close()
        await ask(a, b, 1)


async def test_leaving_waits_for_calls_under_way() -> None:
    held = Held()
    async with pair() as (a, b, _):
        b.rpc.register(STALL, held)
        async with trio.open_nursery() as nursery:

            async def one() -> None:
                reply = await a.rpc.call(b.peer_id, STALL, Number(7), timeout_s=60, bulk=True)
                assert reply.body == Number(7)

            nursery.start_soon(one)
            await held.begun.wait()
            old = link_of(a, b)
            assert a._bulk is not None
            a._bulk.leave(b.peer_id)
            await ask(a, b, 1)
            assert {old} < a._bulk._links[b.peer_id], "the next call has a connection of its own"
            held.answer.set()
        with trio.fail_after(300):
            while old in a._bulk._links[b.peer_id]:
                await trio.lowlevel.checkpoint()


async def request_join(a: Host, b: Host) -> TlsSocket:
    offer = (await a.rpc.call(b.peer_id, OFFER, OfferRequest(), timeout_s=60)).body
    tls = TlsSocket(await trio.open_tcp_stream("127.0.0.1", offer.port), client_context(), server_side=False)
    await tls.handshake()
    await tls.send(offer.token)
    return tls


def piece(number: int, kind: int, data: bytes, size: int | None = None) -> bytes:
    return number.to_bytes(8, "big") + bytes([kind]) + (len(data) if size is None else size).to_bytes(4, "big") + data


@pytest.mark.parametrize(
    "garbage",
    [
        pytest.param(piece(1, 3, b""), id="kind"),
        pytest.param(piece(1, 1, b"", PIECE_BYTES + 1), id="size"),
        pytest.param(piece(1, 1, b"") + piece(1, 1, b""), id="empty calls"),
        pytest.param(piece(1, 0, b""), id="empty data"),
        pytest.param(piece(1, 2, b"bytes"), id="given up with bytes"),
        pytest.param(piece(1, 1, b"\0") + piece(1, 1, b"\0"), id="begun twice"),
    ],
)
async def test_a_violation_is_penalized_and_ends_the_connection(garbage: bytes) -> None:
    async with pair() as (a, b, facts):
        tls = await request_join(a, b)
        await tls.send(garbage)
        struck = await facts.wait("peer_penalized")
        assert struck.fields["peer"] == a.peer_id
        assert "bulk" in str(struck.fields["reason"])
        with trio.fail_after(300), suppress(ConnectionLost):
            while True:
                await tls.receive_into(memoryview(bytearray(100)))
        tls.close()
        await ask(a, b, 1)


async def test_data_for_an_unknown_call_is_counted_and_dropped() -> None:
    async with pair() as (a, b, facts):
        tls = await request_join(a, b)
        for _ in range(4):
            await tls.send(piece(99, 0, bytes(PIECE_BYTES)) + piece(98, 2, b""))
        with trio.fail_after(300):
            while b.bytes_by_peer[a.peer_id].bytes_down < 4 * PIECE_BYTES:
                await trio.sleep(0.01)
        await ask(a, b, 1)
        assert not [event for event in facts if event.name == "peer_penalized"]
        tls.close()


async def test_a_peer_that_reads_no_notices_loses_the_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of calls to be given up is bounded."""
    monkeypatch.setattr("peer.net.bulk.link.GIVE_UP_S", 3.0)
    replying = trio.Event()

    async def reply_at_length(call: Call[Number]) -> tuple[Number, bytes]:
        replying.set()
        return call.body, bytes(BIG)

    async with pair() as (a, b, _):
        b.rpc.register(BULKY, reply_at_length)
        tls = await request_join(a, b)
        async with trio.open_nursery() as nursery:
            most = 0

            async def flood() -> None:
                """Ask for a reply that is larger than the buffers, then violate the protocol again and again."""
                body = msgspec.Raw(msgspec.msgpack.encode(Number(1)))
                header = msgspec.msgpack.encode(RequestHeader(BULKY.name, 0, 60_000, body))
                await tls.send(piece(0, 1, len(header).to_bytes(4, "big") + header))
                await replying.wait()
                for number in range(1, 100_000):
                    await tls.send(piece(number, 1, b"\xff\xff\xff\xff"))

            async def lose() -> None:
                with suppress(ConnectionLost):
                    await flood()
                nursery.cancel_scope.cancel()

            nursery.start_soon(lose)
            with trio.fail_after(300):
                while True:
                    await trio.lowlevel.checkpoint()
                    for link in b._bulk._links.get(a.peer_id, ()):
                        most = max(most, len(link._calls) + link._giving_up)
        assert 8 < most <= CALLS_MAX
        tls.close()
        await ask(a, b, 1)


async def test_endless_calls_take_bounded_memory() -> None:
    """The reader stops when headers on one connection never end."""
    async with pair(NetLimits(header_timeout_s=3600.0, calls_in_per_peer=4 * CALLS_MAX)) as (a, b, _):
        tls = await request_join(a, b)
        async with trio.open_nursery() as nursery:

            async def flood() -> None:
                with suppress(ConnectionLost):
                    for number in range(40 * CALLS_MAX):
                        await tls.send(piece(number, 1, bytes([0, 0, 63, 255]) + bytes(1000)))

            nursery.start_soon(flood)
            with trio.fail_after(300):
                while not (links := b._bulk._links.get(a.peer_id)) or len(next(iter(links))._calls) < CALLS_MAX:
                    await trio.sleep(0.01)
            for _ in range(100):
                await trio.lowlevel.checkpoint()
            assert len(next(iter(b._bulk._links[a.peer_id]))._calls) == CALLS_MAX
            tls.close()
        with suppress(NetworkError):
            await b.disconnect(a.peer_id)
