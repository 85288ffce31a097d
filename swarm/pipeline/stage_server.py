"""One replica's stage at work: what it serves to the stage before it, and what it asks of the stage after it.

    async with station.open():
        ...                       # serves; `moved` after each commit of the group

Calls of an epoch that the group has not reached are held, those too old are refused. How many are under way is bounded,
so that a slow replica says "busy" instead of hoarding.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Final

from torch import Tensor

from peer.errors import ProtocolViolation
from peer.events import EventLog
from peer.net.host import Host
from peer.net.method import Call
from peer.worker.stage_client import StageWorkerGroup
from swarm.pipeline.accounting import SampleAccounting
from swarm.pipeline.config import LoadReport, PipelineSettings
from swarm.pipeline.first_stage import DispatchResult, Origin
from swarm.pipeline.handlers import ForwardHandler
from swarm.pipeline.messages import (
    COUNTED,
    IS_COUNTED,
    REDISPATCH,
    SPANS_MAX,
    STILL_WAITING,
    AskCounted,
    Counted,
    IsCountedQuery,
    IsCountedReply,
    PipelineCalls,
    Redispatch,
    StillWaitingQuery,
    StillWaitingReply,
)
from swarm.pipeline.micro_batch import MicroBatchRunner
from swarm.pipeline.sender import Sender
from swarm.pipeline.stage_compute import StageCompute
from swarm.protocol.head import Head
from swarm.protocol.ledger import Range, count
from swarm.protocol.messages import Done

__all__ = ["DispatchResult", "StageServer"]

ReplicasOf = Callable[[int], Mapping[str, LoadReport]]
"""The live replicas of a stage, by peer id, ourselves left out or not; read anew for each micro-batch."""


class StageServer:
    """Stage `stage` of a run, on `worker_group`. `counting` is of this replica's group and moves only through the
    station."""

    def __init__(
        self,
        stage: int,
        rules: PipelineSettings,
        worker_group: StageWorkerGroup,
        host: Host,
        counting: SampleAccounting,
        replicas_of: ReplicasOf,
        events: EventLog,
    ) -> None:
        self.stage: Final = stage
        self.rules: Final = rules
        self.counting: Final = counting
        self._host, self._replicas_of, self._events = host, replicas_of, events
        self._group = rules.groups[stage]
        calls = PipelineCalls.of(rules)
        sender = None
        if stage + 1 < rules.stages:
            sender = Sender(host, calls, rules.groups[stage + 1], stage + 1, lambda: replicas_of(stage + 1))
        compute = StageCompute(worker_group, rules)
        self._work = MicroBatchRunner(stage, compute, counting, sender, lambda: host.stood_still_until)
        self._work.on_lost = self._lost
        self._handlers = ForwardHandler(host, rules, self._work, lambda: replicas_of(stage - 1))
        self._origin = Origin(host, rules, self._work, self._mates) if stage == 0 else None
        self._calls = calls
        self.on_redispatch: Callable[[tuple[Range, ...], int], None] = lambda spans, epoch: None
        """Stage 0: asked to issue these once more, for that epoch (see `swarm.pipeline.source`)."""
        self.dispatching: Callable[[], tuple[Range, ...]] = lambda: ()
        """Stage 0: what its issuer is at, or about to issue."""
        self.on_lost: Callable[[], None] = lambda: None
        """The worker was lost: nothing is counted any more, and weights must be imported."""

    @property
    def later_epoch(self) -> int:
        """The latest epoch of which the stage before has sent a micro-batch: above ours, it has committed since."""
        return self._handlers.later_epoch

    @property
    def on_counted(self) -> Callable[[Range, int, float], None]:
        """Called with (span, tokens, loss in nats summed over them) as each micro-batch is counted."""
        return self._work.on_counted

    @on_counted.setter
    def on_counted(self, call: Callable[[Range, int, float], None]) -> None:
        self._work.on_counted = call

    @property
    def on_later(self) -> Callable[[int], None]:
        """Called with `later_epoch` whenever that grows."""
        return self._handlers.on_later

    @on_later.setter
    def on_later(self, call: Callable[[int], None]) -> None:
        self._handlers.on_later = call

    @property
    def answer_s(self) -> float:
        """What a micro-batch takes from its arrival here to its gradient, smoothed; 0 until known."""
        return self._work.answer_s

    def load(self) -> LoadReport:
        """For our record."""
        compute = self._work.compute
        return LoadReport(float(compute.waiting), compute.service_s)

    def moved(self, head: Head) -> tuple[Range, ...]:
        """The group has committed `head`; to be called just before the worker is told to import its weights. Returns
        what we have counted since the capture that others have got merged (see `SampleAccounting.reset`)."""
        self._work.notice_loss()
        conflicts = self.counting.reset(head)
        self._handlers.moved()
        return conflicts

    def nothing_counts(self) -> AbstractAsyncContextManager[None]:
        """As `MicroBatchRunner.nothing_counts`."""
        return self._work.nothing_counts()

    @asynccontextmanager
    async def open(self) -> AsyncIterator[None]:
        """Serve inside the block."""
        rpc = self._host.rpc
        with rpc.scope():
            rpc.register(IS_COUNTED, self._on_seen)
            rpc.register(COUNTED, self._on_counted)
            rpc.register(STILL_WAITING, self._on_awaited)
            if self._origin is None:
                rpc.register(self._calls.forward, self._handlers.serve)
            else:
                rpc.register(REDISPATCH, self._on_redispatch)
            try:
                yield
            finally:
                await self._handlers.close()

    async def dispatch(
        self, span: Range, tokens: Tensor, again: bool = False, epoch: int | None = None
    ) -> DispatchResult:
        """Stage 0: take `tokens` (micro_batch, seq_len + 1) int64 through all stages; retries for ever. `epoch`: see
        `Origin.dispatch`."""
        assert self._origin is not None, "only stage 0 issues"
        return await self._origin.dispatch(span, tokens, again, epoch)

    async def evaluate(self, tokens: Tensor, timeout_s: float) -> float:
        """Stage 0: the mean loss in nats a token of `tokens` (B, T + 1) int64, by all stages' present weights. Raises
        as `Origin.evaluate`."""
        assert self._origin is not None, "only stage 0 evaluates"
        return await self._origin.evaluate(tokens, timeout_s)

    def _mates(self) -> list[str]:
        """The other replicas of our own stage."""
        return [peer for peer in self._replicas_of(self.stage) if peer != self._host.peer_id]

    def _lost(self, spans: tuple[Range, ...]) -> None:
        self._events.emit("pipeline_lost", samples=sum(last - first for first, last in spans))
        self.on_lost()

    async def _on_seen(self, call: Call[IsCountedQuery]) -> IsCountedReply:
        if call.body.group != self._group:
            return IsCountedReply(tuple(False for _ in call.body.spans))
        return IsCountedReply(tuple([await self._work.settled(span, call.peer) for span in call.body.spans]))

    async def _on_awaited(self, call: Call[StillWaitingQuery]) -> StillWaitingReply:
        sender, ask = self._work.sender, call.body
        return StillWaitingReply(sender is not None and await sender.awaits(call.peer, ask.span, ask.ticket))

    async def _on_counted(self, call: Call[AskCounted]) -> Counted:
        self._work.notice_loss()
        here = call.body.group == self._group and call.body.epoch == self.counting.epoch
        dispatching = self.dispatching() if call.body.group == self._group else ()
        return Counted(self.counting.counted if here else (), dispatching[:SPANS_MAX])

    async def _on_redispatch(self, call: Call[Redispatch]) -> Done:
        size, samples = self.rules.micro_batch, count(call.body.spans)
        if not self.rules.synchronous:
            raise ProtocolViolation("samples are issued once more only where rounds are synchronous")
        if any(first >= last or first % size or last % size for first, last in call.body.spans):
            raise ProtocolViolation(f"samples {call.body.spans[:4]} are no whole micro-batches of {size}")
        if samples > SPANS_MAX * size:
            raise ProtocolViolation(f"{samples} samples to be issued at once: at most {SPANS_MAX} micro-batches")
        if call.body.group == self._group and self.counting.in_batch(call.body.spans, call.body.epoch):
            self.on_redispatch(call.body.spans, call.body.epoch)
        return Done()
