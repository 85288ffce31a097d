"""A contributor's work before the exchange: train, encode, hash, and sign a commitment."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import torch
import trio
from blake3 import blake3

from optim.strategies.interface import Coding, RoundInfo
from peer.bounds import finite_loss
from peer.buffers import allocate
from peer.catalogue.machine import WorkerFailed
from peer.errors import BarnraiseError, Diverged, ProtocolViolation, WorkerError
from peer.identity import Signed, sign_body
from swarm.protocol.plan import CONTRIBUTION_KIND, Contribution, WorkPlan
from swarm.rounds.context import RoundContext
from swarm.rounds.trainers.trainer import TrainRequest, TrainResult


def as_bytes(encoded: torch.Tensor) -> memoryview:
    """Return the bytes of a uint8 tensor without a copy."""
    array: Any = encoded.numpy()
    return memoryview(array)


@dataclass(frozen=True)
class EncodedUpdate:
    """A peer's encoded update, ready to send."""

    round_info: RoundInfo
    coding: Coding
    slices: Sequence[memoryview]
    hashes: tuple[bytes, ...]
    """The blake3 hash of each slice."""
    sqnorms: tuple[float, ...]
    """The squared norm of each slice's decoded values."""
    before: tuple[torch.Tensor, ...] = ()
    """In a pipeline, the method's memory before this update was encoded."""


class Contributor:
    """Makes a peer's contributions, one at a time, and keeps the method's memory (error feedback) correct.

    An update that was not merged goes into the next one. In a pipeline the trainer keeps or re-dispatches what was not
    merged, so there the method only forgets the update."""

    def __init__(self, context: RoundContext) -> None:
        self._context = context
        self._unmerged: deque[EncodedUpdate] = deque()

    async def contribute(
        self, plan: WorkPlan, round_info: RoundInfo, coding: Coding, cut_short: bool
    ) -> tuple[Signed, EncodedUpdate | None]:
        """Train under `plan`, or (`cut_short`) take the steps so far. Return the signed `Contribution` and its update.

        If the worker fails or its product is not finite, the contribution is empty. The peer stays in the group, owns
        slices and votes. Raises Diverged where that has lasted too long.
        """
        context = self._context
        assignment = plan.of(context.me)
        assert assignment is not None
        work: TrainResult | None = None
        update: EncodedUpdate | None = None
        try:
            request = TrainRequest(
                assignment, round_info, coding.places, len(plan.assignments), plan.deadline_s, cut_short
            )
            work = await context.trainer.train(request)
            if work.steps:
                update = await trio.to_thread.run_sync(self._encode, round_info, coding, work.product)
        except WorkerError as error:
            context.events.emit(WorkerFailed(round=plan.round, reason=str(error)))
        except Diverged:
            raise
        except BarnraiseError as error:
            context.events.emit("update_unusable", round=plan.round, reason=str(error))
        usable, bundles = work if update else None, context.schedule.bundles(coding.count)
        body = Contribution(
            head=plan.head,
            plan=plan.hash,
            member=context.me,
            steps=usable.steps if usable else 0,
            samples=usable.samples if usable else 0,
            loss=(finite_loss(usable.loss) if usable else None) or 0.0,
            hashes=bundles.hashes(update.hashes) if update else (),
            sqnorms=bundles.sqnorms(update.sqnorms) if update else (),
            counted=usable.counted if usable else (),
            receipts=usable.receipts if usable else (),
            stage_before=usable.stage_before if usable else (),
            first_stage=work.first_stage if work else (),
            exhausted=usable is None and context.trainer.is_exhausted(plan.round),
            client=True if context.schedule.by_link and context.host.traversal.is_client else msgspec.UNSET,
        )
        return sign_body(context.identity, CONTRIBUTION_KIND, body), update

    def restore_residual(self, update: EncodedUpdate) -> None:
        """Put an update that was not merged back into the method's memory, before the next update is encoded."""
        self._unmerged.append(update)

    def _encode(self, round_info: RoundInfo, coding: Coding, product: torch.Tensor) -> EncodedUpdate:
        strategy, pipeline = self._context.state.strategy, self._context.schedule.pipeline
        while self._unmerged:
            lost = self._unmerged.pop()  # the last one first: its `before` contains the earlier ones
            if pipeline:
                for vector, was in zip(strategy.memory(lost.coding), lost.before, strict=True):
                    vector.copy_(was)
            else:
                strategy.restore_residual(lost.round_info, lost.coding, lost.slices)
        before = tuple(vector.clone() for vector in strategy.memory(coding)) if pipeline else ()
        sizes = [coding.message_bytes(index) for index in range(coding.count)]
        room = torch.frombuffer(allocate(sum(sizes)), dtype=torch.uint8).split(sizes)
        sqnorms = strategy.encode(round_info, coding, product, room)
        if not all(map(math.isfinite, sqnorms)):  # of the bytes to send: the worker can write its product at any time
            raise ProtocolViolation("an encoded update is not finite: the worker changed it while it was encoded")
        slices = [as_bytes(piece) for piece in room]
        return EncodedUpdate(
            round_info, coding, slices, tuple(blake3(s).digest() for s in slices), tuple(sqnorms), before
        )
