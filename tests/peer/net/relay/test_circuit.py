"""One circuit: what ends it, and what it may carry. By a clock of the test's."""

from __future__ import annotations

from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest
import trio
from libp2p.stream_muxer.exceptions import MuxedStreamEOF, MuxedStreamReset
from trio.testing import MockClock, memory_stream_pair

from peer.net.rate_limit import TokenBucket
from peer.net.relay.circuit import SILENCE_S, Forwarder, RelayCounts


class Side:
    """The relay's stream to one side, and that side's end of it."""

    def __init__(self) -> None:
        self.far, near = memory_stream_pair()
        self._near: Any = near
        self.muxed_conn = SimpleNamespace(last_used=0.0)
        self.was_reset = False

    async def read(self, n: int) -> bytes:
        try:
            data = bytes(await self._near.receive_some(n))
        except trio.BrokenResourceError:
            raise MuxedStreamReset from None
        if not data:
            raise MuxedStreamEOF
        return data

    async def write(self, data: bytes) -> None:
        await self._near.send_all(data)

    async def close_write(self) -> None:
        await self._near.send_eof()

    def abandon(self) -> None:
        self.was_reset = True
        self._near.send_stream.close()
        self._near.receive_stream.close()


class Circuit:
    def __init__(self, rate: float | None = None, circuit_s: float = 1e6, circuit_bytes: int = 1 << 40) -> None:
        self.one, self.other = Side(), Side()
        self.counts = RelayCounts()
        self._forwarder = Forwarder(TokenBucket(rate), self.counts, circuit_s, circuit_bytes)
        self.ended_at: float | None = None

    async def run(self) -> None:
        one: Any = self.one
        other: Any = self.other
        await self._forwarder.bridge(one, other)
        self.ended_at = trio.current_time()


async def _all_of(stream: trio.abc.ReceiveStream) -> bytes:
    return b"".join([bytes(piece) async for piece in stream])


async def test_both_ways_until_both_sides_have_finished(autojump_clock: MockClock) -> None:
    circuit = Circuit()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(circuit.run)
        await circuit.one.far.send_all(b"question")
        await circuit.one.far.send_eof()
        assert await _all_of(circuit.other.far) == b"question"
        await trio.sleep(SILENCE_S / 2)
        assert circuit.ended_at is None  # the other way is open
        await circuit.other.far.send_all(b"answer")
        await circuit.other.far.send_eof()
        assert await _all_of(circuit.one.far) == b"answer"
    assert circuit.ended_at == trio.current_time() and circuit.counts.bytes_relayed == len("questionanswer")


async def test_a_circuit_carries_so_many_bytes_each_way(autojump_clock: MockClock) -> None:
    circuit = Circuit(circuit_bytes=1000)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(circuit.run)
        await circuit.other.far.send_all(bytes(999))
        assert await circuit.one.far.receive_some(2000) == bytes(999)
        await circuit.one.far.send_all(bytes(5000))
        assert len(await _all_of(circuit.other.far)) == 1000
    assert circuit.counts.bytes_relayed == 1999 and circuit.one.was_reset and circuit.other.was_reset


async def test_a_circuit_lasts_so_long_though_it_is_silent(autojump_clock: MockClock) -> None:
    circuit = Circuit(circuit_s=60.0)
    began = trio.current_time()
    await circuit.run()
    assert circuit.ended_at == pytest.approx(began + 60) and circuit.one.was_reset and circuit.other.was_reset


@pytest.mark.parametrize("reads", [True, False])
async def test_a_dead_circuit_ends(autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch, reads: bool) -> None:
    circuit = Circuit()
    if not reads:
        monkeypatch.setattr(circuit.other, "write", _blocked)
    began = trio.current_time()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(circuit.run)
        await circuit.one.far.send_all(b"are you there?")
        if not reads:
            nursery.start_soon(_keep_sending, circuit.other.far)
    assert circuit.ended_at == pytest.approx(began + SILENCE_S)


async def _blocked(data: bytes) -> None:
    await trio.sleep_forever()


async def _keep_sending(stream: Any) -> None:
    with suppress(trio.BrokenResourceError):
        while True:
            await stream.send_all(b"x")
            await trio.sleep(1)


async def test_the_reset_of_one_side_resets_the_other(autojump_clock: MockClock) -> None:
    circuit = Circuit()
    began = trio.current_time()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(circuit.run)
        await circuit.one.far.send_all(b"x")
        circuit.one.abandon()
    assert circuit.ended_at == began and circuit.other.was_reset


async def test_all_circuits_share_the_rate(autojump_clock: MockClock) -> None:
    rate, counts, took_s = TokenBucket(1e6), RelayCounts(), []

    async def hear(stream: trio.abc.ReceiveStream) -> None:
        assert len(await _all_of(stream)) == 5_000_000
        took_s.append(trio.current_time() - began)

    circuits = [Circuit(), Circuit()]
    began = trio.current_time()
    async with trio.open_nursery() as nursery:
        for circuit in circuits:
            circuit._forwarder = Forwarder(rate, counts, 1e6, 1 << 40)
            nursery.start_soon(circuit.run)
            nursery.start_soon(_send, circuit.one.far, 5_000_000)
            nursery.start_soon(hear, circuit.other.far)
    assert counts.bytes_relayed == 10_000_000
    assert took_s == pytest.approx([10, 10], abs=0.6)


async def _send(stream: Any, size_bytes: int) -> None:
    await stream.send_all(bytes(size_bytes))
    await stream.aclose()
