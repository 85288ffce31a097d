"""What a donor spends on joiners: how many bytes at a time, and how fast.

A round comes first. While an exchange needs the link and the cores, joiners together get a small share of what the
donor has lately been able to send, as it measured by how fast its own loans left; between exchanges they get all they
can take. Nothing here knows how fast a link is: a slow machine, a thin link and a busy one all show as slow loans.
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

BUSY_RETRY_S: Final = 0.25
BUSY_RETRY_MAX_S: Final = 1.0  # an exchange may end at any moment, and then there is no need to wait
_SPEED_FIRST: Final = 20e6  # bytes/s, before the first loan has left
_SMOOTHING: Final = 0.25
_TELLING_BYTES: Final = 64 << 10  # smaller loans measure latency
_PIN_S_MAX: Final = 1.0  # a loan out for longer tells of the joiner, not of us


@dataclass(frozen=True)
class SnapshotLimits:
    """What a donor spends on joiners. Rates in bytes per second, sizes in bytes."""

    snapshots: int = 2
    """Buffers of the size of the state: the last commits, or what joiners are still reading."""
    results: int = 4
    """Rounds whose merged results are kept, for those who missed only these."""
    lease_pause_s: float = 3.0
    """A snapshot is kept this long for a reader's next request."""
    lease_rate: float = 64 << 10
    """And while a chunk that the reader had not yet is on its way to it, if that is not slower than this."""
    lease_max_s: float = 1800.0
    """No snapshot is kept longer for its readers, nor for more of them than `lease_readers` at a time."""
    lease_readers: int = 16
    rate: float | None = None
    """While no exchange is going on; None: as fast as the link takes it (the host's upload cap applies)."""
    share_in_exchange: float = 0.05
    """Of the measured speed, while a round's exchange needs the link and the cores."""
    wait_max_s: float = 1.0
    """A request that the rate would delay for longer is answered "busy"."""
    uploading_per_joiner: int = 8 << 20
    """Copies that have not left yet. Two chunks: enough that a link never idles, and little to be sent still when an
    exchange begins."""
    uploading_in_total: int = 256 << 20
    """Joiners that ask and never read cost this much memory, no more."""


def _nothing() -> None:
    """Nobody waits for the loan."""


class PinnedBytes(bytearray):
    """Bytes on their way to a joiner. When the last view of it is gone, the transport is done with it."""


class Pace:
    """Spaces serves so that their sum stays below a rate."""

    def __init__(self) -> None:
        self._free_at = 0.0

    def wait_s(self) -> float:
        """How long the next serve has to wait."""
        return max(self._free_at - trio.current_time(), 0.0)

    def spend(self, size_bytes: int, rate: float | None) -> None:
        if rate is not None:
            self._free_at = trio.current_time() + self.wait_s() + size_bytes / rate


class UploadSlots:
    """Gives out loans within `limits`, which may be exchanged for others at any time."""

    def __init__(self, limits: SnapshotLimits) -> None:
        self.limits = limits
        self._uploading: Counter[str] = Counter()
        self._usual_rate, self._exchange_rate = Pace(), Pace()
        self._exchanges = 0
        self._speed = _SPEED_FIRST

    @contextmanager
    def stepping_back(self) -> Iterator[None]:
        """Inside the block joiners get their small share."""
        if not self._exchanges:
            self._exchange_rate = Pace()  # what the last exchange owed is paid
        self._exchanges += 1
        try:
            yield
        finally:
            self._exchanges -= 1

    @property
    def rate(self) -> float | None:
        """Bytes a second that all joiners together get now; None for no bound."""
        limits = self.limits
        if not self._exchanges:
            return limits.rate
        share = limits.share_in_exchange * self._speed
        return share if limits.rate is None else min(share, limits.rate)

    async def round_info(
        self, joiner: str, size_bytes: int, left: Callable[[], None] = _nothing
    ) -> PinnedBytes | float:
        """Wait for this serve's turn: an empty loan to fill, or in how many seconds a busy donor should be asked
        again. `left` is called, in any thread, when the transport is done with the loan."""
        limits = self.limits
        mine, all_uploading = self._uploading[joiner], self._uploading.total()
        if mine and mine + size_bytes > limits.uploading_per_joiner:
            return BUSY_RETRY_S
        if all_uploading and all_uploading + size_bytes > limits.uploading_in_total:
            return BUSY_RETRY_S
        schedule = self._exchange_rate if self._exchanges else self._usual_rate
        wait_s = schedule.wait_s()
        if wait_s > limits.wait_max_s:
            return min(max(wait_s - limits.wait_max_s, BUSY_RETRY_S), BUSY_RETRY_MAX_S)
        pin = PinnedBytes()
        self._uploading[joiner] += size_bytes
        began = time.monotonic() + wait_s
        weakref.finalize(pin, self._returned, joiner, size_bytes, self._uploading[joiner], began, left).atexit = False
        schedule.spend(size_bytes, self.rate)
        await trio.sleep(wait_s)
        return pin

    def _returned(self, joiner: str, size_bytes: int, under_way: int, began: float, left: Callable[[], None]) -> None:
        """The transport is done with a loan. It may be the interpreter's end, or any thread: no trio here."""
        self._uploading[joiner] -= size_bytes
        if not self._uploading[joiner]:
            del self._uploading[joiner]
        left()
        if size_bytes >= _TELLING_BYTES:
            took_s = min(max(time.monotonic() - began, 1e-3), _PIN_S_MAX)
            self._speed += _SMOOTHING * (under_way / took_s - self._speed)
