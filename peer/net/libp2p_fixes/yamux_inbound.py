"""Streams that a peer opens for nothing: they say no word, or they are reset before they are answered.

One that speaks costs us a task and a negotiation that the peer does not wait for, as in the "rapid reset" of HTTP/2.
"""

from __future__ import annotations

from collections import deque
from typing import Final

import trio
from libp2p.exceptions import BaseLibp2pError

from peer.net.libp2p_fixes.yamux_stream import YamuxStream

SILENT_MAX: Final = 80  # of a connection; an honest peer sends its request with the stream, 64 at a time
WASTED_MAX: Final = 200  # streams opened for nothing...
REFUSED_MAX: Final = 50  # streams refused to a stranger (`allowances`)...
WASTED_S: Final = 10.0  # ...within this time


class YamuxViolation(BaseLibp2pError):
    """The peer broke the protocol or a limit; its connection ends."""


class InboundStreams:
    """The inbound streams of one connection that have not yet been worth their opening."""

    def __init__(self) -> None:
        self._silent: dict[int, YamuxStream] = {}  # oldest first
        self._wasted: deque[float] = deque(maxlen=WASTED_MAX + 1)
        self._refused: deque[float] = deque(maxlen=REFUSED_MAX + 1)

    def opened(self, stream: YamuxStream) -> YamuxStream | None:
        """Note a new stream. Returns the oldest silent one if it has to give way."""
        self._silent[stream.stream_id] = stream
        return next(iter(self._silent.values())) if len(self._silent) > SILENT_MAX else None

    def settled(self, stream: YamuxStream) -> bool:
        """Note that a stream has begun to speak, or has ended. Returns whether it was silent until now."""
        return self._silent.pop(stream.stream_id, None) is not None

    def waste(self) -> None:
        """Count a stream opened for nothing. Raises YamuxViolation if there were too many of late."""
        self._count(self._wasted, "opened for nothing")

    def refuse(self) -> None:
        """Count a stream refused to a stranger. Raises YamuxViolation if there were too many of late."""
        self._count(self._refused, "over a stranger's allowance")

    def _count(self, times: deque[float], what: str) -> None:
        times.append(trio.current_time())
        if len(times) == times.maxlen and times[-1] - times[0] < WASTED_S:
            raise YamuxViolation(f"{len(times)} streams {what} within {WASTED_S:g} s")
