"""The rules of the real methods: what `RoundSchedule`, plans and ledgers say, asked by the agreement."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Final

from swarm.protocol.agreement.messages import JoinBody
from swarm.protocol.agreement.work import Settlement
from swarm.protocol.head import Head, Member
from swarm.protocol.overlaps import covers_batch, select_disjoint
from swarm.protocol.plan import Contribution, WorkPlan, check_contribution, check_plan, make_plan, next_ledger
from swarm.protocol.round_schedule import RoundSchedule

FINISH_EARLY_FACTOR: Final = 1.5  # times the median compute time, after which slow members submit what they have
FINISH_EARLY_SLACK_S: Final = 2.0

WorkTimeout = Callable[[Head, WorkPlan, int], float]
"""The seconds for the work of a plan after a head; the number says how often all members have led in vain."""

Weights = Callable[[Sequence[int], Sequence[float]], Sequence[float]]
"""From the tokens and norms of contributions to their weights in the mean."""


def equal_weights(tokens: Sequence[int], norms: Sequence[float]) -> Sequence[float]:
    """Weight contributions by tokens alone."""
    return [count / max(1, sum(tokens)) for count in tokens]


def stay(head: Head) -> Head:
    """Return the head itself: there is no other stage to follow."""
    return head


def until_deadline(head: Head, plan: WorkPlan, rotations: int) -> float:
    """Give a leader as long as its plan gives the members."""
    return plan.deadline_s


def admit_all(join: JoinBody, signer: str) -> bool:
    """Admit every peer whose message has come through: the gate was at the connection."""
    return True


@dataclass(frozen=True)
class ScheduledWork:
    """The `Work` of a run's method. `slices_of` and `exchange_s_of` depend on how updates are coded, which is not
    pure."""

    schedule: RoundSchedule
    slices_of: Callable[[Head], int]
    exchange_s_of: Callable[[Head], float]
    weights_of: Weights = equal_weights
    admits_of: Callable[[JoinBody, str], bool] = admit_all
    fast_forward_of: Callable[[Head], Head] = stay
    may_begin_of: Callable[[int], bool] | None = None
    timeout_of: WorkTimeout = until_deadline

    def slices(self, head: Head) -> int:
        return self.slices_of(head)

    def plan(self, head: Head, attempt: int, speeds: Mapping[Member, float], reset: Collection[Member]) -> WorkPlan:
        return make_plan(head, attempt, speeds, self.schedule, reset)

    def divides_batch(self) -> bool:
        return self.schedule.shared

    def may_begin(self, waiting: int) -> bool | None:
        return self.may_begin_of(waiting) if self.may_begin_of is not None else None

    def check_plan(self, plan: WorkPlan, head: Head) -> None:
        check_plan(plan, head, self.schedule)

    def check_contribution(self, body: Contribution, plan: WorkPlan, head: Head) -> None:
        check_contribution(body, plan, self.slices_of(head), head, self.schedule)

    def settle(self, head: Head, plan: WorkPlan, contributions: Sequence[Contribution], dry: bool) -> Settlement | None:
        weights = self._weights(contributions)
        merged = [body for body, weight in zip(contributions, weights, strict=True) if weight > 0]
        if not merged and not (dry and self._is_complete(plan, contributions)):
            return None
        batch = self.schedule.batch(head)
        if batch is not None and not covers_batch(merged, batch):
            return None
        steps = max((body.steps for body in merged), default=0)
        return Settlement(
            weights=weights,
            ledger=next_ledger(head, plan, merged, contributions, self.schedule),
            inner_step=head.inner_step + self.schedule.advance(head, steps),
            tokens=head.tokens + self.schedule.seq_len * sum(body.samples for body in merged),
        )

    def _is_complete(self, plan: WorkPlan, contributions: Sequence[Contribution]) -> bool:
        """Return whether all planned members have submitted, and none has any work: one missing may have counted
        samples."""
        return len(contributions) == len(plan.assignments) and not any(body.steps for body in contributions)

    def _weights(self, contributions: Sequence[Contribution]) -> tuple[float, ...]:
        distinct = select_disjoint(contributions)
        working = [body for body, kept in zip(contributions, distinct, strict=True) if kept and body.steps > 0]
        tokens = [body.samples * self.schedule.seq_len for body in working]
        weights = self.weights_of(tokens, [body.norm for body in working])
        shares = {body.member: weight for body, weight in zip(working, weights, strict=True)}
        return tuple(shares.get(body.member, 0.0) for body in contributions)

    def reset(self, head: Head, plan: WorkPlan, contributions: Sequence[Contribution]) -> Collection[Member]:
        kept = select_disjoint(contributions)
        return [body.member for body, merged in zip(contributions, kept, strict=True) if not merged]

    def late_s(self, plan: WorkPlan, took_s: Sequence[float]) -> float | None:
        enough = 1 if self.schedule.stage else len(plan.assignments) // 2 + 1
        if self.schedule.synchronous or len(took_s) < enough:
            return None
        factor = 1.0 if self.schedule.stage else FINISH_EARLY_FACTOR
        return factor * median(took_s) + FINISH_EARLY_SLACK_S

    def exchange_s(self, head: Head) -> float:
        return self.exchange_s_of(head)

    def timeout_s(self, head: Head, plan: WorkPlan, rotations: int) -> float:
        return min(plan.deadline_s, self.timeout_of(head, plan, rotations))

    def fast_forward(self, head: Head) -> Head:
        return self.fast_forward_of(head)

    def admits(self, join: JoinBody, signer: str) -> bool:
        return self.admits_of(join, signer)
