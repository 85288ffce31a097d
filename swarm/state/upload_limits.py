"""Limits of a donor's uploads to joiners: how many bytes at a time, and how fast.

A round comes first. While an exchange needs the link and the cores, all joiners together get a small share of the speed
that the donor measured on its own recent uploads. Between exchanges they get all they can take. The speed of the link
itself is unknown: a slow machine, a slow link and a busy link all show as slow uploads.
"""

from __future__ import annotations

import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

import trio

from peer.bounds import smoothed
from peer.footprint import kept

BUSY_RETRY_S: Final = 0.25
BUSY_RETRY_MAX_S: Final = 1.0  # an exchange may end at any moment, and then there is no need to wait
_SPEED_FIRST: Final = 20e6  # bytes/s, before the first upload has left
_SMOOTHING: Final = 0.25
_TELLING_BYTES: Final = 64 << 10  # smaller uploads measure latency
_PIN_S_MAX: Final = 1.0  # a longer upload tells about the joiner, not about this donor


@dataclass(frozen=True)
class SnapshotLimits:
    """Limits of a donor's uploads to joiners. Rates in bytes per second, sizes in bytes."""

    snapshots: int = kept.SNAPSHOTS
    """Buffers of the size of the state: the last commits, or older ones that joiners still read."""
    small_bytes: int = kept.SMALL_BYTES
    """Of a small state, more snapshots and results are kept while each kind together is no larger than this: its rounds
    may be over in less time than a joiner takes to ask for a state."""
    snapshots_max: int = kept.SNAPSHOTS_MAX
    results: int = kept.RESULTS
    """Rounds whose merged results are kept at least, for peers that missed only these."""
    results_share: float = kept.RESULTS_SHARE
    """More of them are kept while together they are no larger than this share of the state."""
    results_max: int = kept.RESULTS_MAX
    lease_pause_s: float = 3.0
    """A snapshot is kept this long for a reader's next request."""
    lease_rate: float = 64 << 10
    """It is also kept while a new chunk is on its way to a reader, if that is not slower than this."""
    lease_max_s: float = 1800.0
    """No snapshot is kept longer for its readers."""
    lease_readers: int = 16
    """At most this many readers hold a snapshot at a time."""
    rate: float | None = None
    """Outside of exchanges; None: as fast as the link takes it (the host's upload cap applies)."""
    share_in_exchange: float = 0.05
    """Of the measured speed, while a round's exchange needs the link and the cores."""
    wait_max_s: float = 1.0
    """A request that the rate would delay for longer is answered "busy"."""
    uploading_per_joiner: int = 8 << 20
    """Copies that have not left yet. Two chunks: enough that a link never idles, and little left to send when an
    exchange begins."""
    uploading_in_total: int = 256 << 20
    """The memory that joiners which ask and never read can cost."""


def _nothing() -> None:
    """The default where no caller waits for the upload."""


class PinnedBytes(bytearray):
    """Bytes on their way to a joiner. When the last view of them is gone, the transport is done with them."""


class UploadSpacing:
    """Spaces uploads so that their sum stays below a rate, which may differ from one upload to the next."""

    def __init__(self) -> None:
        self._free_at = 0.0

    def wait_s(self) -> float:
        """Return how long the next upload has to wait."""
        return max(self._free_at - trio.current_time(), 0.0)

    def spend(self, size_bytes: int, rate: float | None) -> None:
        """Note an upload of that size at that rate."""
        if rate is not None:
            self._free_at = trio.current_time() + self.wait_s() + size_bytes / rate


class UploadSlots:
    """Admits uploads within `limits`, which may be replaced at any time."""

    def __init__(self, limits: SnapshotLimits) -> None:
        self.limits = limits
        self._uploading: Counter[str] = Counter()
        self._usual_spacing, self._exchange_spacing = UploadSpacing(), UploadSpacing()
        self._exchanges = 0
        self._speed = _SPEED_FIRST

    @property
    def in_exchange(self) -> bool:
        """Whether an exchange needs the link."""
        return self._exchanges > 0

    @contextmanager
    def stepping_back(self) -> Iterator[None]:
        """Give joiners only their small share inside the block."""
        if not self._exchanges:
            self._exchange_spacing = UploadSpacing()  # forget the debt of the last exchange
        self._exchanges += 1
        try:
            yield
        finally:
            self._exchanges -= 1

    @property
    def rate(self) -> float | None:
        """Bytes a second that all joiners together get now; None: no bound."""
        limits = self.limits
        if not self._exchanges:
            return limits.rate
        share = limits.share_in_exchange * self._speed
        return share if limits.rate is None else min(share, limits.rate)

    async def acquire(self, joiner: str, size_bytes: int, left: Callable[[], None] = _nothing) -> PinnedBytes | float:
        """Wait until this upload may start. Return an empty buffer to fill; if busy, the seconds until the next try.

        `left` is called, in any thread, when the transport is done with the buffer.
        """
        limits = self.limits
        mine, all_uploading = self._uploading[joiner], self._uploading.total()
        if mine and mine + size_bytes > limits.uploading_per_joiner:
            return BUSY_RETRY_S
        if all_uploading and all_uploading + size_bytes > limits.uploading_in_total:
            return BUSY_RETRY_S
        spacing = self._exchange_spacing if self._exchanges else self._usual_spacing
        wait_s = spacing.wait_s()
        if wait_s > limits.wait_max_s:
            return min(max(wait_s - limits.wait_max_s, BUSY_RETRY_S), BUSY_RETRY_MAX_S)
        pin = PinnedBytes()
        self._uploading[joiner] += size_bytes
        began = time.monotonic() + wait_s
        weakref.finalize(pin, self._note_left, joiner, size_bytes, self._uploading[joiner], began, left).atexit = False
        spacing.spend(size_bytes, self.rate)
        await trio.sleep(wait_s)
        return pin

    def _note_left(self, joiner: str, size_bytes: int, under_way: int, began: float, left: Callable[[], None]) -> None:
        """Note that the transport is done with an upload. Runs in any thread, perhaps at exit: no trio here."""
        self._uploading[joiner] -= size_bytes
        if not self._uploading[joiner]:
            del self._uploading[joiner]
        left()
        if size_bytes >= _TELLING_BYTES:
            took_s = min(max(time.monotonic() - began, 1e-3), _PIN_S_MAX)
            self._speed = smoothed(self._speed, under_way / took_s, _SMOOTHING)
