"""A stage-0 replica issues the micro-batches it was given, so many at a time as keep the narrowest place on their way
busy (`swarm.pipeline.window`): more would only lie in queues.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final

import trio

from peer.events import EventLog
from swarm.pipeline.accounting import spans_of
from swarm.pipeline.data_feed import TokenSource
from swarm.pipeline.messages import SPANS_MAX
from swarm.pipeline.stage_server import DispatchResult, StageServer
from swarm.pipeline.window import Window
from swarm.protocol.ledger import Range, union

WINDOW_MIN: Final = 3
PROGRESS_S: Final = 1.0
REFUSED_S: Final = 10.0  # what is refused is issued again and again: it is told so often


@dataclass
class SourceTotals:
    """Micro-batches since the issuer began. `retried`: calls made once more, on any hop; `abandoned`: given
    up, with their round or as they were refused again and again."""

    dispatched: int = 0
    completed: int = 0
    retried: int = 0
    abandoned: int = 0


class MicroBatchSource:
    """Issues through `server`; `tokens` says what is in a micro-batch. `on_result` is told of each that ended. Event
    `pipeline_refused`: the samples `first` to `last`, half-open, were given up as every replica refuses them."""

    def __init__(self, server: StageServer, tokens: TokenSource, events: EventLog) -> None:
        self.server: Final = server
        self.totals: Final = SourceTotals()
        self.on_result: Callable[[DispatchResult], None] = lambda result: None
        self._tokens, self._events = tokens, events
        self._size = Window(WINDOW_MIN, server.rules.window_max)
        self._window = trio.CapacityLimiter(WINDOW_MIN)
        self._window_again = trio.CapacityLimiter(WINDOW_MIN)  # what holds up a later stage must not wait for it
        self._nursery: trio.Nursery | None = None
        self._under_way: set[int] = set()
        self._planned: Counter[int] = Counter()  # of calls of `dispatch` that have not ended
        self._told_at = self._refused_told_at = -math.inf

    @property
    def window(self) -> int:
        """How many micro-batches are to be under way."""
        return self._size.size

    @property
    def dispatching(self) -> tuple[Range, ...]:
        """What is under way from here, or is to be."""
        size = self.server.rules.micro_batch
        return union((first, first + size) for first in {*self._planned, *self._under_way})

    @asynccontextmanager
    async def open(self) -> AsyncIterator[None]:
        """Inside the block the issuer issues again what it is asked to."""
        try:
            async with trio.open_nursery() as nursery:
                self._nursery = nursery
                self.server.on_redispatch, self.server.dispatching = self.redispatch, lambda: self.dispatching
                try:
                    yield
                finally:
                    self.server.on_redispatch, self.server.dispatching = lambda spans, epoch: None, lambda: ()
                    self._nursery = None
                    nursery.cancel_scope.cancel()
        finally:
            self._tell(now=True)

    async def dispatch(
        self, ranges: Iterable[Range], again: bool = False, go_on: Callable[[], bool] = lambda: True
    ) -> None:
        """Issue all micro-batches of `ranges`, and return when all have ended. Cancelled, those under way are given up.
        `again`: they may have been counted before. No more are begun when `go_on()` is false."""
        spans = spans_of(ranges, self.server.rules.micro_batch)
        firsts = [first for first, _ in spans]
        self._planned.update(firsts)
        try:
            async with trio.open_nursery() as nursery:
                for span in spans:
                    token = object()
                    await self._window.acquire_on_behalf_of(token)
                    if not go_on():
                        self._window.release_on_behalf_of(token)
                        break
                    nursery.start_soon(self._dispatch, span, again, self._window, token)
        finally:
            self._planned -= Counter(firsts)
            self._tell(now=True)  # also of those given up: nobody may issue again

    def redispatch(self, spans: Iterable[Range], epoch: int | None = None) -> None:
        """Issue these once more, beside all else, for `epoch` (see `Origin.dispatch`); those under way from here are
        left to it."""
        for span in spans_of(spans, self.server.rules.micro_batch):
            if len(self._under_way) >= SPANS_MAX:
                return  # whoever misses them will ask again
            if self._nursery is not None and span[0] not in self._under_way and span[0] not in self._planned:
                self._under_way.add(span[0])
                self._nursery.start_soon(self._redispatch, span, epoch)

    async def _redispatch(self, span: Range, epoch: int | None) -> None:
        token = object()
        try:
            await self._window_again.acquire_on_behalf_of(token)
        except trio.Cancelled:
            self._under_way.discard(span[0])
            raise
        await self._dispatch(span, True, self._window_again, token, epoch)

    async def _dispatch(
        self, span: Range, again: bool, window: trio.CapacityLimiter, token: object, epoch: int | None = None
    ) -> None:
        totals = self.totals
        ended = False
        totals.dispatched += 1
        self._under_way.add(span[0])
        try:
            tokens = await self._tokens((span,))
            mark = self._size.begun(trio.current_time())
            result = await self.server.dispatch(span, tokens, again, epoch)
            if result.done and not again:
                self._size.answered(mark, trio.current_time(), None if result.retried else result.unqueued_s)
            totals.completed += result.done
            totals.retried += result.retried
            ended = result.done
            if result.cause in ("not_finite", "value", "shape"):
                self._tell_refused(result)
            self.on_result(result)
        finally:
            totals.abandoned += not ended
            self._under_way.discard(span[0])
            window.release_on_behalf_of(token)
            self._window.total_tokens = self.window
            self._tell()

    def _tell_refused(self, result: DispatchResult) -> None:
        at = trio.current_time()
        if at - self._refused_told_at < REFUSED_S:
            return
        self._refused_told_at = at
        first, last = result.span
        self._events.emit(
            "pipeline_refused",
            first=first,
            last=last,
            cause=result.cause,
            reason=result.reason,
            synchronous=self.server.rules.synchronous,
        )

    def _tell(self, now: bool = False) -> None:
        at = trio.current_time()
        if now or at - self._told_at >= PROGRESS_S:
            self._told_at = at
            totals = self.totals
            self._events.emit(
                "pipeline_progress",
                dispatched=totals.dispatched,
                completed=totals.completed,
                retried=totals.retried,
                abandoned=totals.abandoned,
            )
