"""The rules of the real methods, as the agreement of one group asks for them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import inf
from typing import Final

from optim.merge import NormGate, contribution_weights
from optim.strategies.interface import OuterStrategy
from peer.identity import Identity
from swarm.protocol.agreement.config import AgreementConfig
from swarm.protocol.agreement.proof import StageProofs
from swarm.protocol.agreement.work import Work, WorkTimeout, unknown_bytes, until_deadline
from swarm.protocol.head import Head
from swarm.protocol.plan import ROUND_TIME_SLACK, WorkPlan
from swarm.protocol.receipts import NO_STAGES
from swarm.protocol.round_schedule import RoundSchedule
from swarm.protocol.signer import KeySigner
from swarm.protocol.timeouts import AdaptiveTimeouts

# A synchronous pipeline's gradient is exactly that of its batch, however uneven the shares are. Only a gradient an
# order of magnitude longer than the others is clipped.
BATCH_GATE: Final = NormGate(token_cap=inf, norm_band=inf, norm_clip=10.0)

WAIT_FACTOR: Final = 4.0  # times what the work of a round usually takes, after which its leader is given up
FIRST_BATCH_S: Final = 300.0  # for a synchronous pipeline's batch, while nothing is measured
DOUBLINGS_MAX: Final = 10


def work_of(
    strategy: OuterStrategy,
    schedule: RoundSchedule,
    exchange_s: Callable[[Head], float],
    timeout: WorkTimeout = until_deadline,
    stages: Mapping[int, AgreementConfig] | None = None,
    bytes_of: Callable[[Head], tuple[float, float]] = unknown_bytes,
) -> Work:
    """Return the rules of a method's rounds. `exchange_s`: the seconds that an exchange after a head may take;
    `bytes_of`: the bytes of an update in it and of its result.
    `stages`: at a later stage of a pipeline, the groups of the first stage and of the one before."""

    def weights(tokens: Sequence[int], norms: Sequence[float]) -> Sequence[float]:
        if schedule.synchronous:
            scaled = [count * norm for count, norm in zip(tokens, norms, strict=True)]
            return contribution_weights(tokens, scaled, BATCH_GATE)
        return strategy.weights(tokens, norms)

    signer = KeySigner(Identity.generate())  # it signs nothing
    return Work(
        schedule=schedule,
        slices=lambda head: schedule.bundles(strategy.slices(schedule.round_info(head))).count,
        exchange_s=exchange_s,
        bytes_of=bytes_of,
        weights_of=weights,
        timeout_of=timeout,
        stages=StageProofs(stages, signer) if stages else NO_STAGES,
    )


def work_timeout(schedule: RoundSchedule, timeouts: AdaptiveTimeouts, speed: Callable[[], float]) -> WorkTimeout:
    """Return how long a replica waits for a leader's work: less than a plan's deadline, if its measurements show
    that this is far too long. `speed`: its inner steps a second, 0 if unknown.

    A pipeline stops while a stage has no replica, so there its own speed shows nothing. In a synchronous one the usual
    time of a batch does: leaders then rotate, no counted sample is lost, and the time doubles with each rotation."""

    def seconds(head: Head, plan: WorkPlan, rotations: int) -> float:
        if schedule.synchronous:
            usual = WAIT_FACTOR * timeouts.batch_s or FIRST_BATCH_S
            return 2.0 ** min(rotations, DOUBLINGS_MAX) * usual
        steps_s = speed()
        if schedule.pipeline or steps_s <= 0:
            return plan.deadline_s
        return WAIT_FACTOR * (ROUND_TIME_SLACK * schedule.steps(head) / steps_s + 5.0)

    return seconds
