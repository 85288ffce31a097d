"""Synchronous batches (SWARM, arXiv 2301.11913; DeDLOC, 2106.10207): the replicas of a stage together count every
sample of a round's batch exactly once; weights change at commits only.

The router decides which replica counts a sample, so no replica knows when the batch is complete. The group's leader
asks the members for their counted samples, has missing micro-batches dispatched again, and ends the round.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Final

import torch
import trio

from peer.errors import StageRefused
from swarm.pipeline.recovery.redispatch import Firsts, Redispatcher, stall_s
from swarm.pipeline.source import MicroBatchSource, SourceTotals
from swarm.pipeline.stage_server import StageServer
from swarm.pipeline.stage_trainer import HeldOut, StageTrainer
from swarm.pipeline.weight_sync import Adoption
from swarm.protocol.head import Head
from swarm.protocol.ledger import Range, contains, count, union
from swarm.protocol.round_schedule import RoundSchedule
from swarm.rounds.trainers.trainer import TrainRequest, TrainResult

POLL_S: Final = 0.2


class BatchTracker:
    """Tracks at a group's leader that a round's batch gets complete."""

    def __init__(self, server: StageServer, schedule: RoundSchedule, redispatcher: Redispatcher) -> None:
        self._server, self._schedule, self._redispatcher = server, schedule, redispatcher
        self._host = server.host
        self._gathered = -1  # the last round that was gathered for, in any term

    async def gather(self, head: Head, members: Sequence[str], resumed: bool = False) -> Mapping[str, Sequence[Range]]:
        """Wait until the members, this peer among them, have counted the whole batch of the round after `head`; return
        what each says it has. Members without a part in the plan count, too: then only the next plan can merge the
        batch. `resumed`: a leader that is gone had begun with that round."""
        batch, missing = self._schedule.batch(head), self._redispatcher
        assert batch is not None
        wanted = missing.firsts_of([batch])
        have: dict[str, Firsts] = {}
        counted: Firsts = set()
        again, self._gathered = resumed or self._gathered == head.round + 1, head.round + 1
        grown_at = -math.inf if again else trio.current_time()  # again: what is not in flight now is lost
        while True:
            suspects = self._host.suspects
            have = {peer: firsts for peer, firsts in have.items() if peer not in suspects}
            have[self._host.peer_id] = missing.counted_here(wanted)
            others = [m for m in members if m != self._host.peer_id and m not in suspects]
            await missing.poll(head.run_id, head.round, others, have, wanted)
            now, before, counted = trio.current_time(), counted, set().union(*have.values())
            if counted == wanted:
                size = missing.micro_batch
                return {peer: union((first, first + size) for first in firsts) for peer, firsts in have.items()}
            await missing.redispatch(head.round, before - counted, "counted by a peer or a worker that is gone")
            if not counted <= before and before:
                grown_at = now
            if now - grown_at > stall_s(self._server.runner.answer_s):
                grown_at = now
                await missing.redispatch(head.round, wanted - counted, "missing")
            await trio.sleep(POLL_S)


class Synchronous(StageTrainer):
    """The trainer of a synchronous run. A round has no deadline of its own: a part of the batch is of no use."""

    def __init__(
        self,
        server: StageServer,
        schedule: RoundSchedule,
        tracker: BatchTracker,
        source: MicroBatchSource | None = None,
        held_out: HeldOut | None = None,
    ) -> None:
        super().__init__(server, schedule, source, held_out)
        self._tracker = tracker
        self._losses: dict[int, tuple[int, float]] = {}  # of what was counted: first sample -> tokens, loss
        self._previous: torch.Tensor | None = None  # the weights of the epoch before that of `head`, if we have them
        self._resumes = False  # the group had begun with this round before a regroup

    async def gather(self, members: Sequence[str]) -> Mapping[str, Sequence[Range]]:
        await self._changed.until(lambda: self.head is not None and self._adoption is None, math.inf)
        head = self.head
        assert head is not None
        # Stage 0 dispatches its whole round again, whichever member was lost.
        return await self._tracker.gather(head, members, self._resumes and self._source is None)

    async def _train(self, request: TrainRequest) -> TrainResult:
        await self._validate_if_due()
        async with trio.open_nursery() as nursery:
            if self._source is not None:
                nursery.start_soon(self._dispatch_timed, request)
                nursery.start_soon(self._watch_refusals, request, self._source.totals)
            await self._changed.until(lambda: self._cut_short, math.inf)
            nursery.cancel_scope.cancel()  # what is still in flight is counted by another replica
        async with self._alone():
            return await self._capture(request)

    async def _dispatch_timed(self, request: TrainRequest) -> None:
        began = trio.current_time()
        await self._dispatch(request)
        self._note_speed(request.assignment.steps, trio.current_time() - began)

    async def _watch_refusals(self, request: TrainRequest, totals: SourceTotals) -> None:
        """Note each time that as many micro-batches were refused for NaN or infinity as the assignment has, and none
        was completed meanwhile: the batch is dispatched again and again. Raises Diverged."""
        assigned = max(1, count(request.assignment.ranges) // self._accounting.micro_batch)
        completed, refused = totals.completed, totals.not_finite
        while True:
            await trio.sleep(POLL_S)
            if totals.completed > completed:
                completed, refused = totals.completed, totals.not_finite
            elif totals.not_finite >= refused + assigned:
                refused = totals.not_finite
                self.trained.note(request.round_info.round, assigned, assigned, None)

    async def _capture(self, request: TrainRequest) -> TrainResult:
        """Capture all that was counted since the last commit, in any plan; the worker continues adding to it."""
        head = self.head
        assert head is not None
        try:
            taken = await self._worker_group.read_gradient()
        except StageRefused as refused:
            if refused.reason != "not_finite":
                raise
            skipped = max(1, len(self._losses))
            await self._start_over()
            self.trained.note(request.round_info.round, skipped, skipped, None)
            return TrainResult(0, 0, 0.0, self._worker_group.delta)
        counted = self._ranges(map(int, taken.micro_batches))
        batch = self._schedule.batch(head)
        assert batch is not None
        if not contains([batch], counted):
            self._tell_lost("not assigned", counted)
            await self._start_over()
            return TrainResult(0, 0, 0.0, self._worker_group.delta)
        self._accounting.capture(counted)
        loss, steps = _mean_loss(self._losses), len(taken.micro_batches)
        self.trained.note(request.round_info.round, steps, 0, loss, self._worker_group.take_overflows())
        return TrainResult(steps, count(counted), loss or 0.0, self._worker_group.delta, counted)

    def adopt(self, theta: torch.Tensor, changed: tuple[slice, ...] | None, head: Head) -> None:
        # At once, for the round that begins with this head asks; and its weights may well be those that are here.
        before = self._adoption.head if self._adoption is not None else self.head
        if before is not None and head != before:
            begun = bool(before.members)  # else this is the start of the first term
            self._resumes = begun and head.term > before.term and head.round <= before.round
        super().adopt(theta, changed, head)

    # -- what stays and what goes ------------------------------------------------------------------------------------

    def _may_go_on(self, request: TrainRequest) -> bool:
        return True

    def counted(self, samples: Range, tokens: int, loss: float) -> None:
        self._losses[samples[0]] = (tokens, loss)

    def worker_lost(self) -> None:
        self._losses.clear()
        self._changed.notify()

    def _clear(self) -> None:
        self._losses.clear()

    def _keeps(self, adoption: Adoption) -> bool:
        return False

    def _settle(self) -> None:
        """All of a batch is settled with its round."""

    # -- the epoch before --------------------------------------------------------------------------------------------

    async def _import(self, adoption: Adoption) -> None:
        await trio.to_thread.run_sync(self._remember, adoption)
        await super()._import(adoption)

    def _remember(self, adoption: Adoption) -> None:
        """Keep the weights of the epoch before here as well: stages are an epoch apart at times, and the worker that
        keeps them may be lost. Where no replica has them any more, use the present ones: without any, stages that
        are an epoch behind would wait without end."""
        head = adoption.head
        if adoption.orphaned:
            self._previous = adoption.theta
        elif self.head is not None and head.round == self.head.round + 1:
            self._previous = self._worker_group.outer.clone()
        elif head != self.head:  # an equal head is the same import again, after a failure
            self._previous = None

    async def _load(self, head: Head) -> None:
        if self._previous is not None:
            theta = self._worker_group.outer.clone()
            try:
                self._worker_group.outer.copy_(self._previous)
                await self._worker_group.import_weights(head.round - 1)
            finally:
                self._worker_group.outer.copy_(theta)
        await super()._load(head)


def _mean_loss(losses: Mapping[int, tuple[int, float]]) -> float | None:
    tokens = sum(tokens for tokens, _ in losses.values())
    return math.fsum(loss for _, loss in losses.values()) / tokens if tokens else None
