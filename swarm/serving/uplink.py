"""How fast hidden states leave a server, measured where the link is what they wait for."""

from __future__ import annotations

from typing import Final

from peer.bounds import smoothed

BUSY_S: Final = 0.5
"""A shorter stretch of sending says nothing of the link: buffers take it."""
_SMOOTHING: Final = 0.3


class UplinkRate:
    """The smoothed rate of stretches in which something was always waiting to be sent."""

    def __init__(self) -> None:
        self.bytes_s = 0.0
        """0: no stretch was long enough, so that the link has not been the limit."""

    def sent(self, size_bytes: int, seconds: float) -> None:
        """Note a stretch that has ended."""
        if seconds < BUSY_S:
            return
        rate = size_bytes / seconds
        self.bytes_s = smoothed(self.bytes_s or None, rate, _SMOOTHING)
