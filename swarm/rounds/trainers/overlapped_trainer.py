"""The trainer of methods whose exchange overlaps compute: the worker trains while an update is in flight.

    train(r): [end the tail] [adopt the changes of round r-1] rest of round r's steps -> capture --> update r in flight
    tail:                                                          steps of round r+1, on samples promised for it

A tail is at least `at_least` steps long. It ends with the samples promised for the next round, somewhat more than that
round's work. The worker waits only if an exchange takes longer than that.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Protocol

import msgspec
import torch
import trio

from optim.algorithms.eager import EagerOffset
from optim.algorithms.outer_step import DilocoOuter
from optim.config import EagerConfig, OuterConfig, StreamingConfig
from optim.strategies.interface import OuterStrategy
from peer.catalogue.machine import WorkerFailed
from peer.errors import WorkerError
from peer.events import EventLog
from peer.ipc.inner_options import ElementRange, InnerRunOptions
from peer.ipc.train_messages import InnerResult
from peer.worker.client import WorkerGroup
from swarm.protocol.head import Head
from swarm.protocol.ledger import Range, tail_of
from swarm.protocol.samples import SampleSupply
from swarm.rounds.trainers.trainer import TrainRequest, TrainResult
from swarm.rounds.trainers.worker_trainer import NOTHING, WorkerTrainer, spans_of


class OverlapPolicy(Protocol):
    """How a method that overlaps brings the changes of a round into the worker's weights."""

    at_least: int
    """Steps of a tail, at least."""

    def begin(self, fresh: bool) -> InnerRunOptions:
        """Return how the next steps begin. `fresh`: the state was replaced."""
        ...

    def captured(self, delta: torch.Tensor, peers: int) -> InnerRunOptions:
        """Note that the peer's delta will be merged with those of `peers` peers; return how the tail begins."""
        ...

    def adopt(self, theta: torch.Tensor, changed: tuple[slice, ...] | None) -> None:
        """Adopt outer weights, as `Trainer.adopt` does."""
        ...


@dataclass
class _Tail:
    """Steps ahead of the next round."""

    ranges: tuple[Range, ...]
    first_step: int
    """The number of the first step in the run's schedule."""
    options: InnerRunOptions
    result: InnerResult = NOTHING
    begun: trio.Event = field(default_factory=trio.Event)
    done: trio.Event = field(default_factory=trio.Event)


class OverlapTrainer(WorkerTrainer):
    """A `swarm.rounds.trainers.trainer.Trainer` that trains while an exchange is in flight. `run` must be running."""

    def __init__(
        self, worker_group: WorkerGroup, policy: OverlapPolicy, events: EventLog, samples: SampleSupply | None = None
    ) -> None:
        super().__init__(worker_group, "delta", events, samples)
        self._policy = policy
        self._fresh = True
        self._tail: _Tail | None = None
        self._tails, self._asked = trio.open_memory_channel[_Tail](1)
        self._training: TrainRequest | None = None  # the round being trained, without its tail

    async def run(self) -> None:
        """Train the tails, while updates are in flight."""
        async for tail in self._asked:
            tail.begun.set()
            try:
                if not self.paused:
                    tail.result = await self._inner(tail.ranges, tail.first_step, math.inf, None, tail.options)
            except WorkerError as error:
                self._events.emit(WorkerFailed(reason=str(error)))
            finally:
                tail.done.set()

    async def pause(self) -> None:
        """As `WorkerTrainer.pause`. The steps of a tail go with the worker's weights: they are in no contribution."""
        await super().pause()
        self._fresh = True

    async def train(self, request: TrainRequest) -> TrainResult:
        self._cut_short, self._training = request.cut_short, request
        try:
            return await self._train(request)
        finally:
            if self._training is request:  # else a newer plan is being trained already
                self._training = None

    async def _train(self, request: TrainRequest) -> TrainResult:
        work = request.assignment
        self._expect(request)
        await self._stop_tail(self._policy.at_least)
        ahead = self._take_tail(request)
        await self._validate_if_due()
        if self.paused:
            return await self._rest(request)
        options = msgspec.structs.replace(self._policy.begin(self._fresh), capture=spans_of(request.places))
        self._fresh = False
        left, first_step = tail_of(work.ranges, ahead.sequences), request.round_info.step + ahead.steps
        steps = 0 if self._cut_short else max(0, work.steps - ahead.steps)
        result = await self._inner(left, first_step, request.deadline_s, steps, options)
        delta = self._delta(request.places)
        after = await trio.to_thread.run_sync(self._policy.captured, delta, request.peers)
        loss = _mean_loss(ahead, result)
        self._note_round(request, result, loss, ahead)
        if work.ahead:
            # A round cancelled while that thread ran must leave no tail: `_stop_tail` would wait for it without end.
            await trio.lowlevel.checkpoint_if_cancelled()
            self._tail = _Tail(work.ahead, request.round_info.step + ahead.steps + result.steps, after)
            self._tails.send_nowait(self._tail)  # there is room: the previous tail has begun
        return TrainResult(ahead.steps + result.steps, ahead.sequences + result.sequences, loss, delta)

    async def validate(self) -> None:
        if self.validate_round is not None:
            await self._stop_tail(0)
        await super().validate()

    def finish_early(self) -> None:
        """As `Trainer.finish_early`. A tail continues, since no other peer waits for it."""
        self._cut_short = True
        if self._training is not None:
            self._worker_group.stop_inner()

    def adopt(self, theta: torch.Tensor, changed: tuple[slice, ...] | None, head: Head | None = None) -> None:
        self._fresh = self._fresh or changed is None
        self._policy.adopt(theta, changed)

    def _stop_steps(self) -> None:
        self._cut_short = True
        self._worker_group.stop_inner()  # of a tail as well

    async def _stop_tail(self, at_least: int) -> None:
        if self._tail is not None:
            await self._tail.begun.wait()
            self._is_awaited = True
            self._worker_group.stop_inner(after_steps=0 if self._cut_short else at_least)
            await self._tail.done.wait()

    def _take_tail(self, request: TrainRequest) -> InnerResult:
        """Return what was trained ahead of this round."""
        tail, self._tail = self._tail, None
        if tail is None:
            return NOTHING
        if self._fresh or tail.ranges != request.assignment.ranges:
            self._events.emit("steps_ahead_void", round=request.round_info.round, steps=tail.result.steps)
            return NOTHING
        return tail.result


class StreamingPolicy:
    """The policy of Streaming DiLoCo (arXiv 2501.18512). A merged fragment is mixed into the local weights,
    local <- mix * local + (1 - mix) * outer, `tau` steps after its delta was captured, or when it has arrived."""

    def __init__(self, worker_group: WorkerGroup, tau: int, mix: float) -> None:
        self.at_least = tau
        self._worker_group = worker_group
        self._mix = mix
        self._changed: tuple[ElementRange, ...] = ()

    def begin(self, fresh: bool) -> InnerRunOptions:
        changed, self._changed = self._changed, ()
        if fresh:
            return InnerRunOptions(begin="outer")
        return InnerRunOptions(begin="local", mix=changed, alpha=self._mix)

    def captured(self, delta: torch.Tensor, peers: int) -> InnerRunOptions:
        return InnerRunOptions(begin="local", capture=())

    def adopt(self, theta: torch.Tensor, changed: tuple[slice, ...] | None) -> None:
        self._worker_group.outer.copy_(theta)
        # a peer that missed a round adopts two commits at once
        self._changed = () if changed is None else tuple(sorted({*self._changed, *spans_of(changed)}))


class EagerPolicy:
    """The policy of eager updates (arXiv 2502.12996). Every round starts from the shared weights, stepped by the deltas
    of the round before the last, plus this peer's own offset, stepped by its newest delta."""

    at_least = 0

    def __init__(self, worker_group: WorkerGroup, outer: DilocoOuter) -> None:
        self._worker_group, self._outer = worker_group, outer
        self._shared = worker_group.outer.clone()
        self._offset = EagerOffset(worker_group.layout.numel, outer)

    def begin(self, fresh: bool) -> InnerRunOptions:
        return InnerRunOptions(begin="outer" if fresh else "local")

    def captured(self, delta: torch.Tensor, peers: int) -> InnerRunOptions:
        offset = self._offset.advance(delta, 1 / peers)
        torch.add(self._shared, offset, out=self._worker_group.outer)
        return InnerRunOptions(begin="outer", capture=())

    def adopt(self, theta: torch.Tensor, changed: tuple[slice, ...] | None) -> None:
        self._shared.copy_(theta)
        if changed is None:
            self._offset = EagerOffset(self._worker_group.layout.numel, self._outer)
            self._worker_group.outer.copy_(theta)


def trainer_of(
    worker_group: WorkerGroup,
    outer: OuterConfig,
    strategy: OuterStrategy,
    events: EventLog,
    samples: SampleSupply | None = None,
) -> WorkerTrainer:
    """Return the trainer for a run's method. `samples` as of `WorkerTrainer`."""
    if isinstance(outer, StreamingConfig) and (outer.fragments > 1 or outer.tau or outer.mix):
        return OverlapTrainer(worker_group, StreamingPolicy(worker_group, outer.tau, outer.mix), events, samples)
    if isinstance(outer, EagerConfig):
        policy = EagerPolicy(worker_group, DilocoOuter(outer.lr, outer.momentum, outer.nesterov))
        return OverlapTrainer(worker_group, policy, events, samples)
    return WorkerTrainer(worker_group, strategy.product, events, samples)


def _mean_loss(*results: InnerResult) -> float:
    each = [(r.steps - r.skipped - r.overflows, r.loss) for r in results]
    useful = [(steps, loss) for steps, loss in each if steps > 0]
    return sum(n * loss for n, loss in useful) / sum(n for n, _ in useful) if useful else math.nan
