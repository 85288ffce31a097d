"""Counts: one of connections, ours, and nothing that stays counted because its end was cancelled.

Stock 0.8.1 counts connections a second time, in a resource manager of 1000. When a handshake, a dial or a connection
ends, it awaits something before it counts down, and there a cancelled task stops without counting. Our oldest handshake
is cancelled for a newer one, and a dial that loses a race or takes too long is cancelled too. So a thousand sockets
that said nothing, or dials to peers that were gone, left a node that closed every socket and dialled no peer until it
was started again. Here the caps are those of `inbound_limits`, `shares` and `NetLimits.connections`, and what ends is
forgotten also by a task that is cancelled.
"""

from __future__ import annotations

import logging
from typing import Any, Final

import trio
from libp2p.network.connection.swarm_connection import SwarmConn
from libp2p.network.stream.net_stream import NetStream

from peer.net.libp2p_fixes.yamux import Yamux

logger = logging.getLogger(__name__)

_stock_reset: Final = NetStream.reset


def apply() -> None:
    """Bring the end of connections and streams to its end, also in a task that is cancelled."""
    SwarmConn.close = _close  # type: ignore[method-assign]
    SwarmConn.new_stream = _new_stream  # type: ignore[method-assign]
    NetStream.reset = _reset  # type: ignore[method-assign]


def count_once(network: Any) -> None:
    """Take the library's resource manager from this network: its limits on streams are in `streams` and `yamux`."""
    network.set_resource_manager(None)


async def _close(self: SwarmConn) -> None:
    """Close a connection and forget it. If cancelled, it is closed without a goodbye, within `yamux.GOODBYE_S`."""
    if self.event_closed.is_set():
        return
    self.event_closed.set()
    muxed: Any = self.muxed_conn
    is_ours = not getattr(self, "_shared_muxed_conn", False)  # as the library marks a second wrapper
    try:
        if is_ours:
            await muxed.close()
    except Exception as error:  # noqa: BLE001 - as in stock: whatever the transport raises
        logger.debug("closing the connection to %s: %r", muxed.peer_id, error)
    finally:
        if is_ours and isinstance(muxed, Yamux):
            muxed.abort()
        with trio.CancelScope(shield=True):
            await self._cleanup()


async def _new_stream(self: SwarmConn) -> NetStream:
    """Open a stream. If cancelled, it is reset: a connection has only so many."""
    muxed_stream = await self.muxed_conn.open_stream()
    try:
        return await self._add_stream(muxed_stream)
    except BaseException:
        with trio.CancelScope(shield=True):
            await muxed_stream.reset()
        self.streams -= {stream for stream in self.streams if stream.muxed_stream is muxed_stream}
        raise


async def _reset(self: NetStream) -> None:
    """Reset as in stock, whose steps are short, to the last of them: the connection forgets the stream."""
    with trio.CancelScope(shield=True):
        await _stock_reset(self)
    await trio.lowlevel.checkpoint()
