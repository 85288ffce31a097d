"""Outcomes of a peer's own steps in each round, and the test on them for diverged training.

A step whose loss or gradient is not finite is skipped: it changes nothing. If that is not reported, a run that has
diverged looks like one that trains.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from peer.bounds import finite_loss, smoothed
from peer.catalogue.happening import LOWER_RATE
from peer.catalogue.rounds import StepsSkipped
from peer.errors import Diverged
from peer.events import EventLog

DIVERGED_ROUNDS: Final = 3
"""Rounds in a row in which this peer could use no step, after which it ends."""
DIVERGED_ATTEMPTS: Final = 8
"""The same for attempts at one round: more, as they may all be on the same few samples. A pipeline repeats a round from
which nothing can be merged."""
SPEED_WEIGHT: Final = 0.3  # of the new value in the smoothed speed: other programs slow volunteers' machines at times


def smoothed_speed(speed: float, steps: int, seconds: float) -> float:
    """Return the speed that a peer reports to others, in steps a second, after these steps; 0: not measured yet."""
    if not steps or seconds <= 0:
        return speed
    return smoothed(speed or None, steps / seconds, SPEED_WEIGHT)


@dataclass(frozen=True)
class TrainedRound:
    """A peer's own part in one round."""

    round: int = 0
    steps: int = 0
    """Inner steps, those that were skipped included."""
    skipped: int = 0
    """Inner steps whose loss or gradient was NaN or infinite."""
    loss: float | None = None
    """The mean training loss of the other steps, nats a token; None without one."""
    overflows: int = 0
    """Inner steps that changed nothing because fp16 could not hold a gradient at the scale of the loss; of a stage,
    backward passes that were repeated at a smaller scale. They are no sign that training diverges."""

    @property
    def is_useless(self) -> bool:
        """Whether all steps were skipped."""
        return 0 < self.steps == self.skipped


class TrainedRounds:
    """Counts the skipped steps of one peer. Event `steps_skipped`: all of a round were."""

    def __init__(self, events: EventLog) -> None:
        self.last = TrainedRound()
        self._events = events
        self._useless: list[int] = []  # the last attempts' rounds, as far back as all steps were skipped

    def note(self, round: int, steps: int, skipped: int, loss: float | None, overflows: int = 0) -> None:
        """Take in a round's steps, also once more where the round is repeated. `loss` is that of the steps that were
        of use; `overflows` as in `TrainedRound`. Raises Diverged after `DIVERGED_ROUNDS` rounds, or `DIVERGED_ATTEMPTS`
        attempts, in a row in which all steps were skipped."""
        mean = finite_loss(loss) if steps > skipped else None
        self.last = TrainedRound(round, steps, skipped, mean, overflows)
        if not self.last.is_useless:
            if steps:  # else the round was cut short, which says nothing
                self._useless.clear()
            return
        is_new = round not in self._useless
        self._useless.append(round)
        if is_new:
            self._tell(self.last)
        if len({*self._useless}) >= DIVERGED_ROUNDS or len(self._useless) >= DIVERGED_ATTEMPTS:
            first = min(self._useless)
            where = f"in round {round}" if first == round else f"from round {first} to {round}"
            raise Diverged(
                f"training has diverged: {where} every step of this peer gave a NaN or infinite loss or gradient, so it"
                f" can learn nothing more: {LOWER_RATE}"
            )

    def _tell(self, useless: TrainedRound) -> None:
        every = "the only step" if useless.steps == 1 else f"all {useless.steps} steps"
        what = f"{every} of round {useless.round} gave a NaN or infinite loss or gradient and changed nothing"
        self._events.emit(
            StepsSkipped(
                round=useless.round, steps=useless.steps, skipped=useless.skipped, reason=f"{what}: {LOWER_RATE}"
            )
        )

    def of(self, round: int) -> TrainedRound:
        """Return this peer's part in that round: no step where it was not the last one that this peer trained."""
        return self.last if self.last.round == round else TrainedRound(round)
