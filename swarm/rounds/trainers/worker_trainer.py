"""The trainer of a peer with the whole model: inner steps in its compute worker (`peer.worker.client`)."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final

import torch
import trio

from optim.strategies.interface import Product
from peer.bounds import finite_loss
from peer.catalogue.machine import WorkerFailed
from peer.catalogue.rounds import RoundTrained, ValEvaluated
from peer.errors import BarnraiseError, ProtocolViolation, WorkerError
from peer.events import EventLog
from peer.ipc.inner_options import ElementRange, InnerRunOptions
from peer.ipc.train_messages import InnerResult
from peer.notifier import Notifier
from peer.worker.client import WorkerGroup
from swarm.protocol.head import Head
from swarm.protocol.ledger import Range
from swarm.protocol.samples import OwnSamples, SampleSupply
from swarm.rounds.trainers.trained_rounds import TrainedRounds, smoothed_speed
from swarm.rounds.trainers.trainer import Point, TrainRequest, TrainResult

VALIDATION_BATCHES: Final = 8
VALIDATION_SHARE: Final = 0.03  # of the time, at most: the other members' exchange waits for a peer that measures
PAUSE_S: Final = 1.2  # for the end of a step, before a paused worker is killed: its owner comes first
REST_S: Final = 1.0  # of a paused peer that is planned for, before it says that it has no work; it grows to
REST_MAX_S: Final = 4.0  # where no other member works, and the round is planned again and again
DOUBLINGS_MAX: Final = 10
RETRY_S: Final = 1.0  # between two looks at a worker that does not start
NOTHING: Final = InnerResult(steps=0, sequences=0, tokens=0, loss=math.nan, seconds=0.0, skipped=0)


@dataclass(eq=False)
class _Points:
    """Weights whose losses are asked for."""

    points: Sequence[Point]
    losses: list[list[float]] = field(default_factory=list)
    failed: BarnraiseError | None = None
    done: trio.Event = field(default_factory=trio.Event)


class WorkerTrainer:
    """A `swarm.rounds.trainers.trainer.Trainer` that trains in a compute worker. `product` is what the method needs.

    Event `round_trained` reports how long the worker made steps (`busy_s`) and how long it was idle (`idle_s`) since
    the last capture. Event `val_evaluated` reports a held-out loss, null where it is not finite."""

    def __init__(
        self, worker_group: WorkerGroup, product: Product, events: EventLog, samples: SampleSupply | None = None
    ) -> None:
        """`samples`: what brings them to this machine; None where all are here."""
        self.speed = 0.0
        self.validate_round: int | None = None
        """If set, the held-out loss of the present outer weights is measured before inner steps, not too often."""
        self.val_loss: float | None = None
        self.val_round = -1
        self.paused = False
        """Whether this machine's owner has paused the peer's work."""
        self.trained = TrainedRounds(events)
        self._worker_group = worker_group
        self._product: Product = product
        self._events = events
        self._samples = OwnSamples() if samples is None else samples
        self._validates_from = -math.inf
        self._points: deque[_Points] = deque()
        self._cut_short = False  # whether the present round must end early
        self._is_awaited = False  # whether the samples that are here must do
        self._commands = 0  # at the worker, or on their way to it
        self._command_ended = Notifier()
        self._rested = (-1, 0)  # the last round in which this peer was paused, and how often it was planned for in it

    async def run(self) -> None:
        """Do the work beside `train`: none."""

    async def pause(self) -> None:
        """Stop between two inner steps, and end the worker: then its device is free. The steps trained in this round
        make a smaller contribution. A step that takes longer than `PAUSE_S` is lost, with this round's other steps."""
        self.paused = True
        with trio.move_on_after(PAUSE_S):
            while self._commands:
                self._stop_steps()
                await self._command_ended.wait()
        await self._worker_group.suspend()

    async def resume(self) -> None:
        """Start the worker again, and wait for it: no other peer counts on this one before."""
        while True:
            try:
                await self._worker_group.resume()
            except WorkerError:  # an event has told of it, and it is tried again
                await trio.sleep(RETRY_S)
            else:
                break
        self.paused = False

    async def train(self, request: TrainRequest) -> TrainResult:
        self._cut_short = request.cut_short
        self._expect(request)
        await self._validate_if_due()
        await self._measure_points()
        if self.paused:
            return await self._rest(request)
        options = InnerRunOptions(product=self._product, capture=spans_of(request.places))
        result = await self._inner(
            request.assignment.ranges,
            request.round_info.step,
            request.deadline_s,
            0 if self._cut_short else request.assignment.steps,
            options,
        )
        self._note_round(request, result, result.loss)
        product = self._delta(request.places)
        return TrainResult(
            result.steps,
            result.sequences,
            result.loss,
            product,
            skipped=result.skipped,
            overflows=result.overflows,
        )

    async def validate(self) -> None:
        """Measure the held-out loss if it is asked for. A worker failure costs only the number."""
        round_number = self.validate_round
        if round_number is None or self.paused or not self._samples.has_held_out:
            return
        began = trio.current_time()
        try:
            with self._at_work():
                self.val_loss = await self._worker_group.evaluate(VALIDATION_BATCHES)
        except WorkerError as error:
            self._events.emit(WorkerFailed(round=round_number, reason=str(error)))
        else:
            ended, self.val_round = trio.current_time(), round_number
            self._validates_from = ended + (ended - began) / VALIDATION_SHARE
            self._events.emit(ValEvaluated(round=round_number, loss=finite_loss(self.val_loss)))
        if self.validate_round == round_number:  # not sooner: after a cancellation it must still be measured
            self.validate_round = None

    async def losses_of(self, points: Sequence[Point]) -> list[list[float]]:
        """Return the held-out losses of each point, batch by batch: measured before the inner steps of the next round
        that is not cut short. Raises WorkerError."""
        asked = _Points(points)
        self._points.append(asked)
        try:
            await asked.done.wait()
        finally:
            self._points = deque(one for one in self._points if one is not asked)
        if asked.failed is not None:
            raise asked.failed
        return asked.losses

    async def _measure_points(self) -> None:
        """Make the requested measurement; one that a pause or the end of the round interrupts continues in a later
        round. The vector of the product is free until the inner steps."""
        if not self._points or not self._samples.has_held_out:
            return
        asked = self._points[0]
        try:
            for write in asked.points[len(asked.losses) :]:
                if self._cut_short or self.paused:
                    return
                with self._at_work():
                    await trio.to_thread.run_sync(write, self._worker_group.delta)
                    asked.losses.append(await self._worker_group.evaluate_delta(VALIDATION_BATCHES))
        except (WorkerError, ProtocolViolation) as error:
            asked.failed = error
        asked.done.set()

    def finish_early(self) -> None:
        self._cut_short = True  # `train` may still be measuring, with no step to stop
        self._worker_group.stop_inner()

    def adopt(self, theta: torch.Tensor, changed: tuple[slice, ...] | None, head: Head | None = None) -> None:
        self._worker_group.outer.copy_(theta)

    def is_exhausted(self, round: int) -> bool:
        return False

    async def gather(self, members: Sequence[str]) -> None:
        await trio.sleep_forever()

    async def _inner(
        self, ranges: Sequence[Range], first_step: int, deadline_s: float, steps: int | None, options: InnerRunOptions
    ) -> InnerResult:
        began, self._is_awaited = trio.current_time(), False
        async with self._samples.holding(ranges, deadline_s, self._must_begin) as here:
            left_s = deadline_s - (trio.current_time() - began)
            with self._at_work():
                result = await self._worker_group.inner_steps(list(here), first_step, left_s, steps, options=options)
        self.speed = smoothed_speed(self.speed, result.steps, result.seconds)
        return result

    def _must_begin(self) -> bool:
        """Whether to train on the samples that are here, and wait for no other."""
        return self._cut_short or self._is_awaited or self.paused

    def _expect(self, request: TrainRequest) -> None:
        self._samples.expect((*request.assignment.ranges, *request.assignment.ahead))

    @contextmanager
    def _at_work(self) -> Iterator[None]:
        self._commands += 1
        try:
            yield
        finally:
            self._commands -= 1
            self._command_ended.notify()

    def _stop_steps(self) -> None:
        """Let all steps under way end."""
        self.finish_early()

    async def _rest(self, request: TrainRequest) -> TrainResult:
        """Do no work of a plan that counts on this peer: it has no other member, or is from before the pause."""
        number = request.round_info.round
        times = self._rested[1] + 1 if self._rested[0] == number else 0
        self._rested = (number, times)
        if not self._cut_short:
            await trio.sleep(min(REST_MAX_S, REST_S * 2.0 ** min(times, DOUBLINGS_MAX)))
        return TrainResult(0, 0, math.nan, self._delta(request.places))

    async def _validate_if_due(self) -> None:
        if trio.current_time() >= self._validates_from:
            await self.validate()

    def _note_round(
        self, request: TrainRequest, result: InnerResult, loss: float, ahead: InnerResult = NOTHING
    ) -> None:
        """Tell what was trained in a round, of it `ahead` before it began. Raises Diverged."""
        number, steps, skipped = request.round_info.round, ahead.steps + result.steps, ahead.skipped + result.skipped
        overflows = ahead.overflows + result.overflows
        self._events.emit(
            RoundTrained(
                round=number,
                steps_ahead=ahead.steps,
                steps=steps,
                skipped=skipped,
                overflows=overflows,
                loss=finite_loss(loss),
                idle_s=round(ahead.idle_s + result.idle_s, 4),
                busy_s=round(ahead.seconds + result.seconds, 4),
            )
        )
        self.trained.note(number, steps, skipped, loss, overflows)

    def _delta(self, places: tuple[slice, ...]) -> torch.Tensor:
        return self._worker_group.delta[: sum(place.stop - place.start for place in places)]


def spans_of(places: tuple[slice, ...]) -> tuple[ElementRange, ...]:
    return tuple((int(place.start), int(place.stop)) for place in places)
