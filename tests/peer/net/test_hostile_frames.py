"""Hostile frames of the multiplexer and thousands of idle streams: no memory, no files, little time."""

from __future__ import annotations

import struct
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, suppress
from typing import Any

import pytest
import trio

from peer.net.libp2p_fixes import abort_connection
from peer.net.stream_channel import LOST
from tests.peer.support.attacked import Attacked, a_host, attacked_host
from tests.peer.support.clock import unit_s
from tests.peer.support.honest import FLOOR_S, TIMED

FRAME = struct.Struct("!BBHII")  # version, type, flags, stream, length
DATA, WINDOW_UPDATE, PING, GO_AWAY = range(4)
SYN, ACK, FIN, RST = 1, 2, 4, 8
WINDOW = 256 * 1024
GROWTH_MAX = 8 << 20
UNITS_MAX = 60  # of work; the dearest takes 3
IDLE_UNITS_MAX = 200  # ten times what they take
IDLE_STREAMS_BYTES_MAX = 9_000_000  # of 8,000 on 32 connections
PING_TIMES = 20.0  # the slowest of calls beside resets, of quiet ones
FIRST = 1001  # the attacker's own multiplexer has used the ids below

pytestmark = pytest.mark.process


def _streams(count: int) -> range:
    return range(FIRST, FIRST + 2 * count, 2)


def _each(count: int, make: Callable[[int], bytes]) -> bytes:
    return b"".join(make(stream) for stream in _streams(count))


def _open(stream: int) -> bytes:
    return FRAME.pack(0, WINDOW_UPDATE, SYN, stream, 0)


def _reset(stream: int) -> bytes:
    return FRAME.pack(0, WINDOW_UPDATE, RST, stream, 0)


def _data(stream: int, body: bytes, flags: int = 0) -> bytes:
    return FRAME.pack(0, DATA, flags, stream, len(body)) + body


FRAMES = {
    "another version": FRAME.pack(7, DATA, SYN, FIRST, 0),
    "another type": FRAME.pack(0, 9, 0, FIRST, 0),
    "our parity": _open(FIRST + 1),
    "stream 0": _open(0),
    "opened twice": _open(FIRST) * 2,
    "all flags": FRAME.pack(0, WINDOW_UPDATE, 0xFFFF, FIRST, 0),
    "4 GiB announced": FRAME.pack(0, DATA, SYN, FIRST, 0xFFFFFFFF) + bytes(1 << 16),
    "over the window": _open(FIRST) + _data(FIRST, bytes(WINDOW + 1)),
    "data for no stream": _data(FIRST, bytes(1000)),
    "data after the end": _open(FIRST) + _data(FIRST, b"", FIN) + _data(FIRST, bytes(1000)),
    "ended 10,000 times": _open(FIRST) + _data(FIRST, b"", FIN) * 10_000,
    "window of 2^32 x 10,000": _open(FIRST) + FRAME.pack(0, WINDOW_UPDATE, 0, FIRST, 0xFFFFFFFF) * 10_000,
    "empty data x 20,000": _open(FIRST) + _data(FIRST, b"") * 20_000,
    "answers to no ping x 20,000": FRAME.pack(0, PING, ACK, 0, 5) * 20_000,
    "resets of no stream x 20,000": _each(20_000, _reset),
    "goodbye, then data": FRAME.pack(0, GO_AWAY, 0, 0, 0) + _open(FIRST) + _data(FIRST, bytes(1000)),
    "streams without end": _each(5_000, _open),
    "half a header": _open(FIRST)[:7],
}

RAPID_RESETS = (
    _each(20_000, lambda stream: _open(stream) + _reset(stream)),
    _each(1_000, lambda stream: _open(stream) + _data(stream, bytes(2000)) + _reset(stream)),
)


@pytest.fixture
async def attacked() -> AsyncIterator[Attacked]:
    async with attacked_host() as attacked:
        yield attacked


async def send(connection: Any, frames: bytes) -> None:
    """Send raw frames between those of the attacker's multiplexer, which no longer minds the answers."""
    with suppress(*LOST):
        connection.muxed_conn._on_stream_frame = lambda stream, kind, length: length if kind == DATA else 0
        queue = connection.muxed_conn.send_queue
        queue.put(frames)
        with trio.fail_after(300):
            await queue.wait_drained()


async def files_are_back(attacked: Attacked, before: int) -> None:
    with trio.fail_after(300):
        while (await attacked.cost()).files > before:
            await trio.sleep(0.02)


async def test_hostile_frames_cost_little(attacked: Attacked) -> None:
    await attacked.still_serves()
    begun = await attacked.cost()
    for name, frames in FRAMES.items():

        async def attack(frames: bytes = frames) -> None:
            async with a_host() as attacker:
                connection = await attacked.dial(attacker)
                await send(connection, frames)
                await attacked.cost()  # it has read them by now: the frames came before this call
                await abort_connection(connection)

        cost = await attacked.cost_of(attack)
        print(f"{name}: {1e3 * cost.cpu_s:.1f} ms")  # noqa: T201
        assert cost.cpu_s <= UNITS_MAX * unit_s(), name
    await files_are_back(attacked, begun.files)
    assert (await attacked.cost()).resident_bytes - begun.resident_bytes <= GROWTH_MAX
    await attacked.still_serves()


@TIMED
async def test_streams_opened_to_be_reset_end_the_connection(attacked: Attacked, timed: bool) -> None:
    quiet = await attacked.caller.latency()
    for frames in RAPID_RESETS:
        async with a_host() as attacker:
            connection = await attacked.dial(attacker)

            async def attack(connection: Any = connection, frames: bytes = frames) -> None:
                await send(connection, frames)
                with trio.fail_after(300):
                    await connection.muxed_conn.event_closed.wait()

            beside = await attacked.caller.latency(attack)
            if timed:
                beside.check_beside(quiet)
                assert beside.max <= PING_TIMES * max(quiet.max, FLOOR_S)


async def test_thousands_of_idle_streams_cost_little(attacked: Attacked) -> None:
    streams, connections = 250, 32
    begun = await attacked.cost()
    async with AsyncExitStack() as stack:
        held = []
        for number in range(connections):
            if number % 8 == 0:  # the most that one peer may have
                attacker = await stack.enter_async_context(a_host())
            held.append(await attacked.dial(attacker))
        for connection in held:
            await send(connection, _each(streams, _open))
        await attacked.still_serves()
        cost = await attacked.cost()
        assert cost.files - begun.files == connections
        assert cost.resident_bytes - begun.resident_bytes <= IDLE_STREAMS_BYTES_MAX
        print(f"{1e3 * (cost.cpu_s - begun.cpu_s):.0f} ms")  # noqa: T201
        assert cost.cpu_s - begun.cpu_s <= IDLE_UNITS_MAX * unit_s()
        for connection in held:
            await abort_connection(connection)
    await files_are_back(attacked, begun.files)
