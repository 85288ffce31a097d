"""The trainer of methods whose exchange overlaps compute: the worker trains on while a message is in flight.

    train(r): [end the tail] [take in what round r-1 changed] steps left of round r -> capture --> message r in flight
    tail:                                                          steps of round r+1, on samples promised for it

A tail is `at_least` steps long and at most as long as what is promised for the next round, somewhat more than that
round's work; only where an exchange takes longer than all of that does the worker wait.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import msgspec
import torch
import trio

from optim.algorithms.outer_step import DilocoOuter
from optim.config import EagerConfig, OuterConfig, StreamingConfig
from optim.strategies.eager import EagerOffset
from optim.strategies.interface import OuterStrategy
from peer.errors import WorkerError
from peer.events import EventLog
from peer.ipc.inner_options import ElementRange, InnerRunOptions
from peer.ipc.train_messages import InnerResult
from peer.worker.client import WorkerGroup
from swarm.protocol.head import Head
from swarm.protocol.ledger import Range, tail_of
from swarm.rounds.trainer import TrainRequest, TrainResult
from swarm.rounds.worker_trainer import NOTHING, WorkerTrainer, spans_of


class Taking(Protocol):
    """How a method that overlaps takes in what its rounds change."""

    at_least: int

    def begin(self, fresh: bool) -> InnerRunOptions:
        """What the next steps begin from. `fresh`: the state was replaced."""
        ...

    def captured(self, delta: torch.Tensor, peers: int) -> InnerRunOptions:
        """My delta is on its way, to be merged with those of `peers`; returns what the tail begins from."""
        ...

    def adopt(self, theta: torch.Tensor, changed: tuple[slice, ...] | None) -> None:
        """As `Trainer.adopt`, which knows the head too."""
        ...


@dataclass
class _Tail:
    """Steps ahead, from number `first_step` on the samples `ranges`."""

    ranges: tuple[Range, ...]
    first_step: int
    orders: InnerRunOptions
    result: InnerResult = NOTHING
    begun: trio.Event = field(default_factory=trio.Event)
    done: trio.Event = field(default_factory=trio.Event)


class OverlapTrainer(WorkerTrainer):
    """Implements `swarm.rounds.trainer.Trainer`; `run` must be running."""

    def __init__(self, worker_group: WorkerGroup, taking: Taking, events: EventLog) -> None:
        super().__init__(worker_group, "delta", events)
        self._taking = taking
        self._fresh = True
        self._tail: _Tail | None = None
        self._tails, self._asked = trio.open_memory_channel[_Tail](1)
        self._training: TrainRequest | None = None  # of a round, not ahead of one

    async def run(self) -> None:
        """Train on while messages are in flight."""
        async for tail in self._asked:
            tail.begun.set()
            try:
                tail.result = await self._inner(tail.ranges, tail.first_step, math.inf, None, tail.orders)
            except WorkerError as error:
                self._events.emit("worker_failed", reason=str(error))
            finally:
                tail.done.set()

    async def train(self, request: TrainRequest) -> TrainResult:
        self._cut_short, self._training = request.cut_short, request
        try:
            return await self._train(request)
        finally:
            if self._training is request:  # else a newer plan's is being trained already
                self._training = None

    async def _train(self, request: TrainRequest) -> TrainResult:
        work = request.assignment
        await self._stop_tail(self._taking.at_least)
        ahead = self._take_tail(request)
        await self._validate_if_due()
        orders = msgspec.structs.replace(self._taking.begin(self._fresh), capture=spans_of(request.places))
        self._fresh = False
        left, first_step = tail_of(work.ranges, ahead.sequences), request.round_info.step + ahead.steps
        steps = 0 if self._cut_short else max(0, work.steps - ahead.steps)
        result = await self._inner(left, first_step, request.deadline_s, steps, orders)
        delta = self._delta(request.places)
        after = await trio.to_thread.run_sync(self._taking.captured, delta, request.peers)
        self._say_trained(request, result, ahead)
        if work.ahead:
            # a round given up while that thread ran has no tail: one that never begins would be waited for for ever
            await trio.lowlevel.checkpoint_if_cancelled()
            self._tail = _Tail(work.ahead, request.round_info.step + ahead.steps + result.steps, after)
            self._tails.send_nowait(self._tail)  # there is room: the tail before has begun
        return TrainResult(
            ahead.steps + result.steps, ahead.sequences + result.sequences, _mean_loss(ahead, result), delta
        )

    async def validate(self) -> None:
        if self.validate_round is not None:
            await self._stop_tail(0)
        await super().validate()

    def finish_early(self) -> None:
        """Steps ahead of the next round go on: they hold up nobody."""
        self._cut_short = True
        if self._training is not None:
            self._worker_group.stop_inner()

    def adopt(self, theta: torch.Tensor, changed: tuple[slice, ...] | None, head: Head | None = None) -> None:
        self._fresh = self._fresh or changed is None
        self._taking.adopt(theta, changed)

    async def _inner(
        self, ranges: Sequence[Range], first_step: int, deadline_s: float, steps: int | None, orders: InnerRunOptions
    ) -> InnerResult:
        result = await self._worker_group.inner_steps(list(ranges), first_step, deadline_s, steps, options=orders)
        self._note(result)
        return result

    async def _stop_tail(self, at_least: int) -> None:
        if self._tail is not None:
            await self._tail.begun.wait()
            self._worker_group.stop_inner(after_steps=0 if self._cut_short else at_least)
            await self._tail.done.wait()

    def _take_tail(self, request: TrainRequest) -> InnerResult:
        """What was done ahead of this round."""
        tail, self._tail = self._tail, None
        if tail is None:
            return NOTHING
        if self._fresh or tail.ranges != request.assignment.ranges:
            self._events.emit("steps_ahead_void", round=request.round_info.round, steps=tail.result.steps)
            return NOTHING
        return tail.result


class TakesFragments:
    """Streaming DiLoCo (arXiv 2501.18512): a fragment that moved is mixed in, local <- mix * local + (1 - mix) * outer,
    `tau` steps after its delta was captured, or when it has arrived."""

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
        # a peer that had no part in a round has two commits to take in at once
        self._changed = () if changed is None else tuple(sorted({*self._changed, *spans_of(changed)}))


class TakesEagerly:
    """Eager updates (arXiv 2502.12996): the worker starts every round from the shared weights, stepped by the deltas of
    the round before the last, plus this peer's own offset, stepped by its fresh delta."""

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
    worker_group: WorkerGroup, outer: OuterConfig, strategy: OuterStrategy, events: EventLog
) -> WorkerTrainer:
    """The trainer that a run's method asks for."""
    if isinstance(outer, StreamingConfig) and (outer.fragments > 1 or outer.tau or outer.mix):
        return OverlapTrainer(worker_group, TakesFragments(worker_group, outer.tau, outer.mix), events)
    if isinstance(outer, EagerConfig):
        taking = TakesEagerly(worker_group, DilocoOuter(outer.lr, outer.momentum, outer.nesterov))
        return OverlapTrainer(worker_group, taking, events)
    return WorkerTrainer(worker_group, strategy.product, events)


def _mean_loss(*results: InnerResult) -> float:
    steps = [(r.steps - r.skipped, r.loss) for r in results if r.steps > r.skipped]
    return sum(n * loss for n, loss in steps) / sum(n for n, _ in steps) if steps else math.nan
