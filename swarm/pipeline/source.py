"""The source of micro-batches at a stage-0 replica.

Each micro-batch begins here and ends when its gradient has come back. The number in flight is just enough to keep the
slowest stage busy (`swarm.pipeline.window`): more would wait in queues.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Final

import trio
from torch import Tensor

from peer.catalogue.stages import PipelineProgress, PipelineRefused
from peer.errors import DeadlineExceeded, StageRefused, WorkerError
from swarm.pipeline.accounting import micro_batches_of
from swarm.pipeline.messages import SAMPLE_RANGES_MAX, Cause
from swarm.pipeline.micro_batch import MicroBatchResult, MicroBatchTask
from swarm.pipeline.stage_server import StageServer
from swarm.pipeline.window import Window
from swarm.protocol.ledger import Range, union

WINDOW_MIN: Final = 3
PAUSE_S: Final = 0.25  # before another try, where our own worker or epoch was in the way
REFUSALS_MAX: Final = 4  # of one micro-batch's input: a retry does not help then
PROGRESS_S: Final = 1.0
REFUSED_S: Final = 10.0  # between two events: a refused micro-batch is dispatched again and again


@dataclass
class SourceTotals:
    """Micro-batches since the source was made."""

    dispatched: int = 0
    completed: int = 0
    retried: int = 0
    """Calls repeated, on any hop."""
    abandoned: int = 0
    """Given up with their round, or after repeated refusals."""
    not_finite: int = 0
    """Of these: refused for NaN or infinity."""


class MicroBatchSource:
    """Dispatches micro-batches through the stage-0 `server`; `tokens` reads their text, (n, T + 1) int64.

    `on_result(samples, result)` is called for each micro-batch that ended. Event `pipeline_refused`: the samples
    `first` to `last`, half-open, were given up because every replica refuses them.
    """

    def __init__(
        self,
        server: StageServer,
        tokens: Callable[[Sequence[Range]], Awaitable[Tensor]],
        on_result: Callable[[Range, MicroBatchResult], None] = lambda samples, result: None,
    ) -> None:
        self.totals: Final = SourceTotals()
        self._server, self._settings, self._runner = server, server.settings, server.runner
        self._tokens, self._events, self._on_result = tokens, server.host.events, on_result
        self._size = Window(WINDOW_MIN, server.settings.window_max)
        self._in_flight = trio.CapacityLimiter(WINDOW_MIN)
        # Apart: a micro-batch that blocks a later stage must not wait for those that wait for that stage.
        self._again_in_flight = trio.CapacityLimiter(WINDOW_MIN)
        self._nursery: trio.Nursery | None = None
        self._under_way: set[int] = set()  # first samples
        self._planned: Counter[int] = Counter()  # first samples, of the calls of `dispatch` that have not ended
        self._told_at = self._refused_told_at = -math.inf

    @property
    def window(self) -> int:
        """How many micro-batches are to be in flight."""
        return self._size.size

    @property
    def dispatching(self) -> tuple[Range, ...]:
        """The samples that are in flight from here or planned."""
        size = self._settings.micro_batch
        return union((first, first + size) for first in {*self._planned, *self._under_way})

    @asynccontextmanager
    async def open(self) -> AsyncIterator[None]:
        """Carry out redispatches inside the block."""
        try:
            async with trio.open_nursery() as nursery:
                self._nursery = nursery
                try:
                    yield
                finally:
                    self._nursery = None
                    nursery.cancel_scope.cancel()
        finally:
            self._tell(now=True)

    async def dispatch(
        self, ranges: Iterable[Range], again: bool = False, go_on: Callable[[], bool] = lambda: True
    ) -> None:
        """Dispatch all micro-batches of `ranges`, and return when all have ended. If cancelled, give up those in
        flight. `again`: they may have been counted before. None is begun once `go_on()` is false."""
        micro_batches = micro_batches_of(ranges, self._settings.micro_batch)
        firsts = [first for first, _ in micro_batches]
        self._planned.update(firsts)
        try:
            async with trio.open_nursery() as nursery:
                for samples in micro_batches:
                    slot = object()
                    await self._in_flight.acquire_on_behalf_of(slot)
                    if not go_on():
                        self._in_flight.release_on_behalf_of(slot)
                        break
                    nursery.start_soon(self._dispatch, samples, again, self._in_flight, slot)
        finally:
            self._planned -= Counter(firsts)
            self._tell(now=True)  # also about those given up: there may be no later dispatch

    def redispatch(self, ranges: Iterable[Range], epoch: int | None = None) -> int:
        """Dispatch these again, beside all others, for `epoch` (see `dispatch_one`). Those in flight from here, and
        those above a limit, are left out: the asking peer will ask again. Return how many are dispatched."""
        begun = 0
        for samples in micro_batches_of(ranges, self._settings.micro_batch):
            first = samples[0]
            if len(self._under_way) >= SAMPLE_RANGES_MAX:
                break
            if self._nursery is not None and first not in self._under_way and first not in self._planned:
                self._under_way.add(first)
                self._nursery.start_soon(self._redispatch, samples, epoch)
                begun += 1
        return begun

    async def dispatch_one(
        self, samples: Range, tokens: Tensor, again: bool = False, epoch: int | None = None
    ) -> MicroBatchResult:
        """Take `tokens` (micro_batch, seq_len + 1) int64 through all stages, with retries, until there is a gradient or
        no point in continuing. The cause is then "stale" (the round is over) or that of repeated refusals. If
        cancelled, it is given up at all stages. `epoch`: the one to dispatch for, where a later stage of a synchronous
        run is behind."""
        runner, accounting = self._runner, self._runner.accounting
        retried, refusals, reason = 0, 0, ""
        once_more = False
        if epoch is None and accounting.synchronous:
            epoch = accounting.epoch

        async def is_ours() -> bool:
            return not await self._server.is_counted_elsewhere(samples)

        while True:
            task = self._task(samples, tokens, again, epoch)
            verdict = accounting.verdict(samples, task.epoch)
            if verdict == "stale":
                return MicroBatchResult("refused", "stale", reason, retried=retried)
            retried += once_more
            task.counts = verdict == "count"
            cause: Cause = "not_finite"
            try:
                with runner.under_way(task):  # another replica's question may cross ours
                    if again and task.counts:
                        task.counts = await is_ours()
                    if task.counts:
                        task.check.confirm = is_ours  # else later stages want it of us, whichever replica counted it
                    result = await runner.run(task)
                retried += result.retried
                if result.done:
                    return replace(result, retried=retried)
                cause, reason = result.cause, result.reason
                refusals += cause != "stale"
            except WorkerError:
                cause = "worker"  # a new one is starting
            except StageRefused as refused:
                reason = str(refused)
                refusals += refused.reason in ("not_finite", "value", "shape", "dtype")
            again = once_more = True  # later stages may have counted it
            if refusals >= REFUSALS_MAX:
                return MicroBatchResult("refused", cause, reason, retried=retried)
            await trio.sleep(PAUSE_S)

    async def evaluate(self, tokens: Tensor, timeout_s: float) -> tuple[float, int]:
        """Return the loss in nats, by the present weights of all stages, summed over those of `tokens` (B, T + 1) int64
        that count in it, and the number of these. Raises StageRefused, WorkerError, and DeadlineExceeded after
        `timeout_s`."""
        task = self._task((0, len(tokens)), tokens, again=False, epoch=None)
        task.until = trio.current_time() + timeout_s
        result = await self._runner.evaluate(task)
        if not result.done:
            raise DeadlineExceeded(f"the evaluation did not come through: {result.reason}")
        return result.loss, task.targets

    def _task(self, samples: Range, tokens: Tensor, again: bool, epoch: int | None) -> MicroBatchTask:
        epoch = self._runner.accounting.epoch if epoch is None else epoch
        return MicroBatchTask(samples=samples, epoch=epoch, tokens=tokens, again=again)

    async def _redispatch(self, samples: Range, epoch: int | None) -> None:
        slot = object()
        try:
            await self._again_in_flight.acquire_on_behalf_of(slot)
        except trio.Cancelled:
            self._under_way.discard(samples[0])
            raise
        await self._dispatch(samples, True, self._again_in_flight, slot, epoch)

    async def _dispatch(
        self, samples: Range, again: bool, limiter: trio.CapacityLimiter, slot: object, epoch: int | None = None
    ) -> None:
        totals = self.totals
        ended = False
        totals.dispatched += 1
        self._under_way.add(samples[0])
        try:
            tokens = await self._tokens((samples,))
            mark = self._size.begun(trio.current_time())
            result = await self.dispatch_one(samples, tokens, again, epoch)
            if result.done and not again:
                now = trio.current_time()
                unqueued_s = None if result.retried else max(0.0, now - mark.at_s - result.waited_s)
                self._size.answered(mark, now, unqueued_s)
            totals.completed += result.done
            totals.retried += result.retried
            ended = result.done
            totals.not_finite += result.cause == "not_finite" and not result.done
            if result.cause in ("not_finite", "value", "shape"):
                self._tell_refused(samples, result)
            self._on_result(samples, result)
        finally:
            totals.abandoned += not ended
            self._under_way.discard(samples[0])
            limiter.release_on_behalf_of(slot)
            self._in_flight.total_tokens = self.window
            self._tell()

    def _tell_refused(self, samples: Range, result: MicroBatchResult) -> None:
        at = trio.current_time()
        if at - self._refused_told_at < REFUSED_S:
            return
        self._refused_told_at = at
        first, last = samples
        self._events.emit(
            PipelineRefused(
                first=first, last=last, cause=result.cause, reason=result.reason, synchronous=self._settings.synchronous
            )
        )

    def _tell(self, now: bool = False) -> None:
        at = trio.current_time()
        if now or at - self._told_at >= PROGRESS_S:
            self._told_at = at
            totals = self.totals
            self._events.emit(
                PipelineProgress(
                    dispatched=totals.dispatched,
                    completed=totals.completed,
                    retried=totals.retried,
                    abandoned=totals.abandoned,
                )
            )
