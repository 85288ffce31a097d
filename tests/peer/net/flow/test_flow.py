"""Flows between two hosts on loopback, over TLS and over a libp2p stream."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import trio
import trio.testing

from peer.errors import ConnectionLost, RemoteError
from peer.events import EventLog
from peer.identity import Identity
from peer.net.admissions import Admissions
from peer.net.bulk.tls import TlsSocket
from peer.net.flow import frames
from peer.net.flow.dialing import StreamWire
from peer.net.flow.flow import _LATE_S, SILENCE_MAX_S, UNSENT_MAX, Flow
from peer.net.host import Host, open_host
from peer.net.rate_limit import Meter, TokenBucket
from tests.peer.net.test_rpc import Facts
from tests.peer.support.flow_talk import PAYLOAD_MAX, Block, Note, Talk
from tests.support.forking.children import open_child

WAYS = pytest.mark.parametrize("way", ["tls", "stream"])


@dataclass
class Pair:
    """Two hosts that serve flows; `flow` is a's with b."""

    a: Host
    b: Host
    flow: Flow
    mine: Talk
    theirs: Talk
    facts: Facts
    """What b has noted."""


@asynccontextmanager
async def pair(way: str = "tls") -> AsyncIterator[Pair]:
    log = EventLog()
    facts = Facts(log)
    one = open_host(identity=Identity.generate(), events=EventLog())
    two = open_host(identity=Identity.generate(), events=log, bulk_port=0 if way == "tls" else None)
    async with one as a, two as b:
        mine, theirs = Talk(), Talk()
        a.flows.serve(mine)
        b.flows.serve(theirs)
        await a.connect_address(b.addresses[0], timeout_s=60)
        with trio.fail_after(60):
            flow = await a.flows.open(b.peer_id)
        assert isinstance(flow._wire, TlsSocket if way == "tls" else StreamWire)
        yield Pair(a, b, flow, mine, theirs, facts)


@WAYS
async def test_messages_come_in_order_and_whole_both_ways(way: str) -> None:
    async with pair(way) as both:
        sent = [(Note(number, "x" * number), bytes([number]) * (7 * number)) for number in range(200)]
        for message, payload in sent:
            both.flow.send(message, payload)
        await both.theirs.until(200)
        assert both.theirs.got == sent
        back = await both.b.flows.open(both.a.peer_id)
        for message, payload in sent:
            back.send(message, payload)
        await both.mine.until(200)
        assert both.mine.got == sent
        assert back.peer == both.a.peer_id


@WAYS
async def test_large_messages_come_whole_and_small_ones_pass_them(way: str) -> None:
    async with pair(way) as both:
        payloads = [os.urandom(size) for size in (65_537, 131_072 - 9, 131_073, 1_000_003, PAYLOAD_MAX)]
        with trio.fail_after(60):
            async with trio.open_nursery() as nursery:
                for number, payload in enumerate(payloads):
                    nursery.start_soon(both.flow.send_large, Block(number), payload)
                await trio.lowlevel.checkpoint()
                both.flow.send(Note(99))
        await both.theirs.until(len(payloads) + 1)
        blocks = [(message, payload) for message, payload in both.theirs.got if isinstance(message, Block)]
        in_order = sorted(blocks, key=lambda block: block[0].number)
        assert in_order == [(Block(number), payload) for number, payload in enumerate(payloads)]
        place = [message for message, _ in both.theirs.got].index(Note(99))
        assert place < len(payloads), "the small one came after all large ones"


async def test_one_flow_serves_all_that_open_it() -> None:
    async with pair() as both:
        found: list[Flow] = []

        async def find() -> None:
            found.append(await both.a.flows.open(both.b.peer_id))

        async with trio.open_nursery() as nursery:
            for _ in range(20):
                nursery.start_soon(find)
        assert set(found) == {both.flow}


async def test_a_peer_that_serves_nothing_refuses_flows() -> None:
    one = open_host(identity=Identity.generate(), events=EventLog())
    two = open_host(identity=Identity.generate(), events=EventLog())
    async with one as a, two as b:
        a.flows.serve(Talk())
        await a.connect_address(b.addresses[0], timeout_s=60)
        with pytest.raises(RemoteError, match="takes no flows"):
            await a.flows.open(b.peer_id)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (frames.PREFIX.pack(0, 1 << 30, 0), "a frame of kind 0"),
        (frames.pack(frames.MESSAGE, b"\xff\xff"), "a message that is none"),
        (frames.pack(frames.MESSAGE, b"\x92\x07\x01"), "a message that is none"),
        (frames.pack(frames.PIECE, b"", frames.PREFIX.pack(0, 5, PAYLOAD_MAX + 1)), "a large message of kind 0"),
        (frames.pack(frames.PIECE, b"", frames.PREFIX.pack(0, 1, 0) + bytes(9)), "longer than it says"),
    ],
    ids=["oversize", "garbage", "unknown tag", "too large", "too long"],
)
async def test_what_no_peer_may_send_is_a_penalty_and_ends_the_flow(data: bytes, reason: str) -> None:
    async with pair() as both:
        both.flow._wire.send_now(memoryview(data))
        with trio.fail_after(60):
            await both.flow.ended.wait()
        penalty = await both.facts.wait("peer_penalized")
        assert reason in str(penalty.fields["reason"]) and penalty.fields["peer"] == both.a.peer_id
        assert both.theirs.ended
        with pytest.raises(ConnectionLost):
            both.flow.send(Note(1))


async def test_a_peer_that_does_not_read_costs_bounded_memory() -> None:
    async with pair() as both:
        both.theirs.stuck = trio.Event()
        payload = bytes(frames.SMALL_BYTES_MAX)
        with pytest.raises(ConnectionLost, match="does not read"):
            for number in range(100 * UNSENT_MAX // len(payload)):
                both.flow.send(Note(number), payload)
                await trio.lowlevel.checkpoint()
        assert both.flow._waiting_bytes <= UNSENT_MAX + 2 * len(payload)
        both.theirs.stuck.set()


async def test_a_banned_peer_is_heard_no_more() -> None:
    async with pair() as both:
        both.flow.send(Note(1))
        await both.theirs.until(1)
        both.b.admissions.bar([both.a.peer_id])
        both.flow.send(Note(2))
        with trio.fail_after(60):
            await both.flow.ended.wait()
        assert len(both.theirs.got) == 1


async def test_beats_measure_the_round_trip_only_while_someone_holds_the_flow() -> None:
    async with pair() as both:
        before = both.a.bytes_up
        await trio.sleep(0.5)  # time for three beats, of which there must be none
        assert both.a.bytes_up - before < 200
        with both.flow.hold(), trio.fail_after(60):
            while not both.flow.rtt_s:
                await trio.sleep(0.05)
        assert both.flow.rtt_s > 0 and both.flow.is_open


@asynccontextmanager
async def child() -> AsyncIterator[tuple[int, str]]:
    """A host that answers, in a process of its own: its id, and its address."""
    async with open_child("tests.peer.support.flow_talk") as process:
        yield process.pid, await process.line()


@pytest.mark.process
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_peer_that_is_killed_or_frozen_ends_the_flow(how: signal.Signals) -> None:
    async with (
        child() as (pid, address),
        open_host(identity=Identity.generate(), events=EventLog()) as host,
    ):
        mine = Talk()
        host.flows.serve(mine)
        peer = await host.connect_address(address, timeout_s=60)
        flow = await host.flows.open(peer)
        with flow.hold():
            flow.send(Note(1), b"hello")
            await mine.until(1)
            with trio.fail_after(60):
                while not flow.rtt_s:  # a beat was answered
                    await trio.sleep(0.01)
            assert flow.is_open and mine.got == [(Note(1), b"hello")]
            os.kill(pid, how)
            with trio.fail_after(60):
                await flow.ended.wait()
        assert mine.ended


class SilentWire:
    """Takes what is sent over it; nothing ever comes."""

    def send_now(self, view: memoryview) -> int:
        return len(view)

    async def send_some(self, view: memoryview) -> int:
        await trio.lowlevel.checkpoint()
        return len(view)

    async def receive_into(self, view: memoryview) -> int:
        await trio.sleep_forever()
        raise AssertionError

    def close(self) -> None:
        pass


async def test_a_frozen_peer_ends_the_flow_also_where_each_ping_is_late(autojump_clock: trio.testing.MockClock) -> None:
    """On a busy machine the end of a ping comes late every time: its lateness was forgiven for ever."""

    async def ping(peer: str, timeout_s: float) -> bool:
        await trio.sleep(timeout_s + 2 * _LATE_S)
        return False

    meter = Meter(TokenBucket(None), TokenBucket(None))
    parts: Any = SimpleNamespace(meter=meter, admissions=Admissions(), ping=ping, prefix=lambda peer: "")
    flow = Flow("frozen", SilentWire(), Talk(), parts)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(flow.run)
        with flow.hold(), trio.fail_after(4 * SILENCE_MAX_S):
            await flow.ended.wait()
    assert flow.reason == "it does not answer"


@pytest.mark.process
async def test_a_peer_that_is_slow_keeps_its_flow() -> None:
    """It stands still for less time than a flow waits, again and again."""
    async with (
        child() as (pid, address),
        open_host(identity=Identity.generate(), events=EventLog()) as host,
    ):
        mine = Talk()
        host.flows.serve(mine)
        flow = await host.flows.open(await host.connect_address(address, timeout_s=60))
        with flow.hold():
            for number in range(5):
                os.kill(pid, signal.SIGSTOP)
                await trio.sleep(0.2)
                os.kill(pid, signal.SIGCONT)
                flow.send(Note(number))
                await mine.until(number + 1)
        assert flow.is_open
