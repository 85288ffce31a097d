"""What an attempt merges: from a roster, which a leader sent, to contributions and their weights, as every member of
the group derives them alike."""

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

# A synchronous pipeline's gradient is that of its batch exactly, however uneven the shares are: only what is an order
# of magnitude longer than the others' is shortened.
BATCH_GATE: Final = NormGate(token_cap=inf, norm_band=inf, norm_clip=10.0)


def check_roster(
    context: RoundContext, head: Head, coding: Coding, roster: Roster, plan: WorkPlan, signed_plan: Signed
) -> MergePlan:
    """Check a roster and derive what it merges. `ProtocolViolation` if it is wrong; `RoundDiscarded` if nobody's update
    may be merged, or a synchronous pipeline's batch would not be whole.

    Nothing at all is merged, and the state stays as it is, where nothing will ever come for a round: every member must
    know that by itself, and have said that it has nothing."""
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
    """Whether all whom the plan names have nothing, and never will. Somebody whose contribution is missing may have
    counted a lot: if it is alive, the next plan names it again."""
    everybody = len(bodies) == len(plan.assignments)
    return everybody and not any(body.steps for body in bodies) and context.trainer.has_run_dry(plan.round)


def _weights(context: RoundContext, bodies: Sequence[Contribution]) -> tuple[float, ...]:
    """Each contributor's share of the mean, from the work and the norms committed to."""
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
