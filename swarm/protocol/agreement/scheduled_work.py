"""The rules of the real methods: what `RoundSchedule`, plans and ledgers say, asked by the agreement."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Final

from peer.errors import ProtocolViolation
from peer.identity import Signed
from swarm.protocol.agreement.messages import JoinBody
from swarm.protocol.agreement.work import Settlement
from swarm.protocol.head import Head, Member, Sponsor
from swarm.protocol.overlaps import covers_batch, select_disjoint
from swarm.protocol.plan import (
    Contribution,
    WorkPlan,
    check_contribution,
    check_plan,
    make_plan,
    next_ledger,
    within_reach,
)
from swarm.protocol.receipts import OtherStages, ReceiptBody, StageProof, names_of, receipted
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


class NoStages:
    """The `OtherStages` of a run that is not a pipeline."""

    def head(self, stage: int, links: StageProof) -> Head:
        raise ProtocolViolation("a proof of another stage's head in a run without stages")

    def receipt(self, signed: Signed) -> ReceiptBody:
        raise ProtocolViolation("a receipt in a run without stages")


NO_STAGES: Final = NoStages()


def until_deadline(head: Head, plan: WorkPlan, rotations: int) -> float:
    """Give a leader as long as its plan gives the members."""
    return plan.deadline_s


def admit_all(join: JoinBody, signer: str) -> tuple[Sponsor, ...]:
    """Admit every peer, as an open run does."""
    return ()


@dataclass(frozen=True)
class ScheduledWork:
    """The `Work` of a run's method. `slices_of` and `exchange_s_of` depend on how updates are coded, which is not
    pure."""

    schedule: RoundSchedule
    slices_of: Callable[[Head], int]
    exchange_s_of: Callable[[Head], float]
    weights_of: Weights = equal_weights
    sponsors_of: Callable[[JoinBody, str], tuple[Sponsor, ...] | None] = admit_all
    fast_forward_of: Callable[[Head], Head] = stay
    may_begin_of: Callable[[int], bool] | None = None
    is_over_of: Callable[[], bool] | None = None
    timeout_of: WorkTimeout = until_deadline
    stages: OtherStages = NO_STAGES

    def slices(self, head: Head) -> int:
        return self.slices_of(head)

    def plan(self, head: Head, attempt: int, speeds: Mapping[Member, float], reset: Collection[Member]) -> WorkPlan:
        return make_plan(head, attempt, speeds, self.schedule, reset)

    def divides_batch(self) -> bool:
        return self.schedule.shared

    def may_begin(self, waiting: int) -> bool | None:
        return self.may_begin_of(waiting) if self.may_begin_of is not None else None

    def is_over(self) -> bool | None:
        return self.is_over_of() if self.is_over_of is not None else None

    def check_plan(self, plan: WorkPlan, head: Head) -> None:
        check_plan(plan, head, self.schedule)

    def check_contribution(self, body: Contribution, plan: WorkPlan, head: Head) -> None:
        check_contribution(body, plan, self.slices_of(head), head, self.schedule)
        if body.first_stage and self.stages.head(0, body.first_stage).round < self.schedule.rounds:
            raise ProtocolViolation("a contribution proves a head of the first stage that is not its last")
        if body.stage_before:
            self.stages.head(self.schedule.stage - 1, body.stage_before)
        signers = {receipt.signer for receipt in body.receipts}
        if len(signers) < len(body.receipts) or body.member.peer in signers:
            raise ProtocolViolation("a contribution has two receipts of one peer, or one of its own")
        for signed in body.receipts:
            receipt = self.stages.receipt(signed)
            if receipt.head != body.head or receipt.peer != body.member.peer:
                raise ProtocolViolation("a contribution has a receipt for another round or peer")

    def settle(self, head: Head, plan: WorkPlan, contributions: Sequence[Contribution]) -> Settlement | None:
        weights = self._weights(head, plan, contributions)
        merged = [body for body, weight in zip(contributions, weights, strict=True) if weight > 0]
        if not merged and not self._is_exhausted(plan, contributions):
            return None
        batch = self.schedule.batch(head)
        if batch is not None and not covers_batch(merged, batch):
            return None
        ledger = next_ledger(head, plan, merged, contributions, self.schedule)
        if self.schedule.closes(head):
            ends = [self.stages.head(0, body.first_stage).ledger for body in contributions if body.first_stage]
            if not ends:
                return None
            ledger = ledger.closed(max(ends, key=lambda end: end.cursor))
        steps = max((body.steps for body in merged), default=0)
        return Settlement(
            weights=weights,
            ledger=ledger,
            inner_step=head.inner_step + self.schedule.advance(head, steps),
            tokens=head.tokens + self.schedule.seq_len * sum(body.samples for body in merged),
            senders=self._senders(head, contributions),
        )

    def _is_exhausted(self, plan: WorkPlan, contributions: Sequence[Contribution]) -> bool:
        """Return whether all planned peers have submitted, none has any work, and most report that none can come; a
        missing peer may have counted samples. It follows from the roster alone: if it depended on each voter's own
        view, others could refuse for ever what one has accepted."""
        complete = len(contributions) == len(plan.assignments) and not any(body.steps for body in contributions)
        return complete and 2 * sum(body.exhausted for body in contributions) > len(contributions)

    def _weights(self, head: Head, plan: WorkPlan, contributions: Sequence[Contribution]) -> tuple[float, ...]:
        distinct = self._disjoint(head, contributions)
        working = [body for body, kept in zip(contributions, distinct, strict=True) if kept and body.steps > 0]
        working = list(within_reach(head, plan, working, self.schedule))
        tokens = [body.samples * self.schedule.seq_len for body in working]
        weights = self.weights_of(tokens, [body.norm for body in working])
        shares = {body.member: weight for body, weight in zip(working, weights, strict=True)}
        return tuple(shares.get(body.member, 0.0) for body in contributions)

    def _disjoint(self, head: Head, contributions: Sequence[Contribution]) -> tuple[bool, ...]:
        senders = {*head.senders, *self._senders(head, contributions)}
        open_receipt = self.stages.receipt
        held = [receipted(body.counted, body.receipts, open_receipt, senders) for body in contributions]
        return select_disjoint(contributions, held)

    def _senders(self, head: Head, contributions: Sequence[Contribution]) -> tuple[str, ...]:
        """Return the peers of the stage before, by its newest head that is proved here, else as they were."""
        proofs = [body.stage_before for body in contributions if body.stage_before]
        if not proofs:
            return head.senders
        heads = [self.stages.head(self.schedule.stage - 1, links) for links in proofs]
        newest = max(heads, key=lambda head: (head.term, head.boot, head.round))
        return names_of([*newest.members, *(learner.member for learner in newest.learners)])

    def reset(self, head: Head, plan: WorkPlan, contributions: Sequence[Contribution]) -> Collection[Member]:
        kept = self._disjoint(head, contributions)
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

    def sponsors(self, join: JoinBody, signer: str) -> tuple[Sponsor, ...] | None:
        return self.sponsors_of(join, signer)
