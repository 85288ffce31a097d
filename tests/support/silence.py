"""Sockets that say nothing: one listens, others are dialled, so that a handshake begins and never goes on."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import trio

from peer.net.host import Host
from peer.net.libp2p_fixes import inbound_limits

_AT_ONCE = 64


@contextmanager
def silent_port() -> Iterator[int]:
    """A port of 127.0.0.1 at which the kernel accepts connections, and nobody reads or writes."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(4096)
        yield int(listener.getsockname()[1])


async def dial_silently(host: Host, count: int) -> None:
    """Connect `count` times to a host on 127.0.0.1 without a word, and hang up only where it waits for us.

    Returns when the host has ended all but those that it still waits for: each newer one had it give up an older one.
    """
    port = int(host.addresses[0].split("/")[4])
    to_end = count - inbound_limits.HANDSHAKES_PER_GROUP_MAX
    at_once = trio.CapacityLimiter(_AT_ONCE)

    async def dial() -> None:
        nonlocal to_end
        async with at_once, await trio.open_tcp_stream("127.0.0.1", port) as stream:
            with suppress(trio.BrokenResourceError):
                while await stream.receive_some():
                    pass
            to_end -= 1
            if to_end <= 0:
                nursery.cancel_scope.cancel()

    with trio.fail_after(300):
        async with trio.open_nursery() as nursery:
            for _ in range(count):
                nursery.start_soon(dial)


async def connect_here_and_there(host: Host, other: Host, *, dials_back: bool = True) -> None:
    """Have `other` connect to a host and leave, and then the host to `other`: it is neither deaf nor mute."""
    for dialler, dialled in ((other, host), (host, other))[: 1 + dials_back]:
        await dialler.connect_address(dialled.addresses[0], timeout_s=60)
        assert dialled.peer_id in dialler.connected
        await dialler.disconnect(dialled.peer_id)
        await emptied(dialled)


async def emptied(host: Host) -> None:
    """Return when all counters of a host are at 0."""
    with trio.move_on_after(60):
        while any(host.counts.now().values()):
            await trio.sleep(0.01)
        return
    raise AssertionError(f"not counted down: {host.counts.now()}")
