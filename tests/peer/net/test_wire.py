from __future__ import annotations

import struct

import msgspec
import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st
from trio.testing import MemoryReceiveStream, MemorySendStream, MockClock, memory_stream_one_way_pair

from peer.errors import ConnectionLost, ProtocolViolation, TooLarge
from peer.net.rate_limit import Meter, TokenBucket
from peer.net.wire import Buffer, Channel, Frames, ReplyHeader, RequestHeader

LIMIT = 1 << 16
BODY = msgspec.Raw(msgspec.msgpack.encode({"a": 1}))


class MemoryChannel(Channel):
    """A channel that sends into one memory stream and receives from another, `chunk` bytes at a time."""

    def __init__(self, peer: str, out: MemorySendStream, into: MemoryReceiveStream, chunk: int) -> None:
        self.peer, self._out, self._into, self._chunk = peer, out, into, chunk

    async def send(self, data: Buffer) -> None:
        await self._out.send_all(bytes(data))

    async def receive(self, max_bytes: int) -> Buffer:
        data = await self._into.receive_some(min(max_bytes, self._chunk))
        if not data:
            raise ConnectionLost("end")
        return data

    async def receive_into(self, view: memoryview) -> int:
        data = await self.receive(len(view))
        view[: len(data)] = data
        return len(data)

    def finish(self) -> None:
        self._out.close()

    def abandon(self) -> None:
        self._out.close()


def pair(chunk: int = 1 << 20, upload: float | None = None) -> tuple[Frames, Frames, Channel, Meter]:
    """Return (sender, receiver, sender's channel, sender's meter)."""
    a_out, b_in = memory_stream_one_way_pair()
    b_out, a_in = memory_stream_one_way_pair()
    meter = Meter(TokenBucket(upload), TokenBucket(None))
    channel = MemoryChannel("b", a_out, a_in, chunk)
    receiver = Frames(MemoryChannel("a", b_out, b_in, chunk), Meter(TokenBucket(None), TokenBucket(None)), LIMIT)
    return Frames(channel, meter, LIMIT), receiver, channel, meter


@settings(deadline=None, max_examples=30)
@given(st.sampled_from([0, 1, 1000, (64 << 10) + 1, (2 << 20) + 17]), st.sampled_from([1 << 10, 65537, 1 << 20]))
def test_what_is_sent_is_received_however_it_is_cut(size: int, chunk: int) -> None:
    async def main() -> None:
        sender, receiver, channel, meter = pair(chunk)
        payload = bytes(range(256)) * (size // 256 + 1)
        payload = payload[:size]
        async with trio.open_nursery() as nursery:
            nursery.start_soon(sender.send, RequestHeader("m", size, 5, BODY), memoryview(payload))
            header = await receiver.receive_header(RequestHeader)
            got = await receiver.receive_payload(header.payload_bytes)
        assert header == RequestHeader("m", size, 5, BODY)
        assert got == payload
        assert meter.bytes_up == size + 4 + len(msgspec.msgpack.encode(header))
        channel.finish()
        await receiver.ended()

    trio.run(main)


@pytest.mark.parametrize(
    "garbage",
    [
        struct.pack("!I", LIMIT + 1) + b"x",
        struct.pack("!I", 4) + b"\xff\xff\xff\xff",
        struct.pack("!I", 1) + b"\x90",
        struct.pack("!I", 8) + msgspec.msgpack.encode(["m", 1, 2, 3])[:8].ljust(8, b"\x00"),
        b"GET / HTTP/1.1\r\n\r\n",
        struct.pack("!I", 7) + msgspec.msgpack.encode(["m", -5, 1, 0]).ljust(7, b"\xc0"),
    ],
)
async def test_garbage_is_a_violation_before_anything_is_allocated(garbage: bytes) -> None:
    _, receiver, channel, _ = pair()
    await channel.send(garbage)
    channel.finish()
    with pytest.raises(ProtocolViolation):
        await receiver.receive_header(RequestHeader)


async def test_a_negative_payload_is_a_violation() -> None:
    sender, receiver, _, _ = pair()
    await sender.send(ReplyHeader("", "", -1, BODY), memoryview(b""))
    with pytest.raises(ProtocolViolation, match=">= 0"):
        await receiver.receive_header(ReplyHeader)


@pytest.mark.parametrize("kept", [0, 3, 4, 10])
async def test_a_truncated_frame_ends_the_read(kept: int) -> None:
    _, receiver, channel, _ = pair()
    frame = msgspec.msgpack.encode(RequestHeader("m", 100, 5, BODY))
    await channel.send((struct.pack("!I", len(frame)) + frame)[:kept])
    channel.finish()
    with pytest.raises(ConnectionLost):
        await receiver.receive_header(RequestHeader)


async def test_a_pause_inside_a_payload_ends_the_read(autojump_clock: MockClock) -> None:
    _, receiver, channel, _ = pair()

    async def drip() -> None:
        for _ in range(3):
            await channel.send(b"x")
            await trio.sleep(4)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(drip)
        with pytest.raises(ConnectionLost, match="3 of 10 bytes"):
            await receiver.receive_payload(10, idle_s=5)
    assert trio.current_time() == pytest.approx(13)  # 8 s of progress, then a pause of 5 s


async def test_bytes_after_a_request_are_a_violation() -> None:
    sender, receiver, channel, _ = pair()
    await sender.send(RequestHeader("m", 0, 5, BODY), memoryview(b""))
    await channel.send(b"more")
    await receiver.receive_header(RequestHeader)
    with pytest.raises(ProtocolViolation):
        await receiver.ended()


async def test_a_payload_leaves_no_faster_than_the_cap(autojump_clock: MockClock) -> None:
    sender, receiver, _, _ = pair(upload=1 << 20)
    started = trio.current_time()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(sender.send, RequestHeader("m", 4 << 20, 5, BODY), memoryview(bytes(4 << 20)))
        header = await receiver.receive_header(RequestHeader)
        await receiver.receive_payload(header.payload_bytes)
    assert 3.4 < trio.current_time() - started < 4.1


async def test_our_own_oversize_header_is_not_sent() -> None:
    sender, _, _, meter = pair()
    body = msgspec.Raw(msgspec.msgpack.encode(bytes(LIMIT)))
    with pytest.raises(TooLarge, match="limit"):
        await sender.send(RequestHeader("m", 0, 5, body), memoryview(b""))
    assert not meter.bytes_up
