"""Deadlines from measured times, so that the user need not guess timeouts."""

from __future__ import annotations

from collections import deque
from statistics import median
from typing import Final

ANSWER_S: Final = 5.0  # a small call: seconds even on a poor link under load
SLOWEST_LINK_BYTES_PER_S: Final = 250_000.0  # assumed until an exchange was measured
HISTORY: Final = 16


class AdaptiveTimeouts:
    """Deadlines for calls, exchanges and batches. None is shorter than `timeout_floor_s`, the only setting."""

    def __init__(self, timeout_floor_s: float = 0.0) -> None:
        self.update_bytes = 0, 0
        """Of a whole update in the next exchange, and of its result, as they are coded; 0 while unknown."""
        self._timeout_floor_s = timeout_floor_s
        self._exchanges: deque[float] = deque(maxlen=HISTORY)
        self._batches: deque[float] = deque(maxlen=HISTORY)

    @property
    def exchange_bytes(self) -> int:
        """About what this peer sends in the next exchange: its update, and as much again as an owner."""
        return sum(self.update_bytes)

    @property
    def answer_s(self) -> float:
        """Seconds for a call without payload."""
        return max(ANSWER_S, self._timeout_floor_s)

    def exchange_s(self, payload_bytes: int) -> float:
        """Return the seconds for an exchange in which this peer sends and receives about `payload_bytes` each."""
        if self._exchanges:
            expected = 4.0 * median(self._exchanges) + ANSWER_S
        else:
            expected = payload_bytes / SLOWEST_LINK_BYTES_PER_S + 2 * ANSWER_S
        return max(expected, self._timeout_floor_s)

    def note_exchange(self, seconds: float) -> None:
        """Record how long a completed exchange took."""
        self._exchanges.append(seconds)

    @property
    def batch_s(self) -> float:
        """Median seconds from a synchronous pipeline's plan to this peer's contribution; 0 until measured."""
        return median(self._batches) if self._batches else 0.0

    def note_batch(self, seconds: float) -> None:
        """Record how long this peer took to contribute to a batch."""
        self._batches.append(seconds)
