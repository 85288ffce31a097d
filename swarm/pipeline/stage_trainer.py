"""The trainer of a pipeline's stage: the rounds of a replica that trains on passing micro-batches.

    plan --train--> micro-batches (stage 0 dispatches its own) --> enough, says the mode --> captured in a contribution

The worker's report, not our own count, determines what is in a contribution. This file has the common part of both
modes: `swarm.pipeline.local_steps` and `swarm.pipeline.synchronous`. The worker's weights are the base class's.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Final

import torch
import trio

from peer.bounds import finite_loss
from peer.catalogue.rounds import ValEvaluated
from peer.errors import BarnraiseError
from swarm.pipeline.source import MicroBatchSource
from swarm.pipeline.stage_server import StageListener, StageServer
from swarm.pipeline.weight_sync import WeightSync
from swarm.protocol.ledger import Range, without
from swarm.protocol.round_schedule import RoundSchedule
from swarm.protocol.samples import OwnSamples, SampleSupply
from swarm.rounds.trainers.trained_rounds import TrainedRounds, smoothed_speed
from swarm.rounds.trainers.trainer import TrainRequest, TrainResult

VALIDATION_SHARE: Final = 0.03  # of the time, at most
EVALUATE_S: Final = 120.0  # for a batch: while a stage has no replica, training waits as well
LAST_EVALUATE_S: Final = 10.0  # the same after the last round, when replicas leave for good
LATE: Final = 8.0  # or so many times the usual latency of a micro-batch, if that is longer


@dataclass(frozen=True)
class HeldOut:
    """The text on which stage 0 measures the held-out loss."""

    batches: Callable[[], Awaitable[Sequence[torch.Tensor]]]
    """Each batch is (B, T + 1) int64."""
    bytes_per_token: float
    """Of the text."""
    samples: SampleSupply = field(default_factory=OwnSamples)
    """What brings samples to stage 0."""


class StageTrainer(WeightSync, StageListener):
    """The trainer of a stage (`swarm.rounds.trainers.trainer.Trainer`) and the server's `StageListener`.

    `run` must be running, and `server` open, while a round trains. On stage 0 there is a `source`, and `held_out` where
    the held-out loss is measured."""

    def __init__(
        self,
        server: StageServer,
        schedule: RoundSchedule,
        source: MicroBatchSource | None = None,
        held_out: HeldOut | None = None,
    ) -> None:
        super().__init__(server, schedule)
        self.speed = 0.0
        self.trained = TrainedRounds(server.host.events)
        self.val_loss: float | None = None
        self.val_round = -1
        self.validate_round: int | None = None
        self._source, self._held_out = source, held_out
        self._cut_short = False
        self._worked_on: int | None = None  # round of the head after which micro-batches were last dispatched
        self._validates_from = -math.inf

    # -- what rounds ask ---------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Keep the worker at the adopted weights, through commits and losses, until cancelled."""
        async with self._redispatching():
            await self._keep_in_sync()

    async def train(self, request: TrainRequest) -> TrainResult:
        self._cut_short = request.cut_short  # `finish_early` may have been meant for the round before
        await self._changed.until(lambda: self._is_ready(request), math.inf)
        if request.assignment.reset or not self._may_go_on(request):
            async with self._alone():
                await self._start_over()
        head, result = self.head, await self._train(request)
        if self._source is not None or head is None or not result.counted:
            return result
        receipts, stage_before = await self._server.receipts.ask(head, result.counted)
        return replace(result, receipts=receipts, stage_before=stage_before)

    def finish_early(self) -> None:
        self._cut_short = True
        self._changed.notify()

    def is_exhausted(self, round: int) -> bool:
        return False

    async def gather(self, members: Sequence[str]) -> Mapping[str, Sequence[Range]] | None:
        await trio.sleep_forever()

    async def validate(self) -> None:
        """Measure the held-out loss by the present weights of all stages, if this is stage 0 and the loss is asked
        for. Give up where it takes much longer than it should: the other stages may have left."""
        await self._validate(max(LAST_EVALUATE_S, LATE * self._server.runner.answer_s))

    async def _validate(self, timeout_s: float) -> None:
        if self._held_out is None or not self._held_out.samples.has_held_out:
            return
        number, self.validate_round = self.validate_round, None
        if number is None or self._source is None:
            return
        began = trio.current_time()
        losses, tokens = list[float](), 0
        try:
            for batch in await self._held_out.batches():
                loss, targets = await self._source.evaluate(batch, timeout_s)
                losses.append(loss)
                tokens += targets
        except BarnraiseError as error:
            self._events.emit("evaluation_failed", round=number, reason=str(error))
            return
        ended = trio.current_time()
        self._validates_from = ended + (ended - began) / VALIDATION_SHARE
        self.val_loss, self.val_round = math.fsum(losses) / max(1, tokens) / self._held_out.bytes_per_token, number
        self._events.emit(ValEvaluated(round=number, loss=finite_loss(self.val_loss)))

    # -- events of the stage -----------------------------------------------------------------------------------------

    @abstractmethod
    def counted(self, samples: Range, tokens: int, loss: float) -> None: ...

    def later_epoch(self, epoch: int) -> None:
        self._changed.notify()

    def redispatch(self, ranges: tuple[Range, ...], epoch: int) -> None:
        if self._source is not None:
            self._source.redispatch(ranges, epoch)

    def dispatching(self) -> tuple[Range, ...]:
        return self._source.dispatching if self._source is not None else ()

    # -- what the modes differ in ------------------------------------------------------------------------------------

    @abstractmethod
    async def _train(self, request: TrainRequest) -> TrainResult:
        """Train until the mode says that it is enough, or until `self._cut_short`."""

    @abstractmethod
    def _may_go_on(self, request: TrainRequest) -> bool:
        """Return whether what was counted since the last commit may be part of the request's contribution."""

    # -- for the modes -----------------------------------------------------------------------------------------------

    async def _dispatch(self, request: TrainRequest) -> None:
        """Stage 0: dispatch all samples of the request's assignment, except those counted already. Begin none once the
        round is over."""
        source, head = self._source, self.head
        assert source is not None and head is not None
        if self._held_out is not None:
            self._held_out.samples.expect(request.assignment.ranges)
        left = without(request.assignment.ranges, self._accounting.counted)
        # After a regroup the head has the same round; and a new replica does not know what others have dispatched in
        # it.
        worked_on, self._worked_on = self._worked_on, head.round
        is_new = head.round == 0 if worked_on is None else head.round > worked_on
        fresh = without(left, [(0, head.ledger.cursor)]) if is_new else ()

        def go_on() -> bool:
            return not self._is_over(request)

        async with trio.open_nursery() as nursery:
            for ranges, again in ((without(left, fresh), True), (fresh, False)):
                if ranges:
                    nursery.start_soon(source.dispatch, ranges, again, go_on)

    def _is_over(self, request: TrainRequest) -> bool:
        return self._cut_short

    def _note_speed(self, steps: int, seconds: float) -> None:
        self.speed = smoothed_speed(self.speed, steps, seconds)

    async def _validate_if_due(self) -> None:
        if trio.current_time() >= self._validates_from:
            await self._validate(EVALUATE_S)

    def _is_ready(self, request: TrainRequest) -> bool:
        here = self.head is not None and self.head.round + 1 == request.round_info.round
        return here and self._adoption is None and not self._is_lost()

    @asynccontextmanager
    async def _redispatching(self) -> AsyncIterator[None]:
        if self._source is None:
            yield
            return
        async with self._source.open():
            yield
