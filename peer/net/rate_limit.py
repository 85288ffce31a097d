"""Upload and download caps: token buckets, and the counters behind `bytes_up` and `received_from`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import trio

_BURST_S = 0.25
_TICK_S = 1e-3  # no sleep shorter than a clock can tell
_PEERS_MAX = 4096


class TokenBucket:
    """At most `rate` bytes/s on average, in bursts of a quarter second; None means no cap.

    Callers of `take` are served in order. `charge` takes without waiting, so that small control frames never wait for
    bulk data and still count against the cap.
    """

    def __init__(self, rate_bytes_per_s: float | None, clock: Callable[[], float] = trio.current_time) -> None:
        self._rate = rate_bytes_per_s
        self._clock = clock
        self._tokens = 0.0 if rate_bytes_per_s is None else rate_bytes_per_s * _BURST_S
        self._at: float | None = None
        self._turn = trio.Lock()

    @property
    def rate(self) -> float | None:
        """The cap in bytes a second."""
        return self._rate

    def piece_bytes(self, preferred: int) -> int:
        """Return the largest piece to take at once so that a slow link still flows evenly."""
        if self._rate is None:
            return preferred
        return max(1024, min(preferred, int(self._rate * _BURST_S)))

    def charge(self, size_bytes: int) -> None:
        """Take without waiting; the bucket may go into debt."""
        if self._rate is not None:
            self._refill(self._rate)
            self._tokens -= size_bytes

    async def take(self, size_bytes: int) -> None:
        """Wait until the bucket is out of debt, then take."""
        if self._rate is None:
            return
        async with self._turn:
            self._refill(self._rate)
            while self._tokens < 0:
                await trio.sleep(max(_TICK_S, -self._tokens / self._rate))
                self._refill(self._rate)
            self._tokens -= size_bytes

    def _refill(self, rate: float) -> None:
        now = self._clock()
        if self._at is not None:
            self._tokens = min(rate * _BURST_S, self._tokens + (now - self._at) * rate)
        self._at = now


@dataclass
class Traffic:
    """Bytes to and from one peer, framing included."""

    bytes_up: int = 0
    bytes_down: int = 0
    heard_at: float = float("-inf")
    """trio's time at the last byte from this peer."""
    payload_bytes: int = 0
    """Of the payloads from this peer, what came while they were read."""
    payload_s: float = 0.0
    """The seconds in which that came."""


@dataclass
class Meter:
    """Counts bytes per peer and applies the caps. One per host."""

    upload: TokenBucket
    download: TokenBucket
    is_trusted: Callable[[str], bool] = lambda peer: False
    """Peers whose counters are kept longest."""
    by_peer: dict[str, Traffic] = field(default_factory=dict)
    bytes_up: int = 0
    bulk_bytes_up: int = 0
    bytes_down: int = 0

    def traffic(self, peer: str) -> Traffic:
        """Return the counters of one peer. Above 4096 peers the longest silent one, a stranger first, is dropped."""
        known = self.by_peer.get(peer)
        if known is None:
            if len(self.by_peer) >= _PEERS_MAX:
                del self.by_peer[min(self.by_peer, key=self._worth)]
            known = self.by_peer[peer] = Traffic()
        return known

    def _worth(self, peer: str) -> tuple[bool, float]:
        return self.is_trusted(peer), self.by_peer[peer].heard_at

    def sent(self, peer: str, size_bytes: int, bulk: bool = False) -> None:
        self.bytes_up += size_bytes
        self.bulk_bytes_up += size_bytes if bulk else 0
        self.traffic(peer).bytes_up += size_bytes

    def received(self, peer: str, size_bytes: int) -> None:
        self.bytes_down += size_bytes
        traffic = self.traffic(peer)
        traffic.bytes_down += size_bytes
        traffic.heard_at = trio.current_time()

    def read(self, peer: str, size_bytes: int, seconds: float) -> None:
        """Count the received bytes of a payload while it was read."""
        traffic = self.traffic(peer)
        traffic.payload_bytes += size_bytes
        traffic.payload_s += seconds
