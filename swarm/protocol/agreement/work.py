"""Decisions of the training method about a round, as `RoundSchedule`, plans and ledgers say it: pure functions of the
head that all voters compute alike. The agreement calls them, and knows nothing else of samples, steps and norms."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Final

from peer.errors import ProtocolViolation
from swarm.protocol.agreement.messages import JoinBody, Measurements
from swarm.protocol.head import Head, Member, Sponsor
from swarm.protocol.ledger import Ledger
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
from swarm.protocol.receipts import NO_STAGES, OtherStages, names_of, receipted
from swarm.protocol.round_schedule import RoundSchedule
from swarm.protocol.shares import LinkSpeed, links_of, weights_of

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


def admit_all(join: JoinBody, signer: str) -> tuple[Sponsor, ...]:
    """Admit every peer, as an open run does."""
    return ()


def unknown_bytes(head: Head) -> tuple[float, float]:
    """Give no size to updates: then all members merge the same."""
    return 0.0, 0.0


@dataclass(frozen=True)
class Settlement:
    """The outcome of a roster's contributions."""

    weights: tuple[float, ...]
    """The weight of each contribution, in order; 0 for one that is not merged."""
    ledger: Ledger
    inner_step: int
    tokens: int
    senders: tuple[str, ...] = ()
    """Of the next head (`Head.senders`)."""


@dataclass(frozen=True)
class Work:
    """The rules of one method and run, which are pure; those that raise, raise `ProtocolViolation`. `slices`,
    `exchange_s` and `bytes_of` (of a whole update, and of its result) depend on how updates are coded, which is
    not."""

    schedule: RoundSchedule
    slices: Callable[[Head], int]
    """The number of slices of an update in the round after a head."""
    exchange_s: Callable[[Head], float]
    """The seconds that an exchange may take."""
    bytes_of: Callable[[Head], tuple[float, float]] = unknown_bytes
    weights_of: Weights = equal_weights
    sponsors: Callable[[JoinBody, str], tuple[Sponsor, ...] | None] = admit_all
    """Who vouches for the peer that signed a request, its second argument; None if the run does not admit it. Nothing
    but the request decides that, neither the time nor a list of bans, since all voters must judge alike."""
    fast_forward: Callable[[Head], Head] = stay
    """The head from which the coordinator begins a new term: the same state, brought to the position of a pipeline's
    other stages. Only the coordinator asks this and the next three, which follows all stages."""
    may_begin: Callable[[int], bool | None] = lambda waiting: None
    """Whether the group may begin with as many waiting peers, as a stage of a pipeline whose groups begin together;
    None if that is only a matter of the configured `min_peers`."""
    is_over: Callable[[], bool | None] = lambda: None
    """Whether all groups of the run have made their last commit, so that none needs a quorum any more; None if the run
    has no other group."""
    is_known: Callable[[str], bool] = lambda peer: False
    """Whether a peer is a member of another group of the run."""
    timeout_of: WorkTimeout = until_deadline
    stages: OtherStages = NO_STAGES

    def plan(
        self, head: Head, attempt: int, told: Mapping[Member, Measurements], reset: Collection[Member]
    ) -> WorkPlan:
        """Assign the round's work to these members, by their measurements; members in `reset` must forget their counted
        samples."""
        speeds = {member: measured.speed for member, measured in told.items()}
        return make_plan(head, attempt, speeds, self.schedule, reset, self._shares(head, told))

    def _links(self, head: Head, told: Mapping[Member, Measurements]) -> dict[Member, LinkSpeed]:
        """Return the link of each member of the head; empty where nothing is known of them."""
        numbers = {member: number for number, member in enumerate(head.members)}
        rates = {numbers[m]: measured.rates for m, measured in told.items() if m in numbers and measured.rates}
        links = links_of(rates, len(numbers)) if self.schedule.by_link and rates else []
        return dict(zip(head.members, links, strict=True)) if links else {}

    def _shares(self, head: Head, told: Mapping[Member, Measurements]) -> Mapping[Member, int] | None:
        """Return how much each merges; None where all merge the same."""
        links, ordered = self._links(head, told), sorted(told)
        weights = weights_of([links.get(member) for member in ordered], *self.bytes_of(head)) if links else ()
        return dict(zip(ordered, weights, strict=True)) if weights else None

    def later(self, head: Head, told: Mapping[Member, Measurements], seconds: float) -> list[Member]:
        """Return the members that finish an exchange more than this many seconds after the first ones, since their
        links need that for their own update and the result."""
        links, (message, result) = self._links(head, told), self.bytes_of(head)
        took = {member: max(message / link.up, result / link.down) for member, link in links.items()}
        return [member for member, took_s in took.items() if took_s > min(took.values()) + seconds]

    def divides_batch(self) -> bool:
        """Return whether members divide a fixed batch, which is incomplete without the part of each."""
        return self.schedule.shared

    def check_plan(self, plan: WorkPlan, head: Head) -> None:
        """Raise `ProtocolViolation` if the plan does not follow from the head."""
        check_plan(plan, head, self.schedule)

    def check_contribution(self, body: Contribution, plan: WorkPlan, head: Head) -> None:
        """Raise `ProtocolViolation` if the contribution claims what its plan does not allow."""
        check_contribution(body, plan, self.slices(head), head, self.schedule)
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
        """Return what the contributions lead to; None if they cannot be merged: an incomplete batch, or no usable one,
        unless most say that none can come."""
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
        """Return whether all planned members have submitted, none has any work, and most report that none can come: a
        missing one may have counted samples. All read the same roster, so no voter can permanently refuse a value that
        another has accepted."""
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

    def disputed(self, head: Head, contributions: Sequence[Contribution]) -> list[Member]:
        """Return the members that must forget their counted samples, since others counted them: after `settle` has
        returned None."""
        kept = self._disjoint(head, contributions)
        return [body.member for body, merged in zip(contributions, kept, strict=True) if not merged]

    def late_s(self, plan: WorkPlan, took_s: Sequence[float]) -> float | None:
        """Return after how many seconds slow members are asked to submit early, if those that have submitted
        took `took_s`; None: not yet known."""
        enough = 1 if self.schedule.stage else len(plan.assignments) // 2 + 1
        if self.schedule.synchronous or len(took_s) < enough:
            return None
        factor = 1.0 if self.schedule.stage else FINISH_EARLY_FACTOR
        return factor * median(took_s) + FINISH_EARLY_SLACK_S

    def timeout_s(self, head: Head, plan: WorkPlan, rotations: int) -> float:
        """Return the seconds that a leader has for the work of a plan, at most until its deadline. `rotations`: how
        often all live members have led in vain after this head."""
        return min(plan.deadline_s, self.timeout_of(head, plan, rotations))
