"""From an assignment to a signed commitment: train, encode, hash. What a contributor does before anybody exchanges."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import trio
from blake3 import blake3

from optim.strategies.interface import Coding, RoundInfo
from peer.errors import BarnraiseError, WorkerError
from peer.identity import Signed, sign_body
from peer.net.wire import allocate
from swarm.protocol.plan import CONTRIBUTION_KIND, Contribution, WorkPlan
from swarm.rounds.context import RoundContext
from swarm.rounds.exchange import as_bytes
from swarm.rounds.trainer import TrainRequest, TrainResult


@dataclass(frozen=True)
class EncodedUpdate:
    """What a peer has to say in a round: its encoded slices, their blake3 hashes and squared norms. `before`: in a
    pipeline, what the method remembered before it."""

    round_info: RoundInfo
    coding: Coding
    slices: Sequence[memoryview]
    hashes: tuple[bytes, ...]
    sqnorms: tuple[float, ...]
    before: tuple[torch.Tensor, ...] = ()


class Contributor:
    """Makes a peer's contributions, one at a time, and sees to it that what a method keeps between its messages stays
    true: what was in a message that was not merged is in the next one. In a pipeline the trainer sees to that, or to
    its being counted elsewhere: there the method forgets the message."""

    def __init__(self, context: RoundContext) -> None:
        self._context = context
        self._returned: deque[EncodedUpdate] = deque()

    async def contribute(
        self, plan: WorkPlan, round_info: RoundInfo, coding: Coding, cut_short: bool
    ) -> tuple[Signed, EncodedUpdate | None]:
        """Do this peer's part of `plan`, or (`cut_short`) take what there is. Returns the signed `Contribution` and the
        message it commits to.

        A worker that fails, or a product that is not finite, makes a contribution of nothing: the peer stays in the
        group, owns slices and votes.
        """
        context = self._context
        assignment = plan.of(context.me)
        assert assignment is not None
        work: TrainResult | None = None
        message: EncodedUpdate | None = None
        try:
            request = TrainRequest(
                assignment, round_info, coding.places, len(plan.assignments), plan.deadline_s, cut_short
            )
            work = await context.trainer.train(request)
            if work.steps:
                message = await trio.to_thread.run_sync(self._encode, round_info, coding, work.product)
        except WorkerError as error:
            context.events.emit("worker_failed", round=plan.round, reason=str(error))
        except BarnraiseError as error:
            context.events.emit("update_unusable", round=plan.round, reason=str(error))
        usable = work if message else None
        body = Contribution(
            head=plan.head,
            plan=plan.hash,
            member=context.me,
            steps=usable.steps if usable else 0,
            samples=usable.samples if usable else 0,
            loss=usable.loss if usable and math.isfinite(usable.loss) else 0.0,
            hashes=message.hashes if message else (),
            sqnorms=message.sqnorms if message else (),
            counted=usable.counted if usable else (),
        )
        return sign_body(context.identity, CONTRIBUTION_KIND, body), message

    def restore_residual(self, message: EncodedUpdate) -> None:
        """That message was not merged."""
        self._returned.append(message)

    def _encode(self, round_info: RoundInfo, coding: Coding, product: torch.Tensor) -> EncodedUpdate:
        strategy, pipeline = self._context.state.strategy, self._context.schedule.pipeline
        while self._returned:
            lost = self._returned.pop()  # the last one first: what was before it holds what came before that
            if pipeline:
                for vector, was in zip(strategy.memory(lost.coding), lost.before, strict=True):
                    vector.copy_(was)
            else:
                strategy.restore_residual(lost.round_info, lost.coding, lost.slices)
        before = tuple(vector.clone() for vector in strategy.memory(coding)) if pipeline else ()
        sizes = [coding.message_bytes(index) for index in range(coding.count)]
        room = torch.frombuffer(allocate(sum(sizes)), dtype=torch.uint8).split(sizes)
        sqnorms = strategy.encode(round_info, coding, product, room)
        slices = [as_bytes(piece) for piece in room]
        return EncodedUpdate(
            round_info, coding, slices, tuple(blake3(s).digest() for s in slices), tuple(sqnorms), before
        )
