"""The pace of bulk transfers beside one flow: as fast as leaves its round trip alone.

A transfer fills the queue of the link, and every message of a flow waits in that queue, whatever connection it has.
While the median of the last beats is above the least one of the last minutes, the pace goes down, at most to half of
the highest rate; else it goes up. Where a second at half the rate does not help, the queue is that of another process
or peer: giving way would only hand the link over, so transfers go unpaced for half a minute.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Sequence
from math import inf
from typing import Final

BEATS: Final = 5  # whose median counts: single ones are late for other causes
WINDOW_S: Final = 1.0  # of bulk, before its rate is known
TRIAL_S: Final = 1.0  # at the lowest pace, before it is given up
UNPACED_S: Final = 30.0  # then
HIGH_S: Final = 0.003  # above the base: there is a queue
HIGH_SHARE: Final = 0.1  # of the base, which varies on a long way
HIGH_BYTES: Final = 6000  # four packets, which on a slow link take longer
LOW: Final = 0.5  # of that: there is none
LESS: Final = 0.92
MORE: Final = 1.03
NEARLY: Final = 0.8  # of the pace is used: transfers would go faster without it
RATE_MIN: Final = 128e3  # bytes a second; slower transfers are left alone
_BUCKET_S: Final = 60.0
_BUCKETS: Final = 5


class FlowPace:
    """The pace of a host's bulk connections together that one flow asks for."""

    def __init__(self) -> None:
        self._rate = inf
        self._base_s, self._peak = _Least(), _Least()  # the peak is kept negative
        self._window: deque[tuple[float, int]] = deque()
        self._paused = False
        self._based = False
        """Whether a median without our own queue is known."""
        self._lowest_since: float | None = None
        self._again_at = -inf

    def step(self, now: float, round_trips_s: Sequence[float], bulk_bytes: int) -> float:
        """Return the pace in bytes/s, infinity for none, from the last beats and the bytes of bulk that have arrived at
        the other sides so far."""
        rate = self._measured(now, bulk_bytes)
        if rate is not None:
            self._peak.add(now, -rate)
        if len(round_trips_s) < BEATS:
            return self._rate
        median_s = statistics.median(round_trips_s[-BEATS:])
        self._base_s.add(now, median_s)
        self._based |= self._paused
        if now < self._again_at or rate is None:
            self._lowest_since = None
            return self._rate
        lowest = max(RATE_MIN, -self._peak.value / 2)
        high_s = max(HIGH_S, HIGH_SHARE * self._base_s.value, HIGH_BYTES / -self._peak.value)
        above_s = median_s - self._base_s.value
        if above_s > high_s or not self._based:
            self._lower(now, rate, lowest)
        else:
            self._lowest_since = None
            if above_s < LOW * high_s and rate > NEARLY * self._rate:
                self._rate *= MORE
        return self._rate

    def _lower(self, now: float, rate: float, lowest: float) -> None:
        if self._rate > lowest:
            if rate > RATE_MIN:
                self._rate = max(lowest, LESS * min(self._rate, rate))
        elif self._lowest_since is None:
            self._lowest_since = now
        elif now - self._lowest_since >= TRIAL_S:
            if self._based:
                self._rate, self._again_at = inf, now + UNPACED_S
            self._based, self._lowest_since = True, None

    def _measured(self, now: float, bulk_bytes: int) -> float | None:
        """Return the rate of bulk in bytes/s; None until it has been under way for a window."""
        window = self._window
        if window and now - window[-1][0] > WINDOW_S / 2:  # it has paused, or the steps have
            self._paused = bulk_bytes == window[-1][1]
            window.clear()
        if not window or bulk_bytes > window[-1][1]:
            self._paused &= not window
            window.append((now, bulk_bytes))
        while len(window) > 2 and now - window[1][0] >= WINDOW_S:
            window.popleft()
        began, begun = window[0]
        return (bulk_bytes - begun) / (now - began) if now - began >= WINDOW_S else None


class _Least:
    """The least value of the last minutes."""

    def __init__(self) -> None:
        self._buckets: deque[tuple[int, float]] = deque()

    @property
    def value(self) -> float:
        return min(value for _, value in self._buckets)

    def add(self, now: float, value: float) -> None:
        number = int(now // _BUCKET_S)
        if self._buckets and self._buckets[-1][0] == number:
            self._buckets[-1] = number, min(value, self._buckets[-1][1])
        else:
            self._buckets.append((number, value))
        while self._buckets[0][0] <= number - _BUCKETS:
            self._buckets.popleft()
