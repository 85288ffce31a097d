"""The trainer of a peer with the whole model: inner steps in its compute worker (`peer.worker.client`)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import torch
import trio

from optim.strategies.interface import Product
from peer.bounds import finite_loss
from peer.errors import WorkerError
from peer.events import EventLog
from peer.ipc.inner_options import ElementRange, InnerRunOptions
from peer.ipc.train_messages import InnerResult
from peer.worker.client import WorkerGroup
from swarm.protocol.head import Head
from swarm.rounds.trainers.trained_rounds import TrainedRounds
from swarm.rounds.trainers.trainer import TrainRequest, TrainResult

SPEED_MEMORY: Final = (
    0.7  # weight of the old value in the smoothed speed; other programs slow volunteers' machines at times
)
VALIDATION_BATCHES: Final = 8
VALIDATION_SHARE: Final = 0.03  # of the time, at most: the other members' exchange waits for a peer that measures
NOTHING: Final = InnerResult(steps=0, sequences=0, tokens=0, loss=math.nan, seconds=0.0, skipped=0)


class WorkerTrainer:
    """A `swarm.rounds.trainers.trainer.Trainer` that trains in a compute worker. `product` is what the method needs.

    Event `round_trained` tells how long the worker made steps (`busy_s`) and how long it was idle (`idle_s`) since the
    last capture. Event `val_evaluated` tells a held-out loss, null where it is not finite."""

    def __init__(self, worker_group: WorkerGroup, product: Product, events: EventLog) -> None:
        self.speed = 0.0
        self.validate_round: int | None = None
        """If set, the held-out loss of the present outer weights is measured before inner steps, not too often."""
        self.val_loss: float | None = None
        self.trained = TrainedRounds(events)
        self._worker_group = worker_group
        self._product: Product = product
        self._events = events
        self._validates_from = -math.inf
        self._cut_short = False  # whether the present round must end early

    async def run(self) -> None:
        """Do the work beside `train`: none."""

    async def train(self, request: TrainRequest) -> TrainResult:
        self._cut_short = request.cut_short
        await self._validate_if_due()
        options = InnerRunOptions(product=self._product, capture=spans_of(request.places))
        ranges, steps = list(request.assignment.ranges), 0 if self._cut_short else request.assignment.steps
        result = await self._worker_group.inner_steps(
            ranges, request.round_info.step, request.deadline_s, steps, options=options
        )
        self._note_speed(result)
        self._note_round(request, result, result.loss)
        return TrainResult(result.steps, result.sequences, result.loss, self._delta(request.places))

    async def validate(self) -> None:
        """Measure the held-out loss if it is asked for. A worker failure costs only the number."""
        round_number = self.validate_round
        if round_number is None:
            return
        began = trio.current_time()
        try:
            self.val_loss = await self._worker_group.evaluate(VALIDATION_BATCHES)
        except WorkerError as error:
            self._events.emit("worker_failed", round=round_number, reason=str(error))
        else:
            ended = trio.current_time()
            self._validates_from = ended + (ended - began) / VALIDATION_SHARE
            self._events.emit("val_evaluated", round=round_number, loss=finite_loss(self.val_loss))
        if self.validate_round == round_number:  # not sooner: after a cancellation it must still be measured
            self.validate_round = None

    def finish_early(self) -> None:
        self._cut_short = True  # `train` may still be measuring, with no step to stop
        self._worker_group.stop_inner()

    def adopt(self, theta: torch.Tensor, changed: tuple[slice, ...] | None, head: Head | None = None) -> None:
        self._worker_group.outer.copy_(theta)

    def has_run_dry(self, round: int) -> bool:
        return False

    async def gather(self, members: Sequence[str]) -> None:
        await trio.sleep_forever()

    async def _validate_if_due(self) -> None:
        if trio.current_time() >= self._validates_from:
            await self.validate()

    def _note_round(
        self, request: TrainRequest, result: InnerResult, loss: float, ahead: InnerResult = NOTHING
    ) -> None:
        """Tell what was trained in a round, of it `ahead` before it began. Raises Diverged."""
        number, steps, skipped = request.round_info.round, ahead.steps + result.steps, ahead.skipped + result.skipped
        self._events.emit(
            "round_trained",
            round=number,
            steps_ahead=ahead.steps,
            steps=steps,
            skipped=skipped,
            loss=finite_loss(loss),
            idle_s=round(ahead.idle_s + result.idle_s, 4),
            busy_s=round(ahead.seconds + result.seconds, 4),
        )
        self.trained.note(number, steps, skipped, loss)

    def _delta(self, places: tuple[slice, ...]) -> torch.Tensor:
        return self._worker_group.delta[: sum(place.stop - place.start for place in places)]

    def _note_speed(self, result: InnerResult) -> None:
        """Note the speed that this peer reports to others."""
        if result.steps and result.seconds > 0:
            speed = result.steps / result.seconds
            self.speed = SPEED_MEMORY * self.speed + (1 - SPEED_MEMORY) * speed if self.speed else speed


def spans_of(places: tuple[slice, ...]) -> tuple[ElementRange, ...]:
    return tuple((int(place.start), int(place.stop)) for place in places)
