"""The check by loss: whether a member's contribution lowers the held-out loss as the judge's own of that round does.

The judge compares three points, on the same batches: the weights before the round, these moved along its own update,
and moved as far along the other one, by half of the shorter of both. Both peers trained from the same weights on
samples of the same text, so the two gains are alike but for chance. That of a flipped update is as large with the other
sign; that of noise is about nothing. Half the way, because a whole update of one peer alone, which no other evens out,
can be too long to help; and no update is made longer, because that of a few steps is largely noise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, isfinite, sqrt
from statistics import fmean, stdev
from typing import Final

WAY: Final = 0.5  # of the shorter update
LEAST: Final = 0.25  # of the judge's own gain, for as many steps
CLEARLY: Final = 3.0  # standard errors of the mean over the batches
HARMFUL_MAX: Final = 2  # checks with that outcome, more than with the other, before a peer is left out
CONTRIBUTORS_MIN: Final = 3  # with fewer it is unknown which one is wrong


@dataclass(frozen=True)
class LossCheck:
    """The losses of three points, each on the same batches, in nats a token."""

    before: Sequence[float]
    """Of the weights before the round."""
    own: Sequence[float]
    """Moved along the judge's own update."""
    other: Sequence[float]
    """Moved as far along the other one."""
    work: float = 1.0
    """The other one's inner steps over the judge's own. Of fewer steps more is noise: of a length that grows with their
    root, as much less is common to all."""

    @property
    def own_gain(self) -> float:
        """How much the judge's own update lowers the loss."""
        return fmean(self._gains(self.own))

    @property
    def gain(self) -> float:
        """How much the other one does; minus infinity where it leads to no loss at all."""
        return fmean(self._gains(self.other)) if all(map(isfinite, self.other)) else -inf

    @property
    def is_harmful(self) -> bool | None:
        """True where the other update clearly gains less than `LEAST` of what the judge's own one does, or than a
        smaller part where it took fewer steps. False where it gains as much. None where it gains less, but not clearly:
        noise would else take its own outcomes back. None, too, where the judge's own gain is not clear, as at the end
        of a run, or there is but one batch."""
        own = self._gains(self.own)
        if len(own) < 2 or not all(map(isfinite, own)) or not clear(own):
            return None
        if self.gain == -inf:
            return True
        least = LEAST * sqrt(min(1.0, self.work))
        lacks = [least * mine - gain for mine, gain in zip(own, self._gains(self.other), strict=True)]
        return True if clear(lacks) else None if fmean(lacks) > 0 else False

    def _gains(self, after: Sequence[float]) -> list[float]:
        return [start - end for start, end in zip(self.before, after, strict=True)]


def ways(own: float, other: float) -> tuple[float, float]:
    """Return how far to move along both updates of these norms, as shares of each."""
    length = WAY * min(own, other)
    return length / own, length / other


def clear(values: Sequence[float]) -> bool:
    """Return whether the mean of these values is clearly above 0."""
    return fmean(values) > CLEARLY * stdev(values) / sqrt(len(values))


class Judgements:
    """One member's findings about the others, by peer id."""

    def __init__(self) -> None:
        self._harmful: dict[str, int] = {}

    def note(self, peer: str, is_harmful: bool) -> None:
        """Take the outcome of a check. One that is in order takes an earlier one back."""
        count = self._harmful.get(peer, 0) + (1 if is_harmful else -1)
        if count > 0:
            self._harmful[peer] = min(count, HARMFUL_MAX)
        else:
            self._harmful.pop(peer, None)

    @property
    def suspects(self) -> frozenset[str]:
        """The peers to check again before any other."""
        return frozenset(self._harmful)

    @property
    def left_out(self) -> frozenset[str]:
        """The peers whose contributions this member leaves out where it leads."""
        return frozenset(peer for peer, count in self._harmful.items() if count >= HARMFUL_MAX)
