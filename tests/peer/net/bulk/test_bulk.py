from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing, suppress

import msgspec
import pytest
import trio
import trio.testing

from peer.errors import ConnectionLost, DeadlineExceeded, RemoteError, ResourceError
from peer.events import EventLog
from peer.identity import Identity
from peer.net.admissions import Admissions
from peer.net.bulk.link import BulkConnection
from peer.net.bulk.tls import Certificate, TlsSocket, client_context
from peer.net.bulk.transport import OFFER, BulkTransport, Offer, OfferRequest
from peer.net.host import Host, open_host
from peer.net.limits import NetLimits
from peer.net.method import Call, Method
from peer.net.rate_limit import Meter, TokenBucket
from peer.net.rpc_server import RpcServer
from peer.net.strangers.turns import IdleTurns
from tests.peer.net.test_rpc import BIG, ECHO, STALL, Facts, Number, echo

SIZE = 3 << 20


@pytest.fixture(autouse=True)
def generous_timeouts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use generous timeouts, so that the bulk transport works on a busy machine too."""
    monkeypatch.setattr("peer.net.bulk.transport._HANDSHAKE_S", 60.0)
    monkeypatch.setattr("peer.net.bulk.transport._DIAL_S", 60.0)


@asynccontextmanager
async def pair(bulk_port: int | None = 0) -> AsyncIterator[tuple[Host, Host, Facts]]:
    log = EventLog()
    facts = Facts(log)
    one = open_host(identity=Identity.generate(), events=EventLog())
    two = open_host(identity=Identity.generate(), events=log, bulk_port=bulk_port)
    async with one as a, two as b:
        b.rpc.register(ECHO, echo)
        await a.connect_address(b.addresses[0], timeout_s=60)
        yield a, b, facts


def bulk_connections(host: Host, peer: str) -> list[BulkConnection]:
    return list(host._bulk._links.get(peer, ()))


def libp2p_connections(host: Host) -> int:
    return len(host.libp2p.get_network().get_connections())


async def test_bulk_takes_one_tls_connection_and_control_does_not() -> None:
    async with pair() as (a, b, _):
        payload = bytes(range(256)) * (SIZE // 256)
        for _round in range(3):
            reply = await a.rpc.call(b.peer_id, ECHO, Number(1), payload, timeout_s=60, bulk=True)
            assert reply.payload == payload
        assert len(bulk_connections(a, b.peer_id)) == len(bulk_connections(b, a.peer_id)) == 1
        (bulk,) = bulk_connections(a, b.peer_id)
        assert bulk.tls._socket.version() == "TLSv1.3"
        assert libp2p_connections(a) == 1
        assert b.bytes_by_peer[a.peer_id].bytes_down > 3 * SIZE


async def test_without_a_bulk_port_payloads_take_a_second_libp2p_connection() -> None:
    async with pair(bulk_port=None) as (a, b, _):
        for _round in range(2):
            reply = await a.rpc.call(b.peer_id, ECHO, Number(1), bytes(SIZE), timeout_s=60, bulk=True)
            assert reply.payload.nbytes == SIZE
        assert not bulk_connections(a, b.peer_id)
        assert libp2p_connections(a) == 2


async def test_the_dialled_side_uses_the_bulk_transport_too() -> None:
    async with pair() as (a, b, _):
        a.rpc.register(ECHO, echo)
        reply = await b.rpc.call(a.peer_id, ECHO, Number(1), bytes(SIZE), timeout_s=60, bulk=True)
        assert reply.payload.nbytes == SIZE
        assert len(bulk_connections(b, a.peer_id)) == 1


async def test_simultaneous_calls_share_one_new_connection() -> None:
    async with pair() as (a, b, _):

        async def call(number: int) -> None:
            payload = bytes([number]) * SIZE
            reply = await a.rpc.call(b.peer_id, ECHO, Number(number), payload, timeout_s=120, bulk=True)
            assert reply.body == Number(number + 1) and reply.payload == payload

        async with trio.open_nursery() as nursery:
            for number in range(40):
                nursery.start_soon(call, number)
        assert len(bulk_connections(a, b.peer_id)) == 1
        assert libp2p_connections(a) == 1, "no fallback to libp2p"


async def test_gate_limits_and_deadlines_hold_on_the_bulk_transport() -> None:
    async def stall(call: Call[Number]) -> Number:
        await trio.sleep_forever()
        return call.body

    async with pair() as (a, b, facts):
        b.rpc.register(STALL, stall)
        with pytest.raises(DeadlineExceeded):
            await a.rpc.call(b.peer_id, STALL, Number(1), timeout_s=0.5, bulk=True)
        generous = Method("test/echo", Number, Number, request_payload_max=BIG * 2)
        with pytest.raises(ConnectionLost):
            await a.rpc.call(b.peer_id, generous, Number(1), bytes(BIG + 1), timeout_s=60, bulk=True)
        assert (await facts.wait("peer_penalized")).fields["peer"] == a.peer_id
        b.admissions.guard()
        with pytest.raises(RemoteError, match="introduce yourself"):
            await a.rpc.call(b.peer_id, ECHO, Number(1), bytes(BIG), timeout_s=60, bulk=True)


async def test_a_call_that_ends_before_it_begins_does_no_harm() -> None:
    """An honest caller whose loop lags may send a deadline that has passed."""
    async with pair() as (a, b, _):
        for late_s in (0.0, 1.0, 1e12):
            channel = await a.rpc._channels.open(b.peer_id, True)
            with suppress(ConnectionLost):
                await a.rpc._exchange(channel, ECHO, Number(1), memoryview(b""), trio.current_time() - late_s)
        reply = await a.rpc.call(b.peer_id, ECHO, Number(1), bytes(SIZE), timeout_s=60, bulk=True)
        assert reply.body == Number(2)


async def test_a_dead_connection_is_replaced() -> None:
    async with pair() as (a, b, _):
        await a.rpc.call(b.peer_id, ECHO, Number(1), bytes(SIZE), timeout_s=60, bulk=True)
        for link in bulk_connections(b, a.peer_id):
            link.close()
        (old,) = bulk_connections(a, b.peer_id)
        with trio.fail_after(300):
            while old.is_open:
                await trio.lowlevel.checkpoint()
        reply = await a.rpc.call(b.peer_id, ECHO, Number(2), bytes(SIZE), timeout_s=60, bulk=True)
        assert reply.body == Number(3)
        assert old not in bulk_connections(a, b.peer_id)


async def offer_of(a: Host, b: Host) -> Offer:
    return (await a.rpc.call(b.peer_id, OFFER, OfferRequest(), timeout_s=60)).body


async def request_join(offer: Offer, token: bytes) -> TlsSocket:
    tls = TlsSocket(await trio.open_tcp_stream("127.0.0.1", offer.port), client_context(), server_side=False)
    await tls.handshake()
    await tls.send(token)
    return tls


async def test_the_first_bytes_of_a_late_payload_are_read() -> None:
    """Every byte counts as a sign of life."""
    credentials, expected = Certificate.generate(), 1 << 20
    async with trio.open_nursery() as nursery:
        listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")

        async def send_some(stream: trio.SocketStream) -> None:
            with closing(TlsSocket(stream, credentials.context, server_side=True)) as tls:
                await tls.handshake()
                for _ in range(3):
                    await tls.send(bytes(10_000))
                    assert await tls.receive_into(memoryview(bytearray(1))) == 1

        nursery.start_soon(trio.serve_listeners, send_some, listeners)
        stream = await trio.open_tcp_stream("127.0.0.1", listeners[0].socket.getsockname()[1])
        with closing(TlsSocket(stream, client_context(), server_side=False)) as tls, trio.fail_after(300):
            await tls.handshake()
            for _ in range(3):
                got = 0
                while got < 10_000:
                    got += await tls.receive_into(memoryview(bytearray(expected)), expected=expected)
                await tls.send(b"!")
        nursery.cancel_scope.cancel()


async def test_a_token_opens_one_connection_and_a_wrong_one_none() -> None:
    async with pair() as (a, b, _):
        offer = await offer_of(a, b)
        await offer_of(a, b)  # stays open, so that further sockets are not closed at once
        good = await request_join(offer, offer.token)
        for token in (offer.token, bytes(32)):
            bad = await request_join(offer, token)
            with trio.fail_after(300), pytest.raises(ConnectionLost):
                await bad.receive_into(memoryview(bytearray(1)))
            bad.close()
        with trio.fail_after(300):
            while not bulk_connections(b, a.peer_id):
                await trio.lowlevel.checkpoint()
        good.close()


async def test_garbage_and_silence_on_the_bulk_port_do_no_harm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("peer.net.bulk.transport._HANDSHAKE_S", 0.2)
    async with pair() as (a, b, _):
        port = (await offer_of(a, b)).port
        streams = [
            await trio.open_tcp_stream("127.0.0.1", port) for _ in range(40)
        ]  # more than the limit of handshakes
        for stream in streams[:20]:
            await stream.send_all(b"GET / HTTP/1.1\r\n\r\n" * 100)
        for stream in streams:
            with trio.fail_after(300):
                try:
                    while await stream.receive_some():
                        pass
                except trio.BrokenResourceError:
                    pass
            await stream.aclose()
        monkeypatch.setattr("peer.net.bulk.transport._HANDSHAKE_S", 60.0)  # honest peers may be slow
        await a.rpc.call(b.peer_id, ECHO, Number(1), bytes(SIZE), timeout_s=60, bulk=True)
        assert len(bulk_connections(a, b.peer_id)) == 1


async def test_an_impostor_on_the_port_gets_no_token_and_no_payload() -> None:
    received = bytearray()

    async def impostor(stream: trio.SocketStream) -> None:
        buffer = memoryview(bytearray(100))
        context = Certificate.generate().context
        with closing(TlsSocket(stream, context, server_side=True)) as tls, suppress(ConnectionLost):
            await tls.handshake()
            received.extend(buffer[: await tls.receive_into(buffer)])

    async def ask(peer: str, request: OfferRequest) -> Offer:
        return Offer(port, b"\0" * 32, b"t" * 32)

    async with trio.open_nursery() as nursery:
        listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
        port = listeners[0].socket.getsockname()[1]
        nursery.start_soon(trio.serve_listeners, impostor, listeners)
        meter = Meter(TokenBucket(None), TokenBucket(None))
        server = RpcServer(NetLimits(), meter, EventLog(), admissions := Admissions())
        transport = BulkTransport(nursery, ask, server, meter, lambda peer: (), admissions, IdleTurns(admissions))
        assert await transport.channel("peer", "127.0.0.1") is None
        assert not received
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("port", [2**63, 1 << 16, -1])
async def test_an_offer_of_an_invalid_port_does_no_harm(port: int) -> None:
    class AnyPort(msgspec.Struct, frozen=True):
        port: int
        fingerprint: bytes
        token: bytes

    async def offer(call: Call[OfferRequest]) -> AnyPort:
        return AnyPort(port, b"", b"")

    async with pair() as (a, b, _):
        del b.rpc.server._methods[OFFER.name]
        b.rpc.register(Method(OFFER.name, OfferRequest, AnyPort, access="client", urgent=True), offer)
        reply = await a.rpc.call(b.peer_id, ECHO, Number(1), bytes(SIZE), timeout_s=60, bulk=True)
        assert reply.body == Number(2)
        assert not bulk_connections(a, b.peer_id)


async def test_two_readers_of_one_socket_lose_only_the_connection() -> None:
    """A writer and a reader wait for the same socket if the other side asks for new keys and sends no more."""
    async with pair() as (a, b, _):
        tls = await request_join(offer := await offer_of(a, b), offer.token)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(tls.receive_into, memoryview(bytearray(1)))
            await trio.testing.wait_all_tasks_blocked()
            with pytest.raises(ConnectionLost):
                await tls.receive_into(memoryview(bytearray(1)))
            nursery.cancel_scope.cancel()
        tls.close()


async def test_a_taken_bulk_port_is_a_resource_error() -> None:
    (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
    port = listener.socket.getsockname()[1]
    with pytest.raises(ResourceError, match=f"bulk port {port}"):
        async with open_host(identity=Identity.generate(), events=EventLog(), bulk_port=port):
            pass
    await listener.aclose()
