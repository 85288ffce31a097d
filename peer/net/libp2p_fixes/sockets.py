"""Dead links: the kernel notices a silent peer, and a connection stuck in a write can be dropped by force.

Stock 0.8.1 sets no keepalive, so a pulled cable hangs every read and write without end. Its orderly `close()` first
writes a GO_AWAY, which waits for the stuck write.
"""

from __future__ import annotations

import logging
import socket
from typing import Any, Final

import trio
from libp2p.io.exceptions import ConnectionClosedError
from libp2p.io.trio import TrioTCPStream

from peer.net.libp2p_fixes.yamux import Yamux

logger = logging.getLogger(__name__)

KEEPALIVE_IDLE_S: Final = 10
KEEPALIVE_INTERVAL_S: Final = 5
KEEPALIVE_PROBES: Final = 3
# The link is gone if data stays unacknowledged for this long. (Our heartbeat is faster, and sees frozen peers too.)
UNACKNOWLEDGED_MAX_S: Final = 25


def apply() -> None:
    """Set keepalive and a user timeout on every TCP socket the library opens or accepts."""
    stock_init = TrioTCPStream.__init__

    def init(self: TrioTCPStream, stream: trio.SocketStream) -> None:
        stock_init(self, stream)
        set_keepalive(stream)

    TrioTCPStream.__init__ = init  # type: ignore[method-assign]
    TrioTCPStream.read = _read  # type: ignore[method-assign]
    TrioTCPStream.write = _write  # type: ignore[method-assign]


# As stock has them, without a lock around each read and write: one task reads a socket and one writes it (`yamux`).


async def _read(self: TrioTCPStream, n: int | None = None) -> bytes:
    if n == 0:
        return b""
    try:
        return await self.stream.receive_some(n)
    except trio.BrokenResourceError as error:
        raise ConnectionClosedError(f"the peer has reset the connection: {error}", transport="tcp") from error
    except trio.ClosedResourceError:
        return b""


async def _write(self: TrioTCPStream, data: bytes) -> None:
    try:
        await self.stream.send_all(data)
    except trio.BrokenResourceError as error:
        raise ConnectionClosedError(f"the peer has reset the connection: {error}", transport="tcp") from error
    except trio.ClosedResourceError:
        return


def set_keepalive(stream: trio.SocketStream) -> None:
    """Make the kernel end a connection whose other side stops acknowledging. Skips options that the platform lacks."""
    options = [
        (socket.SOL_SOCKET, "SO_KEEPALIVE", 1),
        (socket.IPPROTO_TCP, "TCP_KEEPIDLE", KEEPALIVE_IDLE_S),
        (socket.IPPROTO_TCP, "TCP_KEEPINTVL", KEEPALIVE_INTERVAL_S),
        (socket.IPPROTO_TCP, "TCP_KEEPCNT", KEEPALIVE_PROBES),
        (socket.IPPROTO_TCP, "TCP_USER_TIMEOUT", UNACKNOWLEDGED_MAX_S * 1000),
    ]
    for level, name, value in options:
        option = getattr(socket, name, None)
        if option is not None:
            try:
                stream.socket.setsockopt(level, option, value)
            except OSError:  # already disconnected, or not a TCP socket
                logger.debug("cannot set %s", name)


async def abort_connection(connection: Any) -> None:
    """Drop a SwarmConn at once, without a goodbye. Every read and write on it fails, and the swarm forgets it.

    Returns at once even if the peer is frozen and a write to it is stuck.
    """
    muxed: Yamux = connection.muxed_conn
    muxed.abort()
    if muxed.event_started.is_set():
        await muxed.event_closed.wait()
