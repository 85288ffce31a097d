"""The pace of a run: seconds of a step, of an exchange and of a round, and what waits for what."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from peer.footprint.workload import ExchangeSize

WAITING: Final = 0.10
"""Of the time that a peer computes, what it may wait for exchanges in a run that is worth it."""
DAY_S: Final = 86400.0


@dataclass(frozen=True)
class Pace:
    """The pace of a peer with `link_bits_s`, as fast up as down, in a run of peers like it. The CPU's work for a round
    (code, merge, hash) is left out: on a link of 100 Mbit/s it is a few percent."""

    exchange: ExchangeSize
    parameters: int
    step_s: float
    steps: int
    """H: inner steps of a round."""
    step_tokens: int
    """Of one peer."""
    link_bits_s: float

    @property
    def exchange_bytes(self) -> float:
        """The bytes that a peer sends for one fragment, and receives."""
        return self.exchange.traffic * self.parameters / self.exchange.fragments

    @property
    def exchange_s(self) -> float:
        """Seconds of a round's exchanges on the link."""
        return 8 * self.exchange_bytes * self.exchange.fragments / self.link_bits_s

    @property
    def compute_s(self) -> float:
        return self.steps * self.step_s

    @property
    def waiting_s(self) -> float:
        """Seconds of a round in which nothing is computed."""
        return self._waiting_s(self.steps)

    @property
    def round_s(self) -> float:
        return self.compute_s + self.waiting_s

    @property
    def waiting_share(self) -> float:
        """Waiting, relative to computing."""
        return self.waiting_s / self.compute_s

    @property
    def rounds_a_day(self) -> float:
        return DAY_S / self.round_s

    @property
    def tokens_a_day(self) -> float:
        """Of all peers."""
        return self.exchange.peers * self.steps * self.step_tokens * self.rounds_a_day

    @property
    def traffic_a_day(self) -> float:
        """Bytes that a peer sends, and receives."""
        return self.exchange_bytes * self.exchange.fragments * self.rounds_a_day

    def days(self, tokens: float) -> float:
        """Return the days until all peers together have trained on this many tokens."""
        return tokens / self.tokens_a_day

    @property
    def steps_wanted(self) -> int:
        """The least H with which waiting is at most `WAITING` of computing."""
        low, high = 1, 1
        while self._waiting_s(high) > WAITING * high * self.step_s:
            low, high = high, 2 * high
            if high > 1 << 40:
                return high
        while low < high:
            middle = (low + high) // 2
            if self._waiting_s(middle) > WAITING * middle * self.step_s:
                low = middle + 1
            else:
                high = middle
        return high

    def _waiting_s(self, steps: int) -> float:
        each = self.exchange_s / self.exchange.fragments
        hidden = min(self.exchange.overlap_steps, steps / self.exchange.fragments) * self.step_s
        return self.exchange.fragments * max(0.0, each - hidden)


def steps_in(seconds: float, step_s: float) -> int:
    """Return the whole steps that fit in this many seconds."""
    return math.floor(seconds / step_s)
