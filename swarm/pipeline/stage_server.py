"""One replica's stage in a pipeline: the calls it serves, and what it needs to call the next stage.

async with server.open(trainer):
    ...                       # serves; `moved` after each commit of the group
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

from peer.catalogue.stages import PipelineLost
from peer.errors import ProtocolViolation
from peer.net.host import Host
from peer.net.method import Call, Empty
from peer.worker.stage_client import StageWorkerGroup
from swarm.pipeline.accounting import SampleAccounting
from swarm.pipeline.config import LoadReport, PipelineSettings, ReplicasOf
from swarm.pipeline.duplicate_checks import IS_COUNTED_S, find_holder
from swarm.pipeline.handlers import ForwardHandler
from swarm.pipeline.messages import (
    COUNTED,
    IS_COUNTED,
    RECEIPT,
    REDISPATCH,
    SAMPLE_RANGES_MAX,
    STILL_WAITING,
    AskCounted,
    Counted,
    IsCountedQuery,
    IsCountedReply,
    Redispatch,
    StillWaitingQuery,
    StillWaitingReply,
    forward_method,
)
from swarm.pipeline.recovery.receipts import ProveHead, ReceiptBook
from swarm.pipeline.runner import MicroBatchRunner
from swarm.pipeline.sender import Sender
from swarm.pipeline.stage_compute import StageCompute
from swarm.protocol.head import Head
from swarm.protocol.ledger import Range, count


class StageListener:
    """The part of a stage's trainer that receives events at the stage. This one, of a stage without a trainer, ignores
    them."""

    def counted(self, samples: Range, tokens: int, loss: float) -> None:
        """A micro-batch was counted here; `loss` in nats, summed over its tokens."""

    def later_epoch(self, epoch: int) -> None:
        """The stage before has sent a micro-batch of `epoch`, later than any before."""

    def worker_lost(self) -> None:
        """The worker was lost: nothing is counted any more, and weights must be imported."""

    def redispatch(self, ranges: tuple[Range, ...], epoch: int) -> None:
        """Stage 0 was asked to dispatch these again, for `epoch`."""

    def dispatching(self) -> tuple[Range, ...]:
        """Return what stage 0 has in flight or has planned to dispatch."""
        return ()


class StageServer:
    """Stage `stage` of a run on `worker_group`. `accounting` is that of this replica in its group, and changes through
    the server only. `prove` proves heads of other stages."""

    def __init__(
        self,
        stage: int,
        settings: PipelineSettings,
        worker_group: StageWorkerGroup,
        host: Host,
        accounting: SampleAccounting,
        replicas_of: ReplicasOf,
        prove: ProveHead,
    ) -> None:
        self.stage: Final = stage
        self.settings: Final = settings
        self.host: Final = host
        self.accounting: Final = accounting
        self.passed = 0
        """Micro-batches counted here so far."""
        self.prove: Final = prove
        self.receipts: Final = ReceiptBook(host, stage, settings.micro_batch, prove)
        self._replicas_of = replicas_of
        self._group = settings.groups[stage]
        self._listener: StageListener = StageListener()
        last = stage + 1 == settings.stages
        sender = None if last else Sender(host, settings, stage + 1, replicas_of, self.receipts.took)
        self.runner: Final = MicroBatchRunner(
            stage,
            StageCompute(worker_group, settings),
            accounting,
            sender,
            lambda: host.stood_still_until,
            self._note_counted,
            self._note_lost,
        )
        self.handlers: Final = ForwardHandler(
            host,
            settings,
            self.runner,
            lambda: replicas_of(stage - 1),
            lambda epoch: self._listener.later_epoch(epoch),
            self.receipts.counted,
        )

    @property
    def worker_group(self) -> StageWorkerGroup:
        return self.runner.compute.worker_group

    @property
    def drained(self) -> bool:
        """Whether nothing is in progress, and all that was counted is merged."""
        return self.handlers.idle and not self.accounting.counted

    def load(self) -> LoadReport:
        """Return the load for this replica's record."""
        compute = self.runner.compute
        return LoadReport(float(compute.waiting), compute.service_s)

    def moved(self, head: Head) -> tuple[Range, ...]:
        """The group has committed `head`; call this just before the worker imports its weights. Return the
        samples counted here since the capture and merged by others (see `SampleAccounting.reset`)."""
        self.runner.notice_loss()
        conflicts = self.accounting.reset(head)
        self.handlers.moved()
        return conflicts

    @asynccontextmanager
    async def open(self, listener: StageListener | None = None) -> AsyncIterator[None]:
        """Serve inside the block, and report events to `listener`."""
        if listener is not None:
            self._listener = listener
        rpc = self.host.rpc
        with rpc.scope():
            rpc.register(IS_COUNTED, self._on_is_counted)
            rpc.register(COUNTED, self._on_counted)
            rpc.register(STILL_WAITING, self._on_still_waiting)
            rpc.register(RECEIPT, self.receipts.give)
            if self.stage:
                rpc.register(forward_method(self.settings), self.handlers.serve)
            else:
                rpc.register(REDISPATCH, self._on_redispatch)
            try:
                yield
            finally:
                await self.handlers.close()

    async def is_counted_elsewhere(self, samples: Range) -> bool:
        """Return whether another replica of this stage says that it has counted `samples`."""
        others = [peer for peer in self._replicas_of(self.stage) if peer != self.host.peer_id]
        return await find_holder(self.host, self._group, samples, others, IS_COUNTED_S) is not None

    def _note_counted(self, samples: Range, tokens: int, loss: float) -> None:
        self.passed += 1
        self._listener.counted(samples, tokens, loss)

    def _note_lost(self, ranges: tuple[Range, ...]) -> None:
        self.host.events.emit(PipelineLost(samples=sum(end - first for first, end in ranges)))
        self._listener.worker_lost()

    async def _on_is_counted(self, call: Call[IsCountedQuery]) -> IsCountedReply:
        if call.body.group != self._group:
            return IsCountedReply(tuple(False for _ in call.body.ranges))
        return IsCountedReply(tuple([await self.runner.is_counted(samples, call.peer) for samples in call.body.ranges]))

    async def _on_still_waiting(self, call: Call[StillWaitingQuery]) -> StillWaitingReply:
        sender, ask = self.runner.sender, call.body
        return StillWaitingReply(sender is not None and await sender.waits_for(call.peer, ask.samples, ask.ticket))

    async def _on_counted(self, call: Call[AskCounted]) -> Counted:
        self.runner.notice_loss()
        here = call.body.group == self._group
        if self.settings.synchronous:
            here &= call.body.epoch == self.accounting.epoch
        dispatching = self._listener.dispatching() if call.body.group == self._group else ()
        return Counted(self.accounting.counted if here else (), dispatching[:SAMPLE_RANGES_MAX])

    async def _on_redispatch(self, call: Call[Redispatch]) -> Empty:
        size, ranges = self.settings.micro_batch, call.body.ranges
        if any(first >= end or first % size or end % size for first, end in ranges):
            raise ProtocolViolation(f"samples {ranges[:4]} are no whole micro-batches of {size}")
        if count(ranges) > SAMPLE_RANGES_MAX * size:
            raise ProtocolViolation(
                f"a redispatch of {count(ranges)} samples: at most {SAMPLE_RANGES_MAX} micro-batches"
            )
        if call.body.group != self._group:
            return Empty()
        if not self.settings.synchronous:
            if merged := self.accounting.merged(ranges):
                self._listener.redispatch(merged, call.body.epoch)
        elif self.accounting.in_batch(ranges, call.body.epoch):
            self._listener.redispatch(ranges, call.body.epoch)
        return Empty()
