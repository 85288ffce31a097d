"""Streams that a peer opens for nothing: they say no word, or they are reset before they are answered.

Each costs us a task and a negotiation that the peer does not wait for, as in the "rapid reset" of HTTP/2.
"""

from __future__ import annotations

from collections import deque
from typing import Final

import trio
from libp2p.exceptions import BaseLibp2pError

from peer.net.libp2p_fixes.yamux_stream import YamuxStream

SILENT_MAX: Final = 128  # of a connection; an honest peer sends its request with the stream, 64 at a time
WASTED_MAX: Final = 200  # streams opened for nothing...
WASTED_S: Final = 10.0  # ...within this time


class YamuxViolation(BaseLibp2pError):
    """The peer broke the protocol or a limit; its connection ends."""


class InboundStreams:
    """The inbound streams of one connection that have not yet been worth their opening."""

    def __init__(self) -> None:
        self._silent: dict[int, YamuxStream] = {}  # oldest first
        self._wasted: deque[float] = deque(maxlen=WASTED_MAX + 1)

    def opened(self, stream: YamuxStream) -> YamuxStream | None:
        """Note a new stream. Returns the oldest silent one if it has to give way."""
        self._silent[stream.stream_id] = stream
        return next(iter(self._silent.values())) if len(self._silent) > SILENT_MAX else None

    def settled(self, stream: YamuxStream) -> None:
        """Note that a stream has begun to speak, or has ended."""
        self._silent.pop(stream.stream_id, None)

    def waste(self) -> None:
        """Count a stream opened for nothing. Raises YamuxViolation if there were too many of late."""
        now = trio.current_time()
        self._wasted.append(now)
        if len(self._wasted) > WASTED_MAX and now - self._wasted[0] < WASTED_S:
            raise YamuxViolation(f"{len(self._wasted)} streams opened for nothing within {WASTED_S:g} s")
