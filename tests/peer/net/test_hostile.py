"""Attacks on a running host. An honest peer is still served afterwards, in bounded memory."""

from __future__ import annotations

import logging
import os
import resource
import socket
import struct
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import Any

import msgspec
import pytest
import trio
from libp2p.exceptions import BaseLibp2pError
from libp2p.peer.id import ID
from multiaddr import Multiaddr

from peer.events import Event, EventLog
from peer.identity import Identity
from peer.net.host import Host, open_host
from peer.net.libp2p_fixes import abort_connection
from peer.net.libp2p_fixes.yamux import STREAMS_IN_MAX
from peer.net.method import Call, Method
from peer.net.stream_channel import PROTOCOL
from peer.net.wire import RequestHeader
from tests.peer.support.clock import unit_s

FRAME = struct.Struct("!BBHII")  # Yamux: version, type, flags, stream, length
DATA, WINDOW_UPDATE, PING = range(3)
SYN = 1
GREETING = b"\x13/multistream/1.0.0\n"
GROWTH_MAX = 48 << 20  # bytes of resident memory an attack may cost
BOMBS_UNITS_MAX = 350  # of work, by attacker and victim together, which share this process
BOMB_UNITS_MAX = 33
LOST = (BaseLibp2pError, trio.BrokenResourceError, trio.ClosedResourceError)


class Note(msgspec.Struct, frozen=True):
    text: str


ECHO: Method[Note, Note] = Method("test/echo", Note, Note)
BIG: Method[Note, Note] = Method("test/big", Note, Note, reply_payload_max=8 << 20)
_BIG_PAYLOAD = bytes(8 << 20)


@asynccontextmanager
async def a_host(events: EventLog | None = None) -> AsyncIterator[Host]:
    async with open_host(identity=Identity.generate(), events=events or EventLog()) as host:
        yield host


class Victim:
    """The host under attack and what it measured before."""

    def __init__(self, host: Host, honest: Host, struck: list[str], bugs: list[Event]) -> None:
        self.host = host
        self.honest = honest
        self.struck = struck
        self.bugs = bugs
        self.port = int(host.addresses[0].split("/")[4])
        self.memory = _resident()
        self.files = len(os.listdir("/proc/self/fd"))

    async def dial(self, attacker: Host) -> Any:
        """Return an authenticated connection of `attacker`, below its rpc."""
        address, _, _ = self.host.addresses[0].partition("/p2p/")
        return await attacker.libp2p.get_network().dial_addr(Multiaddr(address), ID.from_base58(self.host.peer_id))

    async def connect_socket(self) -> trio.SocketStream:
        return await trio.open_tcp_stream("127.0.0.1", self.port)

    async def still_serves(self) -> None:
        """Check that a known and a new peer both get answers, and that little memory was used."""
        async with a_host() as newcomer:
            await newcomer.connect_address(self.host.addresses[0], timeout_s=60)  # also on a loaded machine
            for caller in (self.honest, newcomer):
                reply = await caller.rpc.call(self.host.peer_id, ECHO, Note("there?"), timeout_s=60)
                assert reply.body == Note("there?")
        assert _resident() - self.memory < GROWTH_MAX

    async def files_are_back(self) -> None:
        """Check that sockets of attackers that left are closed (`still_serves` opens some for its new peer)."""
        with trio.fail_after(300):
            while len(os.listdir("/proc/self/fd")) > self.files + 4:
                await trio.sleep(0.02)


@pytest.fixture
async def victim() -> AsyncIterator[Victim]:
    struck: list[str] = []
    bugs: list[Event] = []

    def note(event: Event) -> None:
        if event.name == "peer_penalized":
            struck.append(str(event.fields["reason"]))
        if event.name == "bug":
            bugs.append(event)

    async def echo(call: Call[Note]) -> Note:
        return call.body

    async def big(call: Call[Note]) -> tuple[Note, bytes]:
        return call.body, _BIG_PAYLOAD

    events = EventLog()
    with events.subscribed(note):
        async with a_host(events) as host, a_host() as honest:
            host.rpc.register(ECHO, echo)
            host.rpc.register(BIG, big)
            await honest.connect_address(host.addresses[0], timeout_s=60)
            await honest.rpc.call(host.peer_id, ECHO, Note("warm"), timeout_s=60)
            yield Victim(host, honest, struck, bugs)


def _resident() -> int:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * resource.getpagesize()


async def test_raw_garbage(victim: Victim) -> None:
    for _ in range(200):
        async with await victim.connect_socket() as sock:
            with suppress(*LOST):
                await sock.send_all(os.urandom(1000))
    await victim.still_serves()
    await victim.files_are_back()


async def test_half_handshakes(victim: Victim) -> None:
    async with AsyncExitStack() as held:
        for size in range(300):
            sock = await held.enter_async_context(await victim.connect_socket())
            with suppress(*LOST):
                await sock.send_all((GREETING + b"\x07/noise\n" + b"\x00\x20" + bytes(32))[:size])
        await victim.still_serves()
    await victim.files_are_back()


async def test_500_idle_sockets(victim: Victim) -> None:
    async with AsyncExitStack() as held:
        for _ in range(500):
            await held.enter_async_context(await victim.connect_socket())
        await victim.still_serves()
    await victim.files_are_back()


async def test_writers_of_one_byte_at_a_time_are_cut(victim: Victim) -> None:
    network: Any = victim.host.libp2p.get_network()
    network.connection_config.inbound_upgrade_timeout = 2.0  # 10 s by default

    async def trickle(sock: trio.SocketStream) -> None:
        with suppress(*LOST):
            for byte in GREETING * 100:
                await sock.send_all(bytes([byte]))
                await trio.sleep(0.2)

    async with AsyncExitStack() as held:
        with trio.fail_after(120):  # seven minutes of bytes are meant to be sent
            async with trio.open_nursery() as nursery:
                for _ in range(60):
                    nursery.start_soon(trickle, await held.enter_async_context(await victim.connect_socket()))
        await victim.still_serves()
    await victim.files_are_back()


async def test_100_connect_disconnect_cycles(victim: Victim) -> None:
    for _ in range(10):  # the library accepts 10 connections per second and identity
        async with a_host() as attacker:
            for _ in range(10):
                await abort_connection(await victim.dial(attacker))
    await victim.still_serves()
    await victim.files_are_back()


async def test_names_that_are_not_utf8(victim: Victim) -> None:
    async with a_host() as attacker:
        connection = await victim.dial(attacker)
        for _ in range(50):
            stream = await connection.new_stream()
            await stream.write(GREETING + b"\x05\xff\xfe\xfd\xfc\n")
            await _until_it_ends(stream)
        await victim.still_serves()


@pytest.mark.parametrize(
    "frame",
    [
        b"\xff\xff\xff\xff" + bytes(1000),
        b"\x00\x10\x00\x01" + bytes(1000),
        b"\x00\x00\x00\x08" + os.urandom(8),
        b"\x00\x00\x00\x00",
    ],
    ids=["4 GiB", "1 byte over the limit", "no msgpack", "empty"],
)
async def test_bad_rpc_frames_are_penalized(victim: Victim, frame: bytes) -> None:
    async with a_host() as attacker:
        stream = await _rpc_stream(await victim.dial(attacker))
        await stream.write(frame)
        await _until_it_ends(stream)
        await victim.still_serves()
    assert len(victim.struck) == 1


def bombs() -> Iterator[bytes]:
    """Yield 198 headers that are cheap to send and might be dear to decode: depth, and sizes that are not there."""
    openings = [
        b"\x91",
        b"\x81\xa1x",
        b"\xdc\x00\x01",
        b"\xde\x00\x01\xc0",
        b"\xdd\x00\x00\x00\x01",
        b"\x82\xc0\xc0\xc0",
    ]
    for depth in (10, 100, 500, 900, 1_000, 1_100, 2_000, 3_000, 3_900, 4_000, 4_090):
        for opening in openings:
            yield (opening * depth)[: (16 << 10) - 100]
    for size in (1 << 8, 1 << 16, 1 << 24, 1 << 31, (1 << 32) - 1, 100):
        for kind in (b"\xdd", b"\xdf", b"\xdb", b"\xc6", b"\xc9"):
            yield kind + size.to_bytes(4, "big")
            yield b"\x94\xa9test/echo\x00\xcd\x03\xe8" + kind + size.to_bytes(4, "big")
    for depth in range(72):
        yield b"\x94\xa9test/echo\x00\xcd\x03\xe8" + b"\x91" * (200 * depth) + b"\xc0"


async def test_msgpack_bombs(victim: Victim) -> None:
    async with a_host() as attacker:
        connection = await victim.dial(attacker)
        before, costs = _resident(), list[float]()
        for bomb in bombs():
            began = time.process_time()
            stream = await _rpc_stream(connection)
            await stream.write(struct.pack("!I", len(bomb)) + bomb)
            await _until_it_ends(stream)
            costs.append(time.process_time() - began)
        assert len(costs) == 198
        assert sum(costs) <= BOMBS_UNITS_MAX * unit_s() and max(costs) <= BOMB_UNITS_MAX * unit_s()
        assert not connection.is_closed
        assert _resident() - before <= 1 << 20
        await victim.still_serves()
    assert len(victim.struck) == 1 and not victim.bugs


async def test_calls_that_end_before_they_begin(victim: Victim) -> None:
    """An honest caller whose loop lags may send such a header."""
    body = msgspec.Raw(msgspec.msgpack.encode(Note("late")))
    async with a_host() as attacker:
        connection = await victim.dial(attacker)
        for timeout_ms in (0, -1, -(1 << 60)):
            header = msgspec.msgpack.encode(RequestHeader(ECHO.name, 0, timeout_ms, body))
            stream = await _rpc_stream(connection)
            await stream.write(struct.pack("!I", len(header)) + header)
            await _until_it_ends(stream)
        await victim.still_serves()
    assert not victim.struck


async def test_truncated_rpc_frames(victim: Victim) -> None:
    header = msgspec.msgpack.encode(RequestHeader(ECHO.name, 0, 1000, msgspec.Raw(msgspec.msgpack.encode(Note("")))))
    frame = struct.pack("!I", len(header)) + header
    async with a_host() as attacker:
        connection = await victim.dial(attacker)
        for size in range(len(frame)):
            stream = await _rpc_stream(connection)
            await stream.write(frame[:size])
            await stream.close()
            await _until_it_ends(stream)
        await victim.still_serves()


async def test_a_peer_that_never_reads(victim: Victim) -> None:
    """A peer calls for big replies and reads nothing. Each costs us a window, until the connection ends."""
    header = msgspec.msgpack.encode(RequestHeader(BIG.name, 0, 60_000, msgspec.Raw(msgspec.msgpack.encode(Note("")))))
    async with a_host() as attacker:
        connection = await victim.dial(attacker)
        for _ in range(60):
            stream = await _rpc_stream(connection)
            await stream.write(struct.pack("!I", len(header)) + header)
        await victim.still_serves()
        await abort_connection(connection)
    await victim.files_are_back()


async def test_a_socket_that_never_reads(victim: Victim) -> None:
    """As above, one layer down: our socket sends no byte, and other connections do not notice."""
    header = msgspec.msgpack.encode(RequestHeader(BIG.name, 0, 60_000, msgspec.Raw(msgspec.msgpack.encode(Note("")))))
    async with a_host() as attacker:
        connection = await victim.dial(attacker)
        await _stop_reading(connection)
        frames = bytearray()
        request = GREETING + _line(PROTOCOL) + struct.pack("!I", len(header)) + header
        for stream_id in range(1001, 1101, 2):
            frames += FRAME.pack(0, WINDOW_UPDATE, SYN, stream_id, 16 << 20)
            frames += FRAME.pack(0, DATA, 0, stream_id, len(request)) + request
        await _send_raw(connection, bytes(frames))
        await victim.still_serves()
        await abort_connection(connection)
    await victim.files_are_back()


async def test_flood_past_the_receive_window(victim: Victim, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "peer.net.libp2p_fixes.yamux")
    async with a_host() as attacker:
        connection = await victim.dial(attacker)
        await _send_raw(connection, FRAME.pack(0, WINDOW_UPDATE, SYN, 1001, 0))
        with trio.fail_after(300):
            while not connection.is_closed:
                await _send_raw(connection, FRAME.pack(0, DATA, 0, 1001, 65536) + bytes(65536))
        await victim.still_serves()
    assert "bytes sent into a window of" in caplog.text


async def test_many_streams_each_within_its_window(victim: Victim) -> None:
    """Five hundred calls fill their windows. The memory for them is bounded, and soon freed."""
    async with a_host() as attacker:
        connection = await victim.dial(attacker)
        body = bytes(65536)
        with trio.fail_after(300):
            for stream_id in range(1001, 2001, 2):
                await _send_raw(connection, FRAME.pack(0, WINDOW_UPDATE, SYN, stream_id, 0))
                for _ in range(4):
                    await _send_raw(connection, FRAME.pack(0, DATA, 0, stream_id, len(body)) + body)
        await victim.still_serves()


async def test_flood_of_new_streams(victim: Victim) -> None:
    ids = range(1001, 1001 + 10 * STREAMS_IN_MAX, 2)
    async with a_host() as attacker:
        connection = await victim.dial(attacker)
        await _stop_reading(connection)
        await _send_raw(connection, b"".join(FRAME.pack(0, WINDOW_UPDATE, SYN, stream_id, 0) for stream_id in ids))
        await victim.still_serves()
        for inbound in victim.host.libp2p.get_network().get_connections(ID.from_base58(attacker.peer_id)):
            assert len(inbound.get_streams()) <= STREAMS_IN_MAX


async def test_flood_of_pings_whose_answers_are_not_read(victim: Victim, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "peer.net.libp2p_fixes.yamux")
    async with a_host() as attacker:
        connection = await victim.dial(attacker)
        await _stop_reading(connection)
        pings = FRAME.pack(0, PING, SYN, 0, 7) * 5000
        with trio.fail_after(300):
            while attacker.peer_id in victim.host.connected:
                await _send_raw(connection, pings)
        await victim.still_serves()
    assert "does not read our answers" in caplog.text


async def _rpc_stream(connection: Any) -> Any:
    stream = await connection.new_stream()
    await stream.write(GREETING + _line(PROTOCOL))
    return stream


def _line(text: str) -> bytes:
    return bytes([len(text) + 1]) + text.encode() + b"\n"


async def _send_raw(connection: Any, frames: bytes) -> None:
    """Insert raw frames between those of the multiplexer, as fast as they are sent."""
    send_queue = connection.muxed_conn.send_queue
    send_queue.put(frames)
    while send_queue.is_full_for(len(frames)):
        await send_queue.wait_room()
    await trio.lowlevel.checkpoint()


async def _stop_reading(connection: Any) -> None:
    """Stop reading this end's socket. Its buffer is made small, to be full soon."""
    transport = connection.muxed_conn.secured_conn.conn
    sock = transport.conn.stream.stream.socket
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    never = trio.Event()

    async def read_nothing(n: int | None = None) -> bytes:
        await never.wait()
        return b""

    transport.conn.read = read_nothing


async def _until_it_ends(stream: Any) -> None:
    with suppress(*LOST), trio.fail_after(300):
        while await stream.read(4096):
            pass
