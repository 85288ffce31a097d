"""Streams of one protocol of ours on a short way, beside the library's. Like `noise`, this is about speed alone.

Stock 0.8.1 negotiates byte by byte, under a lock for each read. It starts a task for every notifee when a stream begins
and another when it ends, and converts the peer's id: of the 1.2 ms of CPU that a small call took on both sides, half.
A caller of ours sends its greeting, two lines of multistream-select, together with its request. A stream that begins
with exactly these bytes goes straight to its handler, which owes the same greeting with its first answer. Any other
stream goes the library's way, with nothing taken from it.

The swarm no longer sees these streams. This module keeps what it needs of them: the number of streams of a connection,
which its pruner spares while it has any, and a bound on those of all connections, in place of the resource manager's.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Final

import trio
from libp2p.network.connection.swarm_connection import SwarmConn
from libp2p.network.stream.net_stream import StreamState

from peer.net.libp2p_fixes.yamux import Yamux
from peer.net.libp2p_fixes.yamux_stream import YamuxStream

logger = logging.getLogger(__name__)

STREAMS_MAX: Final = 10_000  # of all peers together, as the library's resource manager has it
GREETING_S: Final = 10.0

_stock_handle: Final = SwarmConn._handle_muxed_stream


@dataclass(eq=False)
class _ShortWay:
    """A swarm's handling of streams that begin with `greeting`."""

    greeting: bytes
    serve: Callable[[YamuxStream], Awaitable[None]]
    streams: int = 0


def apply() -> None:
    """Look at the first bytes of every stream that a peer opens."""
    SwarmConn._handle_muxed_stream = _handle  # type: ignore[method-assign,assignment]
    SwarmConn.get_streams = _get_streams  # type: ignore[method-assign]
    SwarmConn.start = _start  # type: ignore[method-assign]


def serve_greeted(network: Any, greeting: bytes, serve: Callable[[YamuxStream], Awaitable[None]]) -> None:
    """Give streams that begin with `greeting` to `serve`, which ends them and owes the greeting in return.

    An exception of `serve` ends its stream, not the node.
    """
    network._short_way = _ShortWay(greeting, serve)


async def _handle(self: SwarmConn, stream: Any) -> None:
    way = self.swarm.__dict__.get("_short_way")
    if not isinstance(way, _ShortWay) or not isinstance(stream, YamuxStream):
        await _stock_handle(self, stream)
    elif way.streams >= STREAMS_MAX:
        stream.abandon()
    else:
        way.streams += 1
        try:
            await _serve(self, way, stream)
        finally:
            way.streams -= 1


async def _serve(connection: SwarmConn, way: _ShortWay, stream: YamuxStream) -> None:
    # The edge between the library and our handlers, and as broad as `handlers.harden`.
    try:
        is_greeted = False
        with trio.move_on_after(GREETING_S) as waiting:
            is_greeted = await stream.take_prefix(way.greeting)
        if waiting.cancelled_caught:
            stream.abandon()
        elif is_greeted:
            await way.serve(stream)
        else:
            await _stock_handle(connection, stream)
    except Exception as error:  # noqa: BLE001
        logger.debug("a stream of %s ended by %r", connection.muxed_conn.peer_id, error)
        stream.abandon()


def _get_streams(self: SwarmConn) -> tuple[Any, ...]:
    """Return the open streams of a connection, on either way."""
    return tuple(self.muxed_conn._streams.values()) if isinstance(self.muxed_conn, Yamux) else tuple(self.streams)


async def _start(self: SwarmConn) -> None:
    for stream in tuple(self.streams):  # as stock has it, which asks `get_streams`
        await stream.set_state(StreamState.OPEN)
    await self._handle_new_streams()
