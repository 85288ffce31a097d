"""From a leader's roster to the contributions that an attempt merges and their weights; all members derive the same."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import Final

from optim.merge import NormGate, contribution_weights
from optim.strategies.interface import Coding
from peer.errors import RoundDiscarded
from peer.identity import Signed
from swarm.protocol.head import Head
from swarm.protocol.overlaps import covers_batch, select_disjoint
from swarm.protocol.plan import Contribution, Roster, WorkPlan, open_roster
from swarm.rounds.context import RoundContext
from swarm.rounds.exchange import MergePlan

# A synchronous pipeline's gradient is exactly that of its batch, however uneven the shares are. Only a gradient an
# order of magnitude longer than the others is clipped.
BATCH_GATE: Final = NormGate(token_cap=inf, norm_band=inf, norm_clip=10.0)


def check_roster(
    context: RoundContext, head: Head, coding: Coding, roster: Roster, plan: WorkPlan, signed_plan: Signed
) -> MergePlan:
    """Check a roster and return what it merges.

    Raises `ProtocolViolation` if the roster is wrong. Raises `RoundDiscarded` if no update may be merged, or if a
    synchronous pipeline's batch would be incomplete.

    An empty merge, which leaves the state as it is, is accepted only if no work can come for the round: every member
    that the plan names must have submitted an empty contribution, and this peer's trainer must have run dry."""
    bodies = open_roster(roster, head, plan, coding.count, context.schedule)
    weights = _weights(context, bodies)
    merged = [body for body, weight in zip(bodies, weights, strict=True) if weight > 0]
    if not merged and not _is_empty(context, plan, bodies):
        raise RoundDiscarded("no contributor has a usable update")
    batch = context.schedule.batch(head)
    if batch is not None and not covers_batch(merged, batch):
        raise RoundDiscarded("not all of the batch was counted")
    return MergePlan(context.schedule.round_info(head), plan, signed_plan, roster, bodies, weights, coding)


def _is_empty(context: RoundContext, plan: WorkPlan, bodies: Sequence[Contribution]) -> bool:
    """Return whether no member of the plan has, or will ever have, anything to merge. A member whose contribution is
    missing may have counted samples; if it is alive, the next plan names it again."""
    complete = len(bodies) == len(plan.assignments)
    return complete and not any(body.steps for body in bodies) and context.trainer.has_run_dry(plan.round)


def _weights(context: RoundContext, bodies: Sequence[Contribution]) -> tuple[float, ...]:
    """Return each contributor's weight in the mean, from the work and the norms committed to."""
    distinct = select_disjoint(bodies)
    working = [body for body, kept in zip(bodies, distinct, strict=True) if kept and body.steps > 0]
    tokens = [body.samples * context.schedule.seq_len for body in working]
    norms = [body.norm for body in working]
    if context.schedule.synchronous:
        shares = contribution_weights(tokens, [n * norm for n, norm in zip(tokens, norms, strict=True)], BATCH_GATE)
    else:
        shares = context.state.strategy.weights(tokens, norms)
    weights = iter(shares)
    return tuple(next(weights) if kept and body.steps > 0 else 0.0 for body, kept in zip(bodies, distinct, strict=True))
