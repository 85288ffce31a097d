"""Our Yamux and Noise transports over memory streams (what stock 0.8.1 got wrong is in `test_libp2p_holes`)."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio
import trio.testing
from hypothesis import given, settings
from hypothesis import strategies as st
from libp2p.io.exceptions import ConnectionClosedError, IncompleteReadError
from libp2p.security.noise.io import NoiseTransportReadWriter
from libp2p.stream_muxer.exceptions import MuxedConnUnavailable, MuxedStreamClosed, MuxedStreamEOF, MuxedStreamReset
from noise.connection import Keypair, NoiseConnection

from peer.net.libp2p_fixes.noise import NoiseTransport
from peer.net.libp2p_fixes.send_queue import DATA_BYTES, SendQueue
from peer.net.libp2p_fixes.yamux import STREAMS_IN_MAX, Yamux
from peer.net.libp2p_fixes.yamux_inbound import SILENT_MAX, WASTED_MAX, WASTED_S
from peer.net.libp2p_fixes.yamux_outbound import STREAMS_OUT_MAX
from peer.net.libp2p_fixes.yamux_stream import WINDOW_INITIAL, YamuxStream
from tests.peer.support.holes_in_muxer import (
    ACK,
    DATA,
    FIN,
    GO_AWAY,
    HEADER,
    PEER,
    PING,
    RST,
    SYN,
    WINDOW_UPDATE,
    MemoryConn,
    conn_pair,
)


@asynccontextmanager
async def running(conn: MemoryConn) -> AsyncIterator[Yamux]:
    mux = Yamux(conn, PEER, is_initiator=conn.is_initiator)  # type: ignore[arg-type]
    async with trio.open_nursery() as nursery:
        nursery.start_soon(mux.start)
        await mux.event_started.wait()
        yield mux
        await mux.close()


@asynccontextmanager
async def stream_pair() -> AsyncIterator[tuple[YamuxStream, YamuxStream]]:
    left, right = conn_pair()
    async with running(left) as dialler, running(right) as listener:
        await (stream := await dialler.open_stream()).write(b"x")  # a silent one is not handed over
        accepted = await listener.accept_stream()
        await accepted.read()
        yield stream, accepted


async def _read_all(stream: YamuxStream) -> bytes:
    got = bytearray()
    try:
        while True:
            got += await stream.read(100_000)
    except MuxedStreamEOF:
        return bytes(got)


async def _frame(conn: MemoryConn) -> tuple[int, int, int, int]:
    """Return type, flags, stream and length of the next frame that is no ping."""
    while True:
        header = b""
        while len(header) < HEADER.size:
            header += await conn.read(HEADER.size - len(header))
        _, kind, flags, stream_id, length = HEADER.unpack(header)
        if kind != PING:
            return kind, flags, stream_id, length


@settings(max_examples=20, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 300_000), max_size=5),
    cuts=st.lists(st.integers(30, 70_000), min_size=1, max_size=5),
)
def test_bytes_arrive_whole_and_in_order(sizes: list[int], cuts: list[int]) -> None:
    """For any sizes of writes and any cuts by the transport."""

    async def main() -> None:
        left, right = conn_pair()
        sizes_read = itertools.cycle(cuts)

        async def read_cut(n: int | None = None) -> bytes:
            return bytes(await right.stream.receive_some(next(sizes_read)))

        right.read = read_cut  # type: ignore[method-assign]
        sent = b"".join(bytes([i % 251]) * size for i, size in enumerate(sizes))
        async with running(left) as dialler, running(right) as listener, trio.open_nursery() as nursery:
            stream = await dialler.open_stream()

            async def write() -> None:
                at = 0
                for size in sizes:
                    await stream.write(memoryview(sent)[at : at + size])
                    at += size
                await stream.close()

            nursery.start_soon(write)
            assert await _read_all(await listener.accept_stream()) == sent

    trio.run(main)


async def test_half_close_leaves_the_other_direction_open() -> None:
    async with stream_pair() as (ours, theirs):
        await ours.write(b"question")
        await ours.close_write()
        assert await _read_all(theirs) == b"question"
        await theirs.write(b"answer")
        await theirs.close()
        assert await _read_all(ours) == b"answer"
        with pytest.raises(MuxedStreamClosed):
            await ours.write(b"more")
        assert not ours.muxed_conn._streams


async def test_reset_ends_both_directions_after_the_data_sent() -> None:
    async with stream_pair() as (ours, theirs):
        await ours.write(b"last words")
        await ours.reset()
        assert await theirs.read() == b"last words"
        with pytest.raises(MuxedStreamReset):
            await theirs.read()
        with pytest.raises(MuxedStreamReset):
            await theirs.write(b"?")


async def test_received_bytes_can_be_read_after_the_connection_ends() -> None:
    async with stream_pair() as (ours, theirs):
        await ours.write(b"goodbye")
        await ours.close()
        await ours.muxed_conn.close()
        await theirs.muxed_conn.event_closed.wait()
        assert await _read_all(theirs) == b"goodbye"
        with pytest.raises(MuxedConnUnavailable):
            await theirs.muxed_conn.open_stream()


async def test_read_into_fills_the_callers_buffer() -> None:
    async with stream_pair() as (ours, theirs):
        payload = bytes(range(256)) * 600
        await ours.write(payload)
        buffer = bytearray(len(payload))
        view, ready = memoryview(buffer), 0
        while ready < len(payload):
            ready += await theirs.read_into(view[ready:])
        assert buffer == payload


async def test_the_callers_buffer_may_change_after_write() -> None:
    async with stream_pair() as (ours, theirs):
        buffer = bytearray(b"a" * 1000)
        await ours.write(buffer)
        buffer[:] = b"b" * 1000
        await ours.close()
        assert await _read_all(theirs) == b"a" * 1000


async def test_window_grows_for_a_fast_reader_and_returns_to_the_connection(
    autojump_clock: trio.testing.MockClock,  # makes the reader fast on any machine
) -> None:
    async with stream_pair() as (ours, theirs), trio.open_nursery() as nursery:

        async def write() -> None:
            await ours.write(bytes(4 << 20))
            await ours.close()

        nursery.start_soon(write)
        before = theirs.muxed_conn._growth_left
        await _read_all(theirs)
        assert theirs.window_target > WINDOW_INITIAL
        assert theirs.muxed_conn._growth_left == before - (theirs.window_target - WINDOW_INITIAL)
        await theirs.close()
        assert theirs.muxed_conn._growth_left == before


async def test_a_write_waiting_for_window_can_be_cancelled(autojump_clock: trio.testing.MockClock) -> None:
    async with stream_pair() as (ours, theirs):
        with trio.move_on_after(60) as deadline:
            await ours.write(bytes(2 * WINDOW_INITIAL))
        assert deadline.cancelled_caught
        await ours.reset()
        other = await ours.muxed_conn.open_stream()
        await other.write(b"unharmed")
        assert await (await theirs.muxed_conn.accept_stream()).read() == b"unharmed"


async def test_a_finished_stream_frees_its_slot() -> None:
    left, right = conn_pair()
    async with running(left) as dialler, running(right) as listener:
        for _ in range(STREAMS_OUT_MAX + 10):
            await (await dialler.open_stream()).close()
            await (await listener.accept_stream()).close()
        await trio.testing.wait_all_tasks_blocked()
        assert not listener._streams


async def test_waiting_for_a_slot_ends_when_one_is_free(autojump_clock: trio.testing.MockClock) -> None:
    left, right = conn_pair()
    async with running(left) as dialler, running(right), trio.open_nursery() as nursery:
        streams = [await dialler.open_stream() for _ in range(STREAMS_OUT_MAX)]
        nursery.start_soon(dialler.open_stream)
        await trio.testing.wait_all_tasks_blocked()
        await streams[0].close()


async def test_streams_left_half_open_by_the_peer_are_swept(autojump_clock: trio.testing.MockClock) -> None:
    async with stream_pair() as (ours, theirs):
        await ours.close()
        await trio.sleep(90)
        assert not ours.muxed_conn._streams
        with pytest.raises(MuxedStreamReset):
            await theirs.write(b"too late")


async def test_streams_beyond_the_limit_are_reset() -> None:
    left, right = conn_pair()
    async with running(right) as listener:
        syns = b"".join(HEADER.pack(0, DATA, SYN, sid, 1) + b"x" for sid in range(1, 2 * STREAMS_IN_MAX + 3, 2))
        await left.write(syns)
        answers = [await _frame(left) for _ in range(STREAMS_IN_MAX + 1)]
        assert [flags for _, flags, _, _ in answers] == [ACK] * STREAMS_IN_MAX + [RST]
        assert len(listener._streams) == STREAMS_IN_MAX


async def test_the_oldest_silent_stream_gives_way() -> None:
    left, right = conn_pair()
    async with running(right) as listener:
        await left.write(HEADER.pack(0, DATA, SYN, 1, 1) + b"x")  # no silent one
        await left.write(b"".join(HEADER.pack(0, WINDOW_UPDATE, SYN, 3 + 2 * n, 0) for n in range(SILENT_MAX + 1)))
        answers = [await _frame(left) for _ in range(SILENT_MAX + 3)]
        assert [(flags, sid) for _, flags, sid, _ in answers if flags != ACK] == [(RST, 3)]
        assert {1, 5} <= listener._streams.keys() and 3 not in listener._streams


async def test_only_a_stream_that_speaks_is_handed_over() -> None:
    left, right = conn_pair()
    async with running(right) as listener:
        for flags, sid, body in ((SYN, 1, b""), (SYN, 3, b""), (SYN | FIN, 5, b""), (SYN, 7, b"x"), (0, 1, b"y")):
            await left.write(HEADER.pack(0, DATA, flags, sid, len(body)) + body)
        assert await _read_all(await listener.accept_stream()) == b"", "5, at its end"
        assert [await (await listener.accept_stream()).read() for _ in range(2)] == [b"x", b"y"]
        assert not listener._accepted_out.statistics().current_buffer_used, "3 is silent"


async def test_too_many_streams_opened_for_nothing_end_the_connection(autojump_clock: trio.testing.MockClock) -> None:
    def wasted(first: int, count: int) -> bytes:
        ids = range(first, first + 2 * count, 2)
        return b"".join(HEADER.pack(0, WINDOW_UPDATE, flag, sid, 0) for sid in ids for flag in (SYN, RST))

    left, right = conn_pair()
    async with running(right) as listener:
        for turn in range(3):  # rarely enough
            await left.write(wasted(1 + turn * 2 * WASTED_MAX, WASTED_MAX))
            await trio.sleep(WASTED_S)
        assert not listener.is_closed
        await left.write(wasted(9001, WASTED_MAX + 1))
        with trio.fail_after(60):
            await listener.event_closed.wait()


async def test_calls_given_up_after_their_answer_are_not_counted() -> None:
    async with stream_pair() as (ours, theirs):
        for _ in range(2 * WASTED_MAX):
            stream = await ours.muxed_conn.open_stream()
            await stream.write(b"question")
            accepted = await theirs.muxed_conn.accept_stream()
            await accepted.write(bytes(100))
            await stream.reset()
            await trio.testing.wait_all_tasks_blocked()
        assert not theirs.muxed_conn.is_closed


@pytest.mark.parametrize(
    "frames",
    [
        HEADER.pack(1, DATA, SYN, 1, 0),
        HEADER.pack(0, 4, 0, 1, 0),
        HEADER.pack(0, WINDOW_UPDATE, SYN, 2, 0),
        HEADER.pack(0, WINDOW_UPDATE, SYN, 0, 0),
        HEADER.pack(0, WINDOW_UPDATE, SYN, 1, 0) * 2,
        HEADER.pack(0, DATA, SYN, 1, WINDOW_INITIAL + 1),
        HEADER.pack(0, DATA, 0, 7, 1),
    ],
    ids=["version", "type", "our parity", "stream 0", "SYN twice", "over the window", "for no stream"],
)
async def test_violations_end_the_connection(frames: bytes) -> None:
    left, right = conn_pair()
    async with running(right) as listener:
        await left.write(frames)
        with trio.fail_after(60):
            await listener.event_closed.wait()


async def test_go_away_and_end_of_stream_end_the_connection() -> None:
    for farewell in (HEADER.pack(0, GO_AWAY, 0, 0, 0), b""):
        left, right = conn_pair()
        async with running(right) as listener:
            await left.write(farewell)
            if not farewell:
                await left.close()
            with trio.fail_after(60):
                await listener.event_closed.wait()


async def test_data_under_way_to_a_stream_that_we_reset_is_skipped_up_to_its_window() -> None:
    left, right = conn_pair()
    async with running(right) as listener:
        await left.write(HEADER.pack(0, DATA, SYN, 1, 1) + b"x")
        await (await listener.accept_stream()).reset()
        for size in (WINDOW_INITIAL // 4 - 1, *[WINDOW_INITIAL // 4] * 3):
            await left.write(HEADER.pack(0, DATA, 0, 1, size) + bytes(size))
        await left.write(HEADER.pack(0, DATA, SYN | FIN, 3, 5) + b"fresh")
        assert await _read_all(await listener.accept_stream()) == b"fresh"
        await left.write(HEADER.pack(0, DATA, 0, 1, 1) + b"x")
        with trio.fail_after(60):
            await listener.event_closed.wait()


async def test_a_closed_send_queue_blocks_no_writer(autojump_clock: trio.testing.MockClock) -> None:
    """Nothing empties it, and a writer that asks in a loop must let other tasks run."""
    send_queue = SendQueue(lambda: None)
    send_queue.put(bytes(DATA_BYTES))
    assert send_queue.is_full_for(65536)

    async def wait() -> None:
        while send_queue.is_full_for(65536):
            await send_queue.wait_room()

    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(wait)
            await trio.testing.wait_all_tasks_blocked()
            send_queue.close()
        await wait()
    with trio.testing.assert_checkpoints():
        await send_queue.wait_room()


def _handshaken() -> tuple[NoiseConnection, NoiseConnection]:
    sides = [NoiseConnection.from_name(b"Noise_XX_25519_ChaChaPoly_SHA256") for _ in range(2)]
    for k, side in enumerate(sides):
        side.set_keypair_from_private_bytes(Keypair.STATIC, bytes([7 + k] * 32))
    initiator, responder = sides
    initiator.set_as_initiator()
    responder.set_as_responder()
    for side in sides:
        side.start_handshake()
    responder.read_message(initiator.write_message())
    initiator.read_message(responder.write_message())
    responder.read_message(initiator.write_message())
    return initiator, responder


def _noise_pair(kinds: tuple[Any, Any]) -> tuple[Any, Any, MemoryConn, MemoryConn]:
    left, right = conn_pair()
    ours, theirs = _handshaken()
    return kinds[0](left, ours), kinds[1](right, theirs), left, right


@pytest.mark.parametrize("ours_sends", [True, False])
async def test_noise_agrees_with_the_stock_transport(ours_sends: bool) -> None:
    kinds = (NoiseTransport, NoiseTransportReadWriter)
    sender, receiver, _, _ = _noise_pair(kinds if ours_sends else kinds[::-1])
    for size in (0, 1, 65519, 65520, 300_000):
        message = bytes(i % 253 for i in range(size))
        await sender.write_msg(message)
        got = b""
        while len(got) < size or not size:
            got += await receiver.read_msg()
            if not size:
                break
        assert got == message


async def test_noise_refuses_tampered_and_torn_messages() -> None:
    sender, receiver, left, right = _noise_pair((NoiseTransport, NoiseTransport))
    await sender.write_msg(b"hello")
    encrypted = bytearray(await right.read(100))
    encrypted[-1] ^= 1
    await left.write(bytes(encrypted))
    with pytest.raises(ConnectionClosedError):
        await receiver.read_msg()
    _, receiver, left, _ = _noise_pair((NoiseTransport, NoiseTransport))
    await left.write(b"\x00\x40half")
    await left.close()
    with pytest.raises(IncompleteReadError):
        await receiver.read_msg()
