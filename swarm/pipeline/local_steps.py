"""Local steps (DiLoCo, SparseLoCo): a replica makes an inner step whenever it has counted a batch, and the group merges
the replicas' updates (arXiv 2311.08105, a stage at a time).

Stage 0 dispatches the samples of its assignment; its round ends when all have come back. A later stage's round ends
when a micro-batch of the next epoch comes: the stages before it have committed. Replicas continue learning while the
exchange runs, and a commit adds that to the new weights.

When stage 0 has finished the run, only what a later stage has lost comes once more (`swarm.pipeline.recovery`). Its
last round ends when all that stage 0 has merged is counted, or does not come any more; the rounds that it lacks have
nothing to merge.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final

import trio

from peer.catalogue.rounds import InnerStep
from peer.compute.train_loop import learning_rate
from peer.errors import StageRefused
from swarm.pipeline.config import STALENESS
from swarm.pipeline.recovery.lost_samples import LostSamples
from swarm.pipeline.source import MicroBatchSource
from swarm.pipeline.stage_server import StageServer
from swarm.pipeline.stage_trainer import HeldOut, StageTrainer
from swarm.pipeline.weight_sync import WATCH_S, Adoption
from swarm.protocol.ledger import Range, contains, count, head_of, without
from swarm.protocol.round_schedule import RoundSchedule
from swarm.rounds.trainers.trainer import TrainRequest, TrainResult

REDISPATCH_SHARE: Final = 0.05  # of the micro-batches that a replica of stage 0 has dispatched
GRACE_S: Final = 4.0  # for micro-batches in flight at the end of a round


class LocalSteps(StageTrainer):
    """The trainer of a run whose replicas make inner steps. Event `inner_step` at every step.

    `first_round()`: the round that the replicas of stage 0 report as committed, None if none does. At the end of the
    run no micro-batch shows a later stage that a round is over. `lost`: at a later stage of a run that ends.
    """

    def __init__(
        self,
        server: StageServer,
        schedule: RoundSchedule,
        source: MicroBatchSource | None = None,
        held_out: HeldOut | None = None,
        first_round: Callable[[], int | None] = lambda: None,
        lost: LostSamples | None = None,
    ) -> None:
        super().__init__(server, schedule, source, held_out)
        self._first_round, self._rounds, self._lost = first_round, schedule.rounds, lost
        self._pending: dict[int, tuple[int, float]] = {}  # counted and not in a step: first sample -> tokens, loss
        self._stepped: set[int] = set()  # in steps since the last commit
        self._steps = 0  # since the last commit
        self._losses: list[float] = []  # of the steps since the last capture
        self._skipped = 0  # steps since then whose gradient was not finite
        self._refused = 0  # micro-batches of stage 0 that were refused for NaN before the last capture
        self._captured: set[int] = set()
        self._captured_steps = 0
        self._captured_in = -1  # the generation of the worker that remembers the capture
        self._stepped_at = trio.current_time()
        self._ends = math.inf  # of the round's compute, if there is anything to submit
        self._first_committed = 0  # by stage 0, as far as we heard
        self._redispatched = 0  # micro-batches that later stages had lost

    async def run(self) -> None:
        async with trio.open_nursery() as nursery:
            if self._source is None:
                nursery.start_soon(self._follow_first_stage)
                if self._lost is not None:
                    nursery.start_soon(self._ask_for_overdue, self._lost)
            await super().run()

    async def _ask_for_overdue(self, lost: LostSamples) -> None:
        """Ask after each commit for what was lost."""
        before = None
        while True:
            head = self.head
            if head is None or head is before:
                await self._changed.wait(math.inf)
                continue
            if before is not None and not self._schedule.closes(head):
                await lost.ask_for_overdue(head, before)
            before = head

    async def _follow_first_stage(self) -> None:
        """Remember what stage 0 said last: records are short-lived, and its replicas may leave after the last round
        before we need to know."""
        while True:
            said = self._first_round()
            if said is not None and said != self._first_committed:
                self._first_committed = said
                self._changed.notify()
            if self._lost is not None and not self._lost.first_stage and 0 < self._rounds <= self._first_committed:
                await self._lost.look_for_the_end()
                self._changed.notify()
            await trio.sleep(WATCH_S)

    def is_exhausted(self, round: int) -> bool:
        """Only in the last rounds, within `STALENESS` of the end: no record can make us give up more of the run."""
        return self._source is None and 0 < self._rounds <= min(self._first_committed, round + STALENESS)

    async def _train(self, request: TrainRequest) -> TrainResult:
        began, made = trio.current_time(), self._steps
        self._ends = began + request.deadline_s
        if self._source is not None:
            await self._validate_if_due()
            began = trio.current_time()
            await self._dispatch_until_over(request)
        else:
            while not self._is_over(request):
                await self._changed.until(lambda: self._is_over(request), WATCH_S)
            await self._settle_all(request)
        async with self._alone():
            result = await self._capture(request)
        self._note_speed(self._steps - made, trio.current_time() - began)
        return result

    def _is_over(self, request: TrainRequest) -> bool:
        assert self.head is not None
        late = trio.current_time() > self._ends
        if self._cut_short:
            return True
        if self._schedule.closes(self.head):
            return late or (self._lost is not None and bool(self._lost.first_stage))
        if not (self._pending or self._stepped):
            return self.is_exhausted(self.head.round + 1)
        if late:
            return True
        later = max(self._server.handlers.later_epoch, self._first_committed)
        return self._source is None and later > self.head.round

    async def _settle_all(self, request: TrainRequest) -> None:
        """In the last round of a later stage, wait for what is still to be counted, until the others do not."""
        head, lost = self.head, self._lost
        assert head is not None
        if lost is None or not lost.first_stage or not self._schedule.closes(head):
            return
        async with trio.open_nursery() as nursery:

            async def settle() -> None:
                await lost.until_settled(head)
                nursery.cancel_scope.cancel()

            nursery.start_soon(settle)
            while not (self._cut_short or trio.current_time() > self._ends):
                await self._changed.until(lambda: self._cut_short, WATCH_S)
            nursery.cancel_scope.cancel()

    async def _dispatch_until_over(self, request: TrainRequest) -> None:
        """Give micro-batches in flight at the end of the round a moment. Give up those that have not come back then:
        they may be assigned to another replica."""
        done = trio.Event()

        async def stop() -> None:
            while not self._is_over(request):
                await self._changed.until(lambda: self._is_over(request), WATCH_S)
            with trio.move_on_after(min(GRACE_S, 2 * self._server.runner.answer_s)):
                await done.wait()
            nursery.cancel_scope.cancel()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(stop)
            await self._dispatch(request)
            done.set()
            nursery.cancel_scope.cancel()

    # -- steps -------------------------------------------------------------------------------------------------------

    def _may_step(self) -> bool:
        return len(self._pending) * self._accounting.micro_batch >= self._schedule.batch_size

    async def _step(self) -> None:
        schedule, head = self._schedule, self.head
        assert head is not None
        # However many steps this stage's replicas make in a round, its learning rate follows the other stages'.
        number = max(head.inner_step, 0) + min(self._steps, schedule.steps(head) - 1)
        noted = set(self._pending)  # in the worker's sum; if in no step, they were thrown away meanwhile
        try:
            moved = await self._worker_group.step(number)
        except StageRefused as refused:
            if refused.reason == "empty":
                self._pending.clear()  # thrown away meanwhile
            elif refused.reason == "not_finite":
                self._skipped += 1
                await self._start_over()
            else:
                raise
            return
        firsts = {int(id) for id in moved.micro_batches}
        known = [self._pending[first] for first in firsts if first in self._pending]
        for first in noted | firsts:
            self._pending.pop(first, None)
        self._stepped |= firsts
        self._steps += 1
        now = trio.current_time()
        tokens = sum(tokens for tokens, _ in known)
        if tokens:
            self._losses.append(math.fsum(loss for _, loss in known) / tokens)
            self._events.emit(
                InnerStep(
                    step=number,
                    loss=round(self._losses[-1], 4),
                    lr=learning_rate(schedule.inner, number),
                    tokens_per_s=round(tokens / max(now - self._stepped_at, 1e-6), 1),
                    skipped=self._skipped,
                )
            )
        self._stepped_at = now

    async def _capture(self, request: TrainRequest) -> TrainResult:
        """Capture everything since the last commit. Counted samples that are in no step make a last, smaller step."""
        generation, head = self._worker_group.generation, self.head
        assert head is not None
        if self._pending:
            await self._step()
        counted = self._ranges(self._stepped)
        if not self._fits(counted, request) or not head.ledger.is_free(counted):
            self._tell_lost("not assigned", counted)
            await self._start_over()
            counted = ()
        await self._worker_group.export("delta", capture=True)
        self._accounting.capture(counted)
        self._captured, self._captured_steps, self._captured_in = set(self._stepped), self._steps, generation
        loss = math.fsum(self._losses) / len(self._losses) if self._losses else None
        skipped, self._losses, self._skipped = self._skipped + self._refused_steps(request), [], 0
        overflows = self._worker_group.take_overflows()
        self.trained.note(request.round_info.round, self._steps + skipped, skipped, loss, overflows)
        first = self._lost.first_stage if self._lost is not None and self._schedule.closes(head) else ()
        return TrainResult(
            self._steps, count(counted), loss or 0.0, self._worker_group.delta, counted, first_stage=first
        )

    def _refused_steps(self, request: TrainRequest) -> int:
        """Return the steps that stage 0 could not make since the last capture because a stage refused all of its
        micro-batches for NaN or infinity."""
        if self._source is None:
            return 0
        before, self._refused = self._refused, self._source.totals.not_finite
        return max(1, request.assignment.steps) if self._refused > before and not (self._steps or self._skipped) else 0

    def redispatch(self, ranges: tuple[Range, ...], epoch: int) -> None:
        """Dispatch what a later stage has lost, within a budget."""
        if self._source is not None:
            most = int(REDISPATCH_SHARE * self._source.totals.dispatched) - self._redispatched
            part = head_of(ranges, max(0, most) * self._accounting.micro_batch)
            self._redispatched += self._source.redispatch(part)

    # -- what stays and what goes ------------------------------------------------------------------------------------

    def _may_go_on(self, request: TrainRequest) -> bool:
        captured_is_lost = bool(self._captured) and self._captured_in != self._worker_group.generation
        return not captured_is_lost and self._fits(self._accounting.counted, request)

    def _fits(self, counted: tuple[Range, ...], request: TrainRequest) -> bool:
        """Return whether stage 0 has counted only what it is assigned: anything else may be assigned to another."""
        return self._schedule.stage > 0 or contains(request.assignment.ranges, counted)

    def counted(self, samples: Range, tokens: int, loss: float) -> None:
        if samples[0] not in self._stepped:  # the step's answer may come first
            self._pending[samples[0]] = (tokens, loss)
            if self._may_step():
                self._changed.notify()

    def worker_lost(self) -> None:
        """A submitted contribution stays as it is: until it is settled its samples must not count again."""
        self._pending.clear()
        self._stepped.clear()
        self._steps = 0
        self._captured_in = -1
        self._accounting.capture(self._ranges(self._captured))
        self._changed.notify()

    def _clear(self) -> None:
        self._pending.clear()
        self._stepped.clear()
        self._captured.clear()
        self._steps = self._captured_steps = 0
        self._captured_in = -1

    def _keeps(self, adoption: Adoption) -> bool:
        follows = self.head is not None and adoption.head.round == self.head.round + 1
        return follows and not adoption.replaced and self._captured_in == self._worker_group.generation

    def _settle(self) -> None:
        assert self.head is not None
        submitted = self._ranges(self._captured)
        unmerged = without(submitted, without(submitted, self.head.ledger.free))
        if unmerged and self._schedule.stage > 0:  # stage 0 dispatches its own again, and they come through here
            self._tell_lost("not merged", unmerged)
        self._stepped -= self._captured
        self._steps = max(0, self._steps - self._captured_steps)
        self._captured, self._captured_steps, self._captured_in = set(), 0, -1
