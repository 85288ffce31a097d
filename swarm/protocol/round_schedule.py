"""The work of each round, as the manifest and the last head fix it. It is the same for every member."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median_low
from typing import Final

from optim.bundles import BUNDLES_MAX, Bundles
from optim.config import AllReduceConfig, DilocoConfig, EagerConfig, OuterConfig, PerStepConfig, StreamingConfig
from optim.schedule import RoundInfo, quadratic_steps
from peer.bounds import SLICES_MAX
from peer.compute.lr_schedule import learning_rate
from peer.config import InnerConfig
from peer.errors import ProtocolViolation
from swarm.protocol.head import Head, Member
from swarm.protocol.ledger import Range

CLAIM_MAX: Final = 4.0  # a member's claimed speed counts up to this many times the median
SURPLUS: Final = 0.25  # of a round's steps; a peer's speed varies by less from round to round
SPEED_MAX: Final = 1e9  # steps/s; a higher claim, or NaN, is not believed
STEPS_FACTOR_MAX: Final = 64  # a stage's only replica does the work of all replicas of the first stage


@dataclass(frozen=True)
class RoundSchedule:
    """The steps, samples and deadlines of rounds.

    In a pipeline the replicas of each stage have rounds of their own. Those of stage 0 are assigned samples and
    dispatch them as micro-batches; the others work on what arrives. Replicas make inner steps of their own between
    commits. With a synchronous method all stages instead process the same batch in a round, each sample exactly once
    a stage.
    """

    outer: OuterConfig
    inner: InnerConfig
    seq_len: int
    """Tokens a sequence."""
    compute_s_max: float
    """Seconds after which any round's compute phase ends."""
    stage: int = 0
    stages: int = 1
    """More than 1 in a pipeline."""
    micro_batch: int = 0
    """Sequences a micro-batch, in a pipeline."""
    rounds: int = 0
    """The run is complete after this many; 0: it has no end."""
    bundled: bool = False
    """Whether a message of many slices is committed to in bundles of several."""
    by_link: bool = False
    """Whether plans may say how large a part of the merging each member takes."""

    @property
    def batch_size(self) -> int:
        return self.inner.batch_size

    @property
    def pipeline(self) -> bool:
        return self.stages > 1

    @property
    def synchronous(self) -> bool:
        """Whether a round of a pipeline is one batch that all stages process."""
        return self.pipeline and isinstance(self.outer, AllReduceConfig)

    @property
    def follows(self) -> bool:
        """Whether this is a later stage, which is assigned no samples and counts what stage 0 dispatches."""
        return self.stage > 0 and not self.synchronous

    def closes(self, head: Head) -> bool:
        """Return whether the round after `head` is the last one of a stage that follows: what stage 0 has merged is
        then merged here, or lost."""
        return self.follows and 0 < self.rounds <= head.round + 1

    @property
    def unit(self) -> int:
        """Samples in one step of an assignment."""
        return self.micro_batch if self.synchronous else self.batch_size

    def bundles(self, slices: int) -> Bundles:
        """Return the bundles of a message of this many slices."""
        return Bundles.at_most(BUNDLES_MAX if self.bundled else SLICES_MAX, slices)

    def round_info(self, head: Head) -> RoundInfo:
        """Return the round after `head`."""
        step = max(head.inner_step, 0)
        return RoundInfo(head.round + 1, step, learning_rate(self.inner, step))

    def batch(self, head: Head) -> Range | None:
        """Return the samples of a synchronous pipeline's round, all of which must be counted; None otherwise."""
        if not (self.pipeline and isinstance(self.outer, AllReduceConfig)):
            return None
        return head.ledger.cursor, head.ledger.cursor + self.outer.batch

    def steps(self, head: Head) -> int:
        """Return the steps of the round after `head`: of the fastest contributor, or (if `shared`) of all together."""
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
        """Return the steps a contribution may claim. A stage with fewer replicas than the first makes more steps."""
        steps = self.steps(head)
        return STEPS_FACTOR_MAX * steps if self.pipeline and not self.synchronous else steps

    @property
    def shared(self) -> bool:
        """Whether the members divide the steps among them, as the parts of a global batch."""
        return isinstance(self.outer, AllReduceConfig)

    @property
    def overlaps(self) -> bool:
        """Whether peers train on promised samples while an exchange is in flight."""
        return isinstance(self.outer, StreamingConfig | EagerConfig)

    def ahead(self, head: Head) -> int:
        """Return the steps of the next round that a plan may promise to a member."""
        return with_surplus(self.steps(head)) if self.overlaps else 0

    def advance(self, head: Head, steps: int) -> int:
        """Return by how much the round after `head` moves the run along its inner schedule, if the fastest contributor
        made that many steps. All stages of a pipeline advance alike, whatever their number of replicas."""
        if isinstance(self.outer, PerStepConfig):
            return min(1, steps)
        return self.steps(head) if self.pipeline else steps

    def divide(self, head: Head, speeds: Mapping[Member, float]) -> tuple[dict[Member, int], float]:
        """Return each member's steps and the seconds they should take.

        Steps are proportional to measured speed (inner steps a second, 0 if unknown), so that all members finish
        together (DyLU, arXiv 2401.09135). A pipeline pauses while a stage has no replica, so its rounds are only
        limited by `compute_s_max`."""
        if self.stage:
            return dict.fromkeys(speeds, self.most_steps(head)), self.compute_s_max
        steps = self.steps(head)
        known = [speed for speed in speeds.values() if 0 < speed < SPEED_MAX]
        usual = median_low(known) if known else 1.0
        most = CLAIM_MAX * usual  # a false claim neither starves the others nor takes all the work
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
        """Raise `ProtocolViolation` unless a plan may assign these steps."""
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
    """Return the steps promised to a member that trains ahead: more than `steps`, so that it does not have to wait for
    slightly slower members."""
    return steps + math.ceil(SURPLUS * steps)


def _apportion(total: int, speeds: Mapping[Member, float], least: int) -> dict[Member, int]:
    """Divide `total` in proportion to speed, at least `least` each; the largest remainders get what rounding leaves."""
    whole = sum(speeds.values())
    exact = {member: total * speed / whole for member, speed in speeds.items()}
    counts = {member: max(least, math.floor(share)) for member, share in exact.items()}
    by_remainder = sorted(exact, key=lambda m: (math.floor(exact[m]) - exact[m], m))
    for member in by_remainder:
        if sum(counts.values()) >= total:
            break
        counts[member] += 1
    return counts
