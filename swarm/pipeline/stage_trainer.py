"""The trainer of a pipeline's stage: what rounds ask of a replica that works on whatever micro-batches come by.

    commit of epoch e --adopt--> worker's weights, what may count --> station takes calls of epoch e
    plan --train--> micro-batches (stage 0 issues its own) --> what the mode says is enough --> captured in a product

The worker's weights are changed by one task (`run`), never by a round that may be cancelled. What a product is made of
is what the worker says, not what we have heard of so far. This file is what the two modes have in common:
`swarm.pipeline.local_steps` and `swarm.pipeline.synchronous`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final

import torch
import trio

from peer.errors import BarnraiseError, StageRefused, WorkerError
from peer.events import EventLog
from peer.worker.stage_client import StageWorkerGroup
from swarm.pipeline.source import MicroBatchSource
from swarm.pipeline.stage_server import StageServer
from swarm.protocol.head import Head
from swarm.protocol.ledger import Range, count, union, without
from swarm.protocol.round_schedule import RoundSchedule
from swarm.rounds.round_state import Notifier
from swarm.rounds.trainer import TrainRequest, TrainResult

SPEED_MEMORY: Final = 0.7  # of the smoothed speed
WATCH_S: Final = 0.5  # how often a lost worker is looked for, where nobody works with it
VALIDATION_SHARE: Final = 0.03  # of the time, at most
EVALUATE_S: Final = 120.0  # a batch of it: where a stage has lost its replicas nothing can be trained meanwhile, either
LAST_EVALUATE_S: Final = 10.0  # the same after the last round, when replicas leave for good
LATE: Final = 8.0  # or so many times what a micro-batch usually takes, if that is longer


@dataclass(frozen=True)
class HeldOut:
    """What stage 0 measures the held-out loss on: `batches()`, each (B, T + 1) int64; `bytes_per_token` of the text."""

    batches: Callable[[], Awaitable[Sequence[torch.Tensor]]]
    bytes_per_token: float


@dataclass(frozen=True)
class Adoption:
    """The outer weights of `head`. `replaced`: whatever was learned from others is void; `same`: they are the ones that
    we have; `orphaned`: they are, and of the members that had committed them nobody is left."""

    theta: torch.Tensor
    head: Head
    replaced: bool
    same: bool
    orphaned: bool


@dataclass(frozen=True)
class StageTrainerContext:
    """Where a stage is trained: its worker, its station, the run's pace; `source` on stage 0, and what is `held_out`
    there. `first_round()`: the round that the replicas of stage 0 say they have committed, None if nobody says; it
    tells the others that a round is over where no micro-batch will, at the end of the run, which has so many `rounds`
    (0: it never ends)."""

    worker_group: StageWorkerGroup
    server: StageServer
    schedule: RoundSchedule
    events: EventLog
    source: MicroBatchSource | None = None
    held_out: HeldOut | None = None
    first_round: Callable[[], int | None] = lambda: None
    rounds: int = 0


class StageTrainer(ABC):
    """Implements `swarm.rounds.trainer.Trainer`; `run` must be running. Its station must be open while a round
    trains."""

    def __init__(self, context: StageTrainerContext) -> None:
        self.speed = 0.0
        self.loss: float | None = None
        self.val_loss: float | None = None
        self.validate_round: int | None = None
        self.head: Head | None = None
        self._context = context
        self._worker_group, self._server, self._events = context.worker_group, context.server, context.events
        self._counting = context.server.counting
        self._adoption: Adoption | None = None
        self._generation = -1  # of the worker that has the weights of `head`
        self._lock = trio.Lock()  # one change of the worker's weights at a time
        self._changed = Notifier()
        self._cut_short = False
        self._worked_on: int | None = None  # round of the head after which something was issued last
        self._validates_from = -math.inf
        self._server.on_counted = self._note_counted
        self._server.on_later = lambda epoch: self._changed.notify()
        self._server.on_lost = self._note_lost

    # -- what rounds ask ---------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Keep the worker at what was adopted, through commits and losses; for ever."""
        async with self._dispatching():
            while True:
                await self._changed.until(self._is_due, WATCH_S)
                try:
                    async with self._lock:
                        await self._catch_up()
                except (WorkerError, StageRefused) as error:
                    self._events.emit("worker_failed", reason=str(error))
                    await trio.sleep(WATCH_S)

    async def train(self, request: TrainRequest) -> TrainResult:
        self._cut_short = request.cut_short  # a call to wrap up may have come when the round before had been handed in
        await self._changed.until(lambda: self._is_ready(request), math.inf)
        if request.assignment.reset or not self._may_go_on(request):
            async with self._alone():
                await self._begin_anew()
        return await self._train(request)

    def finish_early(self) -> None:
        self._cut_short = True
        self._changed.notify()

    def adopt(self, theta: torch.Tensor, changed: tuple[slice, ...] | None, head: Head) -> None:
        earlier = self._adoption
        replaced = changed is None or (earlier is not None and earlier.replaced)
        same = not replaced and changed == () and earlier is None and self.head is not None
        orphaned = _is_orphaned(head, self.head if earlier is None else earlier.head)
        if earlier is not None and earlier.head.round == head.round:
            orphaned |= earlier.orphaned
        orphaned &= self._context.schedule.synchronous
        # A copy: the round after the next writes to `theta`.
        self._adoption = Adoption(theta.clone(), head, replaced, same, orphaned)
        self._changed.notify()

    def has_run_dry(self, round: int) -> bool:
        return False

    async def gather(self, members: Sequence[str]) -> Mapping[str, Sequence[Range]] | None:
        await trio.sleep_forever()

    async def validate(self) -> None:
        """Stage 0: the held-out loss, by all stages' present weights, if it is asked for. Given up where it takes much
        longer than it should: the other stages may have left."""
        await self._validate(max(LAST_EVALUATE_S, LATE * self._server.answer_s))

    async def _validate(self, timeout_s: float) -> None:
        number, self.validate_round = self.validate_round, None
        held_out = self._context.held_out
        if number is None or held_out is None or self._context.source is None:
            return
        began = trio.current_time()
        losses: list[float] = []
        try:
            for batch in await held_out.batches():
                losses.append(await self._server.evaluate(batch, timeout_s))
        except BarnraiseError as error:
            self._events.emit("evaluation_failed", round=number, reason=str(error))
            return
        ended = trio.current_time()
        self._validates_from = ended + (ended - began) / VALIDATION_SHARE
        self.val_loss = math.fsum(losses) / len(losses) / held_out.bytes_per_token
        self._events.emit("val_evaluated", round=number, loss=self.val_loss)

    # -- what the modes differ in ------------------------------------------------------------------------------------

    @abstractmethod
    async def _train(self, request: TrainRequest) -> TrainResult:
        """Until the mode says that it is enough, or `self._cut_short`."""

    @abstractmethod
    def _may_go_on(self, request: TrainRequest) -> bool:
        """Whether what was counted since the last commit may be part of the order's contribution."""

    @abstractmethod
    def _note_counted(self, span: Range, tokens: int, loss: float) -> None:
        """The station has counted a micro-batch; `loss` in nats, summed over its tokens."""

    @abstractmethod
    def _note_lost(self) -> None:
        """The worker was lost, and the station has forgotten what it had counted."""

    @abstractmethod
    def _clear(self) -> None:
        """Forget what was counted, captured or not: it was thrown away."""

    @abstractmethod
    def _keeps(self, adoption: Adoption) -> bool:
        """Whether what was learned since the capture stays, on top of the new weights."""

    @abstractmethod
    def _settle(self) -> None:
        """A commit has made something of what was captured."""

    async def _load(self, head: Head) -> None:
        """Bring the weights in `outer`, those of `head`, to a worker that has none of its group's yet. WorkerError,
        StageRefused."""
        await self._worker_group.import_weights(head.round)

    def _may_step(self) -> bool:
        """Whether the worker is to make an inner step."""
        return False

    async def _step(self) -> None:
        """An inner step. WorkerError, StageRefused."""
        raise AssertionError("weights change at commits only")

    # -- the worker's weights ----------------------------------------------------------------------------------------

    def _is_due(self) -> bool:
        return self._adoption is not None or self._is_lost() or self._may_step()

    def _is_lost(self) -> bool:
        return self.head is not None and self._generation != self._worker_group.generation

    def _is_ready(self, request: TrainRequest) -> bool:
        here = self.head is not None and self.head.round + 1 == request.round_info.round
        return here and self._adoption is None and not self._is_lost()

    async def _catch_up(self) -> None:
        """What is due, whichever it is. WorkerError, StageRefused."""
        if self._adoption is not None:
            await self._take_over(self._adoption)
        elif self._is_lost():
            await self._recover()
        elif self._may_step():
            await self._step()
        self._changed.notify()

    async def _take_over(self, adoption: Adoption) -> None:
        head = adoption.head
        if head.round < 0:  # no state yet: it is about to be fetched
            self._adoption = None if self._adoption is adoption else self._adoption
            return
        elsewhere = self.head is not None and head.round != self.head.round  # the authority may set a stage's round
        if elsewhere or adoption.orphaned or not adoption.same:
            await self._import(adoption)
        self.head = head
        if self._adoption is adoption:
            self._adoption = None

    async def _import(self, adoption: Adoption) -> None:
        head, generation = adoption.head, self._worker_group.generation
        keeps = self._keeps(adoption) and generation == self._generation
        if not keeps:
            await self._throw_away(head)
        await trio.to_thread.run_sync(self._worker_group.outer.copy_, adoption.theta)
        conflicts = self._server.moved(head)
        self.head = head
        if adoption.orphaned or generation != self._generation:
            await self._load(head)
        else:
            await self._worker_group.import_weights(head.round, rebase=keeps)
        self._generation = generation
        self._settle()
        if conflicts:
            self._say_lost("counted elsewhere too", conflicts)
            await self._begin_anew()

    async def _recover(self) -> None:
        """A new worker takes up the weights of the head."""
        assert self.head is not None
        generation = self._worker_group.generation
        self._server.moved(self.head)
        self._note_lost()
        await self._load(self.head)
        self._generation = generation

    async def _begin_anew(self) -> None:
        """Back to the weights of the head: what was counted since counts no more."""
        if self.head is None or self._is_lost():
            return  # it is about to be
        await self._throw_away(self.head)
        await self._worker_group.import_weights(self.head.round)

    async def _throw_away(self, head: Head) -> None:
        """All gradients, wherever they are. Lost is what has not been merged on the way to `head`."""
        async with self._server.nothing_counts():
            if self._generation == self._worker_group.generation:
                await self._worker_group.take_gradient()
            counted = self._counting.forget()
        lost = without(counted, without(counted, head.ledger.free))
        if lost:
            self._say_lost("thrown away", lost)
        self._clear()

    def _say_lost(self, reason: str, ranges: Iterable[Range]) -> None:
        self._events.emit("pipeline_lost", samples=count(ranges), reason=reason)

    # -- for the modes -----------------------------------------------------------------------------------------------

    def _ranges(self, ids: Iterable[str]) -> tuple[Range, ...]:
        """The samples of micro-batches by the worker's names for them."""
        size = self._counting.micro_batch
        return union((first, first + size) for first in map(int, ids))

    async def _dispatch(self, request: TrainRequest) -> None:
        """Stage 0: take all that the order assigns through the pipeline, but for what is counted already; begin no more
        when it is over."""
        source, head = self._context.source, self.head
        assert source is not None and head is not None
        left = without(request.assignment.ranges, self._counting.counted)
        # A regrouped head is of the same round, and who has just come does not know what others have issued in it.
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

    @asynccontextmanager
    async def _alone(self) -> AsyncIterator[None]:
        """Nobody else changes the worker's weights meanwhile, and what is begun ends, also where a round is given up:
        we would not know what is in them."""
        async with self._lock:
            with trio.CancelScope(shield=True):
                yield

    def _note_speed(self, steps: int, seconds: float) -> None:
        if steps and seconds > 0:
            speed = steps / seconds
            self.speed = SPEED_MEMORY * self.speed + (1 - SPEED_MEMORY) * speed if self.speed else speed

    async def _validate_if_due(self) -> None:
        if trio.current_time() >= self._validates_from:
            await self._validate(EVALUATE_S)

    @asynccontextmanager
    async def _dispatching(self) -> AsyncIterator[None]:
        if self._context.source is None:
            yield
            return
        async with self._context.source.open():
            yield


def _is_orphaned(head: Head, before: Head | None) -> bool:
    """Whether the authority has begun `head` on the state of the head `before` with none of its members: they have all
    been restarted, or are gone for good."""
    if before is None or head.term <= before.term or head.state_hash != before.state_hash:
        return False
    return bool(before.members) and not set(before.members).intersection(head.members)
