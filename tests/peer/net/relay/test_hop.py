"""What a relay answers, over real sockets: to honest peers, to peers that want too much, and to nonsense."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import psutil
import pytest
import trio
from libp2p.exceptions import BaseLibp2pError
from libp2p.peer.id import ID
from libp2p.relay.circuit_v2.pb.circuit_pb2 import HopMessage, PeerId, Reservation, Status, StopMessage
from libp2p.utils.varint import encode_varint_prefixed
from multiaddr import Multiaddr

from peer.errors import ConfigError, ResourceError
from peer.events import EventLog
from peer.identity import Identity
from peer.net.host import Host, open_host
from peer.net.libp2p_fixes import identify
from peer.net.libp2p_fixes.yamux_stream import YamuxStream
from peer.net.nat.circuit_relay import HOP, MESSAGE_BYTES_MAX, STOP, CircuitRefused, read_message, reserve
from peer.net.reach import LOCAL, Reach
from peer.net.relay import hop
from peer.net.relay.hop import HopServer
from peer.net.relay.ledger import RelayLimits
from peer.net.relay.server import open_relay
from peer.net.stream_channel import greeting_of

GREETING = greeting_of(HOP)
RESERVE = HopMessage(type=HopMessage.RESERVE)


@asynccontextmanager
async def a_relay(**limits: Any) -> AsyncIterator[HopServer]:
    async with open_relay(Identity.generate(), LOCAL, RelayLimits(**limits)) as relay:
        yield relay


class Client:
    """A peer that is connected to a relay and says what the test wants."""

    def __init__(self, host: Host, relay: str, connection: Any) -> None:
        self.host = host
        self.id = ID.from_base58(host.peer_id)
        self.relay_id = ID.from_base58(relay)
        self.connection = connection

    async def begin(self, request: bytes) -> YamuxStream:
        stream: YamuxStream = await self.connection.muxed_conn.open_stream()
        await stream.write(GREETING + request)
        for _ in GREETING:
            await stream.read(1)
        return stream

    async def ask(self, request: HopMessage | bytes) -> tuple[YamuxStream, HopMessage]:
        data = request if isinstance(request, bytes) else encode_varint_prefixed(request.SerializeToString())
        stream = await self.begin(data)
        return stream, await read_message(stream, HopMessage)

    async def status(self, request: HopMessage | bytes) -> str:
        _, answer = await self.ask(request)
        assert answer.type == HopMessage.STATUS
        return Status.Name(answer.status)

    def answer_calls(self, handler: Callable[[Any], Any]) -> None:
        self.host.libp2p.set_stream_handler(STOP, handler)


@asynccontextmanager
async def a_client(relay: str) -> AsyncIterator[Client]:
    bare, _, peer = relay.partition("/p2p/")
    async with open_host(identity=Identity.generate(), events=EventLog(), bulk_port=None) as host:
        connection = await host.libp2p.get_network().dial_addr(Multiaddr(bare), ID.from_base58(peer))
        yield Client(host, peer, connection)


def connect_to(peer: ID) -> HopMessage:
    return HopMessage(type=HopMessage.CONNECT, peer=PeerId(id=peer.to_bytes()))


async def echo(stream: Any, status: Status.ValueType = Status.OK) -> None:
    """Answer a call, and send back what comes."""
    await read_message(stream, StopMessage)
    await stream.write(encode_varint_prefixed(StopMessage(type=StopMessage.STATUS, status=status).SerializeToString()))
    while status == Status.OK:
        await stream.write(await stream.read(1 << 16))


async def until(true: Callable[[], bool]) -> None:
    with trio.fail_after(30):
        while not true():
            await trio.sleep(0.01)


async def test_a_circuit_is_told_its_limits_and_leaves_nothing_behind() -> None:
    async with (
        a_relay(circuit_s=70, circuit_bytes=9000, circuits_per_peer=1) as relay,
        a_client(relay.addresses[0]) as called,
        a_client(relay.addresses[0]) as caller,
    ):
        assert await caller.status(connect_to(called.id)) == "NO_RESERVATION"
        held = await reserve(called.host.libp2p, called.relay_id)
        assert held.held_s == pytest.approx(3600, abs=60) and (held.circuit_s, held.circuit_bytes) == (70, 9000)
        called.answer_calls(echo)
        stream, answer = await caller.ask(connect_to(called.id))
        assert answer.status == Status.OK and (answer.limit.duration, answer.limit.data) == (70, 9000)
        await stream.write(b"over the relay")
        assert await stream.read(100) == b"over the relay"
        assert (relay.counts().reservations, relay.counts().circuits) == (1, 1)
        assert await caller.status(connect_to(called.id)) == "RESOURCE_LIMIT_EXCEEDED"
        await stream.reset()
        await until(lambda: relay.counts().circuits == 0)
        await caller.ask(connect_to(called.id))
        await caller.host.disconnect(relay.peer_id)
        await until(lambda: relay.counts().circuits == 0)
        await called.host.disconnect(relay.peer_id)
        await until(lambda: relay.counts().reservations == 0)
        assert (relay.counts().refused, relay.counts().bytes_relayed) == (2, 28)


async def test_a_relay_that_is_full_says_so() -> None:
    async with (
        a_relay(reservations_per_prefix=1) as relay,
        a_client(relay.addresses[0]) as first,
        a_client(relay.addresses[0]) as second,
    ):
        await reserve(first.host.libp2p, first.relay_id)
        with pytest.raises(CircuitRefused, match="RESERVATION_REFUSED"):
            await reserve(second.host.libp2p, second.relay_id)
        await reserve(first.host.libp2p, first.relay_id)
        await first.host.disconnect(relay.peer_id)
        await until(lambda: relay.counts().reservations == 0)
        await reserve(second.host.libp2p, second.relay_id)


async def test_no_peer_reserves_for_another() -> None:
    async with (
        a_relay() as relay,
        a_client(relay.addresses[0]) as liar,
        a_client(relay.addresses[0]) as other,
    ):
        forged = HopMessage(type=HopMessage.RESERVE, peer=PeerId(id=other.id.to_bytes()))
        assert await liar.status(forged) == "OK"
        shown = connect_to(other.id)
        shown.reservation.CopyFrom(Reservation(expire=1 << 40, voucher=b"anything"))
        assert await liar.status(shown) == "NO_RESERVATION"
        assert relay.counts().reservations == 1


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        (encode_varint_prefixed(b"\xff" * 40), "MALFORMED_MESSAGE"),
        (encode_varint_prefixed(b""), "MALFORMED_MESSAGE"),
        (encode_varint_prefixed(bytes(MESSAGE_BYTES_MAX + 1)), "MALFORMED_MESSAGE"),
        (b"\xff" * 20, "MALFORMED_MESSAGE"),
        (encode_varint_prefixed(b"\x08\x63"), "UNEXPECTED_MESSAGE"),
        (encode_varint_prefixed(HopMessage(type=HopMessage.STATUS).SerializeToString()), "UNEXPECTED_MESSAGE"),
        (encode_varint_prefixed(HopMessage(type=HopMessage.CONNECT).SerializeToString()), "UNEXPECTED_MESSAGE"),
        (encode_varint_prefixed(connect_to(ID(b"\xff" * 999)).SerializeToString()), "NO_RESERVATION"),
    ],
)
async def test_nonsense_is_answered(request_bytes: bytes, status: str) -> None:
    async with a_relay() as relay, a_client(relay.addresses[0]) as client:
        assert await client.status(request_bytes) == status
        assert await client.status(RESERVE) == "OK"


async def test_half_a_request_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hop, "REQUEST_S", 0.1)
    async with a_relay() as relay, a_client(relay.addresses[0]) as client:
        stream = await client.begin(b"\x20\x08")
        with trio.fail_after(30), pytest.raises(Exception, match="reset"):
            await stream.read(1)


@pytest.mark.parametrize("answer", ["no", "garbage", "nothing", "no protocol"])
async def test_a_called_peer_that_does_not_answer(monkeypatch: pytest.MonkeyPatch, answer: str) -> None:
    async def garbage(stream: Any) -> None:
        await stream.write(encode_varint_prefixed(b"\xff" * 40))

    async def nothing(stream: Any) -> None:
        await trio.sleep_forever()

    async with (
        a_relay() as relay,
        a_client(relay.addresses[0]) as called,
        a_client(relay.addresses[0]) as caller,
    ):
        refuse = partial(echo, status=Status.PERMISSION_DENIED)
        answers: dict[str, Callable[[Any], Any]] = {"no": refuse, "garbage": garbage, "nothing": nothing}
        if answer in answers:
            called.answer_calls(answers[answer])
        assert await called.status(RESERVE) == "OK"
        monkeypatch.setattr(hop, "REQUEST_S", 0.3 if answer == "nothing" else 10.0)
        assert await caller.status(connect_to(called.id)) == "CONNECTION_FAILED"
        await until(lambda: relay.counts().circuits == 0)


async def test_a_called_peer_is_told_that_its_caller_has_left() -> None:
    called_up, left, ended = trio.Event(), trio.Event(), trio.Event()

    async def answer_late(stream: Any) -> None:
        called_up.set()
        await left.wait()
        with pytest.raises(BaseLibp2pError):
            await echo(stream)
        ended.set()

    async with (
        a_relay() as relay,
        a_client(relay.addresses[0]) as called,
        a_client(relay.addresses[0]) as caller,
    ):
        called.answer_calls(answer_late)
        assert await called.status(RESERVE) == "OK"
        stream = await caller.begin(encode_varint_prefixed(connect_to(called.id).SerializeToString()))
        with trio.fail_after(30):
            await called_up.wait()
            await stream.reset()
            await caller.status(RESERVE)  # the reset has arrived before
            left.set()
            await ended.wait()
        await until(lambda: relay.counts().circuits == 0)


async def test_requests_without_pause_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hop, "PEER_REQUESTS", (3, 1e-6))
    async with (
        a_relay() as relay,
        a_client(relay.addresses[0]) as eager,
        a_client(relay.addresses[0]) as other,
    ):
        told = [await eager.status(RESERVE) for _ in range(4)]
        assert told == ["OK"] * 3 + ["RESOURCE_LIMIT_EXCEEDED"] and await other.status(RESERVE) == "OK"


async def test_a_relay_behind_a_relay_serves_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("peer.net.nat.traversal.Traversal._seek_direct", _stay)
    placed = trio.Event()
    async with a_relay() as relay, a_client(relay.addresses[0]) as client:
        hidden = open_host(
            identity=Identity.generate(), events=EventLog(), reach=replace(LOCAL, relays=(relay.addresses[0],))
        )
        async with hidden as host:
            HopServer(host, RelayLimits())
            host.traversal.changed = placed.set
            await until(lambda: bool(host.traversal.addresses))
            connection = await client.host.traversal.dial(f"{relay.addresses[0]}/p2p-circuit", host.peer_id)
            through = Client(client.host, host.peer_id, connection)
            assert await through.status(RESERVE) == "PERMISSION_DENIED"


async def _stay(self: Any, peer: ID) -> None:
    """Do not look for a direct connection."""


async def test_a_relay_tells_a_peer_where_it_sees_it() -> None:
    async with a_relay() as relay, a_client(relay.addresses[0]) as client:
        seen = Multiaddr(await identify._ask(client.host.libp2p, client.relay_id))
        port = int(relay.addresses[0].split("/")[4])
        ours = {c.laddr.port for c in psutil.Process().net_connections("tcp4") if c.raddr and c.raddr.port == port}
        assert str(seen) in {f"/ip4/127.0.0.1/tcp/{each}" for each in ours}


async def test_addresses_that_do_not_serve() -> None:
    async with a_relay() as relay:
        taken = relay.addresses[0].partition("/p2p/")[0]
        with pytest.raises(ResourceError, match=r"in use.*choose another with --listen"):
            async with open_relay(Identity.generate(), Reach((taken,)), RelayLimits()):
                pass
    for listen, announce in (("/ip4/0.0.0.0/udp/4001", ()), ("/ip4/0.0.0.0/tcp/0", ("/ip4/203.0.113.7/tcp/4001",))):
        with pytest.raises(ConfigError):
            async with open_relay(Identity.generate(), Reach((listen,), announce), RelayLimits()):
                pass
