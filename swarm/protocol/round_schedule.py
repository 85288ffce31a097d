"""How much work a round has: what the manifest and the last head fix, the same for every member."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median_low
from typing import Final

from optim.config import AllReduceConfig, DilocoConfig, EagerConfig, OuterConfig, PerStepConfig, StreamingConfig
from optim.schedule import RoundInfo, quadratic_steps
from peer.compute.lr_schedule import learning_rate
from peer.config import InnerConfig
from peer.errors import ProtocolViolation
from swarm.protocol.head import Head, Member
from swarm.protocol.ledger import Range

CLAIM_MAX: Final = 4.0  # nobody counts as faster than this many times the median
SURPLUS: Final = 0.25  # of a round's steps; peers of one speed differ by less from round to round
SPEED_MAX: Final = 1e9  # steps/s; whoever reports more, or NaN, is not believed
STEPS_FACTOR_MAX: Final = 64  # a lone replica does the work of all that issue


@dataclass(frozen=True)
class RoundSchedule:
    """`seq_len` tokens a sequence; `compute_s_max`: seconds after which any round's compute ends.

    In a pipeline, which has `stages` > 1, every stage's replicas have rounds of their own. Those of stage 0 are
    assigned samples and issue them in micro-batches of `micro_batch` sequences; the others work on whatever comes. A
    replica makes inner steps of its own between commits or, where the method is synchronous, all stages go through the
    same batch in a round, each sample exactly once a stage.
    """

    outer: OuterConfig
    inner: InnerConfig
    seq_len: int
    compute_s_max: float
    stage: int = 0
    stages: int = 1
    micro_batch: int = 0

    @property
    def batch_size(self) -> int:
        return self.inner.batch_size

    @property
    def pipeline(self) -> bool:
        return self.stages > 1

    @property
    def synchronous(self) -> bool:
        """Whether a round of a pipeline is one batch that all stages go through."""
        return self.pipeline and isinstance(self.outer, AllReduceConfig)

    @property
    def unit(self) -> int:
        """Samples in a step of an assignment."""
        return self.micro_batch if self.synchronous else self.batch_size

    def round_info(self, head: Head) -> RoundInfo:
        """The round that follows `head`."""
        step = max(head.inner_step, 0)
        return RoundInfo(head.round + 1, step, learning_rate(self.inner, step))

    def batch(self, head: Head) -> Range | None:
        """The samples of a synchronous pipeline's round, all of which must be counted; None elsewhere."""
        if not (self.pipeline and isinstance(self.outer, AllReduceConfig)):
            return None
        return head.ledger.cursor, head.ledger.cursor + self.outer.batch

    def steps(self, head: Head) -> int:
        """Steps of a contributor's work in the round after `head`: of the fastest, or of all together (`shared`)."""
        outer = self.outer
        if isinstance(outer, AllReduceConfig):
            return max(1, outer.batch // self.unit)
        if isinstance(outer, StreamingConfig):
            return outer.steps // outer.fragments
        if isinstance(outer, DilocoConfig) and outer.schedule == "quadratic":
            grown = quadratic_steps(outer.steps, outer.alpha, self.round_info(head).lr)
            return max(outer.steps, min(grown, outer.steps_max))
        return outer.steps

    def most_steps(self, head: Head) -> int:
        """How many a contribution may claim: a stage that has fewer replicas than the first makes more of them."""
        steps = self.steps(head)
        return STEPS_FACTOR_MAX * steps if self.pipeline and not self.synchronous else steps

    @property
    def shared(self) -> bool:
        """Whether the steps are divided among the members, as a global batch is."""
        return isinstance(self.outer, AllReduceConfig)

    @property
    def overlaps(self) -> bool:
        """Whether peers train on while an exchange is in flight, on samples promised for it."""
        return isinstance(self.outer, StreamingConfig | EagerConfig)

    def ahead(self, head: Head) -> int:
        """How many steps of the next round a member may be promised in the plan of this one."""
        return with_surplus(self.steps(head)) if self.overlaps else 0

    def advance(self, head: Head, steps: int) -> int:
        """By how much the round after `head`, in which the fastest made so many steps, moves the run along its inner
        schedule. Stages of a pipeline must stay at one place, however many replicas share their work."""
        if isinstance(self.outer, PerStepConfig):
            return min(1, steps)
        return self.steps(head) if self.pipeline else steps

    def divide(self, head: Head, speeds: Mapping[Member, float]) -> tuple[dict[Member, int], float]:
        """Each member's steps, in proportion to its measured speed (inner steps a second, 0 if not yet known) so that
        all finish together (DyLU, arXiv 2401.09135), and how many seconds that should take. A pipeline may have to
        pause until some stage has a replica again, so its rounds take as long as they take."""
        if self.stage:
            return dict.fromkeys(speeds, self.most_steps(head)), self.compute_s_max
        steps = self.steps(head)
        known = [speed for speed in speeds.values() if 0 < speed < SPEED_MAX]
        usual = median_low(known) if known else 1.0
        most = CLAIM_MAX * usual  # whoever boasts neither starves the others nor takes all the work
        believed = {m: min(s, most) if 0 < s < SPEED_MAX else usual for m, s in speeds.items()}
        fastest = max(believed.values())
        if self.shared:
            counts = _apportion(steps, believed, 0 if self.synchronous else 1)
        else:
            counts = {m: min(steps, max(1, round(steps * s / fastest))) for m, s in believed.items()}
        if self.pipeline or not known:
            return counts, self.compute_s_max
        return counts, max(counts[m] / s for m, s in believed.items())

    def check(self, head: Head, counts: Mapping[Member, int]) -> None:
        """`ProtocolViolation` unless a plan may assign so many steps."""
        steps = self.steps(head)
        if self.stage:
            if any(count != self.most_steps(head) for count in counts.values()):
                raise ProtocolViolation("the plan assigns work to a stage that is assigned none")
            return
        least = 0 if self.synchronous else 1
        if any(not least <= count <= steps for count in counts.values()):
            raise ProtocolViolation("the plan assigns an impossible amount of work")
        if self.shared and sum(counts.values()) > max(steps, least * len(counts)):
            raise ProtocolViolation("the plan assigns more than the run's batch")
        if self.synchronous and sum(counts.values()) < steps:
            raise ProtocolViolation("the plan does not assign all of the run's batch")


def with_surplus(steps: int) -> int:
    """What a member that trains ahead is promised for a round in which it is to make `steps`: where the others are a
    little slower, it goes on instead of waiting for them."""
    return steps + math.ceil(SURPLUS * steps)


def _apportion(total: int, speeds: Mapping[Member, float], least: int) -> dict[Member, int]:
    """`total` in proportion to speed, at least `least` each; what rounding leaves goes to the largest remainders."""
    whole = sum(speeds.values())
    exact = {member: total * speed / whole for member, speed in speeds.items()}
    counts = {member: max(least, math.floor(share)) for member, share in exact.items()}
    by_remainder = sorted(exact, key=lambda m: (math.floor(exact[m]) - exact[m], m))
    for member in by_remainder:
        if sum(counts.values()) >= total:
            break
        counts[member] += 1
    return counts
