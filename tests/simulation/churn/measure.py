"""How available a group is through a long time of churn."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from tests.simulation.churn.world import Churn, ChurnWorld

WINDOW_S: Final = 10_000.0  # of which each counts by itself, to know how much they differ
RUNS_MAX: Final = 1000


@dataclass(frozen=True)
class Availability:
    """What one schedule of churn came to."""

    seconds: float
    committed: tuple[int, ...]
    """Rounds committed in each window of `WINDOW_S`, and in what is left of the last one."""
    kept: int
    """Of all these, the rounds in the history that leads to the last head: not what was taken back, nor what was lost
    with a run."""
    starts: int
    """Terms that the coordinator has started after a run's first one."""
    undoing: int
    """Those of them that took certified rounds back."""
    calls: int
    """`peer regroup`, by the operator."""
    untold: int
    """Standstills of which nobody was told."""
    lost_runs: int
    """Runs that were given up: no disk could bring back their weights."""
    longest_s: float
    """The longest time without a commit."""


class LongSchedule:
    """One group under churn. Where a run is given up, the operator begins another one, with all machines up."""

    def __init__(self, churn: Churn, seed: int) -> None:
        self._churn, self._seed = churn, seed
        self.world = ChurnWorld(churn, seed)
        """The present run."""

    def measure(self, seconds: float) -> Availability:
        """Run the schedule for so long and return what it came to. Raises `Broken`."""
        began, commits, sums = 0.0, [0.0], Counter[str]()
        while True:
            world = self.world
            with world.ring():
                world.advance(seconds - began)
            world.invariants.at_end()
            commits += [began + at for at in world.committed_at]
            sums.update(starts=world.starts, undoing=world.undoing)
            sums.update(calls=world.operator.tries, untold=world.operator.untold)
            if not world.operator.has_given_up:
                break
            sums["lost_runs"] += 1
            began += world.now
            self.world = ChurnWorld(self._churn, self._seed + RUNS_MAX * sums["lost_runs"])
        windows = [0] * -int(-seconds // WINDOW_S)
        for at in commits[1:]:
            windows[min(int(at // WINDOW_S), len(windows) - 1)] += 1
        return Availability(
            seconds=seconds,
            committed=tuple(windows),
            kept=self.world.top.round,
            starts=sums["starts"],
            undoing=sums["undoing"],
            calls=sums["calls"],
            untold=sums["untold"],
            lost_runs=sums["lost_runs"],
            longest_s=max(after - before for before, after in pairwise([*commits, seconds])),
        )
