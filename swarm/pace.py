"""How much work a round has: what the manifest and the last head fix, the same for every member."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median_low
from typing import Final

from optim.config import AllReduce, Diloco, Eager, OuterConfig, PerStep, Streaming
from optim.recipes.interface import Turn
from optim.schedule import quadratic_steps
from peer.config import InnerConfig
from peer.errors import ProtocolViolation
from peer.training import learning_rate
from swarm.chain import Head, Member

BOAST_MAX: Final = 4.0  # nobody counts as faster than this many times the median
SURPLUS: Final = 0.25  # of a round's steps; peers of one speed differ by less from round to round
SPEED_MAX: Final = 1e9  # steps/s; whoever reports more, or NaN, is not believed


@dataclass(frozen=True)
class Pace:
    """`seq_len` tokens a sequence; `compute_s_max`: seconds after which any round's compute ends."""

    outer: OuterConfig
    inner: InnerConfig
    seq_len: int
    compute_s_max: float

    @property
    def batch_size(self) -> int:
        return self.inner.batch_size

    def turn(self, head: Head) -> Turn:
        """The round that follows `head`."""
        step = max(head.inner_step, 0)
        return Turn(head.round + 1, step, learning_rate(self.inner, step))

    def steps(self, head: Head) -> int:
        """Steps of a contributor's work in the round after `head`: of the fastest, or of all together (`shared`)."""
        outer = self.outer
        if isinstance(outer, AllReduce):
            return max(1, outer.batch // self.batch_size)
        if isinstance(outer, Streaming):
            return outer.steps // outer.fragments
        if isinstance(outer, Diloco) and outer.schedule == "quadratic":
            grown = quadratic_steps(outer.steps, outer.alpha, self.turn(head).lr)
            return max(outer.steps, min(grown, outer.steps_max))
        return outer.steps

    @property
    def shared(self) -> bool:
        """Whether the steps are divided among the members, as a global batch is."""
        return isinstance(self.outer, AllReduce)

    @property
    def overlaps(self) -> bool:
        """Whether peers train on while an exchange is in flight."""
        return isinstance(self.outer, Streaming | Eager)

    def ahead(self, head: Head) -> int:
        """How many steps of the next round a member may be promised in the plan of this one."""
        return with_surplus(self.steps(head)) if self.overlaps else 0

    def advance(self, steps: int) -> int:
        """By how much a round of so many steps moves the run along its inner schedule."""
        return min(1, steps) if isinstance(self.outer, PerStep) else steps

    def divide(self, head: Head, speeds: Mapping[Member, float]) -> tuple[dict[Member, int], float]:
        """Each member's steps, in proportion to its measured speed (inner steps a second, 0 if not yet known) so that
        all finish together (DyLU, arXiv 2401.09135), and how many seconds that should take."""
        steps = self.steps(head)
        known = [speed for speed in speeds.values() if 0 < speed < SPEED_MAX]
        usual = median_low(known) if known else 1.0
        most = BOAST_MAX * usual  # whoever boasts neither starves the others nor takes all the work
        believed = {m: min(s, most) if 0 < s < SPEED_MAX else usual for m, s in speeds.items()}
        fastest = max(believed.values())
        if self.shared:
            counts = _apportion(steps, believed)
        else:
            counts = {m: min(steps, max(1, round(steps * s / fastest))) for m, s in believed.items()}
        seconds = max(counts[m] / s for m, s in believed.items()) if known else self.compute_s_max
        return counts, seconds

    def check(self, head: Head, counts: Mapping[Member, int]) -> None:
        """`ProtocolViolation` unless a plan may assign so many steps."""
        steps = self.steps(head)
        if any(not 0 < count <= steps for count in counts.values()):
            raise ProtocolViolation("the plan assigns an impossible amount of work")
        if self.shared and sum(counts.values()) > max(steps, len(counts)):
            raise ProtocolViolation("the plan assigns more than the run's batch")


def with_surplus(steps: int) -> int:
    """What a member that trains ahead is promised for a round in which it is to make `steps`: where the others are a
    little slower, it goes on instead of waiting for them."""
    return steps + math.ceil(SURPLUS * steps)


def _apportion(total: int, speeds: Mapping[Member, float]) -> dict[Member, int]:
    """`total` in proportion to speed, at least 1 each; what rounding leaves goes to the largest remainders."""
    whole = sum(speeds.values())
    exact = {member: total * speed / whole for member, speed in speeds.items()}
    counts = {member: max(1, math.floor(share)) for member, share in exact.items()}
    by_remainder = sorted(exact, key=lambda m: (math.floor(exact[m]) - exact[m], m))
    for member in by_remainder:
        if sum(counts.values()) >= total:
            break
        counts[member] += 1
    return counts
