"""How often a TLS socket looks for what is not here yet."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import trio

from peer.errors import ConnectionLost
from peer.net.bulk.tls import Certificate, TlsSocket, client_context


@asynccontextmanager
async def pair() -> AsyncIterator[tuple[TlsSocket, TlsSocket]]:
    (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
    async with listener:
        stream = await trio.open_tcp_stream("127.0.0.1", listener.socket.getsockname()[1])
        ours = TlsSocket(stream, client_context(), server_side=False)
        theirs = TlsSocket(await listener.accept(), Certificate.generate().context, server_side=True)
    try:
        with trio.fail_after(300):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(ours.handshake)
                nursery.start_soon(theirs.handshake)
        yield ours, theirs
    finally:
        ours.close()
        theirs.close()


async def test_a_reader_that_has_taken_all_waits_for_the_next_message_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = 0
    receive_now = TlsSocket._receive_now

    def counted(self: TlsSocket, view: memoryview) -> int:
        nonlocal looks
        looks += 1
        return receive_now(self, view)

    monkeypatch.setattr(TlsSocket, "_receive_now", counted)
    async with pair() as (ours, theirs):
        room = memoryview(bytearray(4096))
        with trio.fail_after(300):
            for number in range(50):
                await ours.send(bytes([number]) * 1000)
                size = 0
                while size < 1000:
                    size += await theirs.receive_into(room[size:])
                assert room[:1000] == bytes([number]) * 1000
        assert looks <= 60  # one a message, and a few for one that came in two parts


async def test_a_reader_that_has_taken_all_notices_the_end() -> None:
    async with pair() as (ours, theirs):
        room = memoryview(bytearray(4096))
        await ours.send(b"hello")
        with trio.fail_after(300):
            assert await theirs.receive_into(room) == 5
            ours.close()
            with pytest.raises(ConnectionLost):
                await theirs.receive_into(room)


async def test_a_small_read_takes_what_a_larger_one_has_left() -> None:
    async with pair() as (ours, theirs):
        await ours.send(bytes(range(100)))
        got = b""
        with trio.fail_after(300):
            while len(got) < 100:
                view = memoryview(bytearray(7))
                got += view[: await theirs.receive_into(view)]
        assert got == bytes(range(100))
