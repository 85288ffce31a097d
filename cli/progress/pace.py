"""How long a round takes and how much it gets done, and with that how long the run goes on."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from statistics import median
from typing import Final

_REMEMBERED: Final = 8


@dataclass(frozen=True)
class _Commit:
    round: int
    at: float
    tokens: int
    seen: bool


class RoundPace:
    """The time of the last rounds. Rounds that were caught up with count for nothing."""

    def __init__(self) -> None:
        self._last: _Commit | None = None
        self._took_s: deque[float] = deque(maxlen=_REMEMBERED)
        self._tokens: deque[int] = deque(maxlen=_REMEMBERED)

    def note(self, number: int, at: float, tokens: int = 0, seen: bool = True) -> None:
        """Note that round `number` was committed at that Unix time, once for all peers of a view. `tokens`: that the
        run has trained on so far; 0: not known. `seen`: else it was committed some time before."""
        last = self._last
        if last is not None and number <= last.round:
            return
        if last is not None and number == last.round + 1 and seen and last.seen:
            self._took_s.append(max(0.0, at - last.at))
            self._tokens.append(max(0, tokens - last.tokens))
        self._last = _Commit(number, at, tokens, seen)

    @property
    def round_s(self) -> float | None:
        """Seconds a round, the median of the last ones; None before one was seen from its begin to its end."""
        return median(self._took_s) if self._took_s else None

    @property
    def tokens_per_s(self) -> float | None:
        """What all members together trained on in the last rounds; None where that is not known."""
        seconds, tokens = sum(self._took_s), sum(self._tokens)
        return tokens / seconds if seconds > 0 and tokens > 0 else None

    def elapsed_s(self, now: float) -> float | None:
        """Return the seconds since the last commit; None before one was seen."""
        return None if self._last is None else max(0.0, now - self._last.at)

    def left_s(self, rounds: int, now: float) -> float | None:
        """Return the seconds to the end of a run of so many rounds; None where that is not known."""
        if self._last is None or self.round_s is None or rounds <= self._last.round:
            return None
        return max(0.0, (rounds - self._last.round) * self.round_s - max(0.0, now - self._last.at))
