"""One circuit: bytes between two streams, within its caps and the rate of the whole relay."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import Final

import trio
from libp2p.stream_muxer.exceptions import MuxedStreamEOF

from peer.net.libp2p_fixes.yamux_stream import YamuxStream
from peer.net.rate_limit import TokenBucket
from peer.net.stream_channel import LOST

SILENCE_S: Final = 120.0
"""Longest pause of a side that has not finished, and the longest that a side may leave a piece unread. The connection
inside is pinged every few seconds."""
_PIECE_BYTES: Final = 256 << 10
_FAIR_PIECE_BYTES: Final = 16 << 10
"""Where a rate is shared: a small message waits for one piece of each circuit beside its own."""


@dataclass
class RelayCounts:
    """A relay's present work, and its totals since its start."""

    reservations: int = 0
    circuits: int = 0
    bytes_relayed: int = 0
    """Counted once, though they come in and go out."""
    refused: int = 0


class Forwarder:
    """Forwards the bytes of all circuits of one relay."""

    def __init__(self, rate: TokenBucket, counts: RelayCounts, circuit_s: float, circuit_bytes: int) -> None:
        self._rate = rate
        self._counts = counts
        self._circuit_s = circuit_s
        self._circuit_bytes = circuit_bytes

    async def bridge(self, one: YamuxStream, other: YamuxStream) -> None:
        """Forward both ways until both sides have finished, one has reset, or a cap is reached; then end both streams.

        Nothing is said at a cap: the bytes would land in the middle of the peers' own connection.
        """
        ways = (_Way(one, other), _Way(other, one))
        try:
            with trio.move_on_after(self._circuit_s):
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(_until_silent, ways, nursery.cancel_scope)
                    async with trio.open_nursery() as both:
                        for way in ways:
                            both.start_soon(self._forward, way, nursery.cancel_scope)
                    nursery.cancel_scope.cancel()
        finally:
            one.abandon()
            other.abandon()

    async def _forward(self, way: _Way, circuit: trio.CancelScope) -> None:
        source, sink = way.source, way.sink
        left = self._circuit_bytes
        piece_bytes = _PIECE_BYTES if self._rate.rate is None else self._rate.piece_bytes(_FAIR_PIECE_BYTES)
        try:
            while left > 0:
                piece = await source.read(min(piece_bytes, left))
                await self._rate.take(len(piece))
                # What waited for the rate was not silent. And an end of a busy circuit is not idle: see
                # `strangers.shares.Slots`.
                now = way.moved_at = trio.current_time()
                source.muxed_conn.last_used = sink.muxed_conn.last_used = now
                await sink.write(piece)
                left -= len(piece)
                self._counts.bytes_relayed += len(piece)
        except MuxedStreamEOF:
            way.moved_at = inf  # finished
            await sink.close_write()
        except LOST:
            circuit.cancel()
        else:
            circuit.cancel()


class _Way:
    """One direction of a circuit."""

    def __init__(self, source: YamuxStream, sink: YamuxStream) -> None:
        self.source = source
        self.sink = sink
        self.moved_at = trio.current_time()


async def _until_silent(ways: tuple[_Way, ...], circuit: trio.CancelScope) -> None:
    """End the circuit when an unfinished way has not moved for too long. A timer for each piece would cost more."""
    while True:
        left_s = min(way.moved_at for way in ways) + SILENCE_S - trio.current_time()
        if left_s <= 0:
            circuit.cancel()
            return
        await trio.sleep(left_s)
