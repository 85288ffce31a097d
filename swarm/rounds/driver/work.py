"""The rules of the real methods, as the agreement of one group asks for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf
from typing import Final

from optim.merge import NormGate, contribution_weights
from optim.strategies.interface import OuterStrategy
from swarm.protocol.agreement.scheduled_work import ScheduledWork
from swarm.protocol.head import Head
from swarm.protocol.round_schedule import RoundSchedule

# A synchronous pipeline's gradient is exactly that of its batch, however uneven the shares are. Only a gradient an
# order of magnitude longer than the others is clipped.
BATCH_GATE: Final = NormGate(token_cap=inf, norm_band=inf, norm_clip=10.0)


def work_of(strategy: OuterStrategy, schedule: RoundSchedule, exchange_s: Callable[[Head], float]) -> ScheduledWork:
    """Return the rules of a method's rounds. `exchange_s`: the seconds that an exchange after a head may take."""

    def weights(tokens: Sequence[int], norms: Sequence[float]) -> Sequence[float]:
        if schedule.synchronous:
            scaled = [count * norm for count, norm in zip(tokens, norms, strict=True)]
            return contribution_weights(tokens, scaled, BATCH_GATE)
        return strategy.weights(tokens, norms)

    return ScheduledWork(
        schedule=schedule,
        slices_of=lambda head: strategy.slices(schedule.round_info(head)),
        exchange_s_of=exchange_s,
        weights_of=weights,
    )
