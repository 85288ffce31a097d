"""What the training method decides about a round: pure functions of the head that all voters compute alike.

All that the agreement needs of samples, steps and norms. `scheduled_work.ScheduledWork` answers them for the real
methods.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from swarm.protocol.agreement.messages import JoinBody
from swarm.protocol.head import Head, Member, Sponsor
from swarm.protocol.ledger import Ledger
from swarm.protocol.plan import Contribution, WorkPlan


@dataclass(frozen=True)
class Settlement:
    """What a roster's contributions lead to."""

    weights: tuple[float, ...]
    """The weight of each contribution, in order; 0 for one that is not merged."""
    ledger: Ledger
    inner_step: int
    tokens: int
    senders: tuple[str, ...] = ()
    """Of the next head (`Head.senders`)."""


class Work(Protocol):
    """The rules of one method and run. Implementations are pure; those that raise, raise `ProtocolViolation`."""

    def slices(self, head: Head) -> int:
        """Return the number of slices of an update in the round after `head`."""

    def plan(self, head: Head, attempt: int, speeds: Mapping[Member, float], reset: Collection[Member]) -> WorkPlan:
        """Assign the round's work. `speeds`: measured inner steps a second, 0 if unknown; members in `reset` must
        forget what they have counted."""

    def divides_batch(self) -> bool:
        """Return whether members divide a fixed batch, which is incomplete without the part of each."""

    def may_begin(self, waiting: int) -> bool | None:
        """Return whether the group may begin with the peers that wait for it, as a stage of a pipeline whose groups
        begin together; None if that is only a matter of the configured `min_peers`. Only the coordinator asks, which
        follows all stages."""

    def is_over(self) -> bool | None:
        """Return whether all groups of the run have made their last commit, so that none needs a quorum any more; None
        if the run has no other group. Only the coordinator asks, which follows all stages."""

    def check_plan(self, plan: WorkPlan, head: Head) -> None:
        """Raise `ProtocolViolation` if the plan does not follow from the head."""

    def check_contribution(self, body: Contribution, plan: WorkPlan, head: Head) -> None:
        """Raise `ProtocolViolation` if the contribution claims what its plan does not allow."""

    def settle(self, head: Head, plan: WorkPlan, contributions: Sequence[Contribution]) -> Settlement | None:
        """Return what the contributions lead to; None if they cannot be merged: an incomplete batch, or no usable one,
        unless most say that none can come."""

    def reset(self, head: Head, plan: WorkPlan, contributions: Sequence[Contribution]) -> Collection[Member]:
        """Return the members that must forget what they have counted, after `settle` has returned None."""

    def late_s(self, plan: WorkPlan, took_s: Sequence[float]) -> float | None:
        """Return after how many seconds slow members are asked to submit what they have, if those that have submitted
        took `took_s`; None: not yet known."""

    def exchange_s(self, head: Head) -> float:
        """Return the seconds that an exchange may take."""

    def timeout_s(self, head: Head, plan: WorkPlan, rotations: int) -> float:
        """Return the seconds that a leader has for the work of a plan, at most until its deadline. `rotations`: how
        often all live members have led in vain after this head."""

    def fast_forward(self, head: Head) -> Head:
        """Return the head from which the coordinator begins a new term after `head`: the same state, brought to the
        position of a pipeline's other stages. Only the coordinator asks, which follows all stages."""

    def sponsors(self, join: JoinBody, signer: str) -> tuple[Sponsor, ...] | None:
        """Return who vouches for the peer that signed this request; None if the run does not admit it. Nothing but the
        request decides that, neither the time nor a list of bans, since all voters must judge alike."""
