"""Local steps (DiLoCo, SparseLoCo): a replica makes an inner step whenever it has counted a batch, and the group merges
what the replicas have learned (arXiv 2311.08105, a stage at a time).

Stage 0 issues the samples of its assignment and is done when all have come back. The others are done when a micro-batch
of the next epoch comes by: the stages before them have committed. They go on learning while the exchange runs; a commit
puts that on top of the new weights. Once the first stage has finished the run nothing comes any more: what a later one
has counted by then may be in its round before the last, or lost, and then the rounds that it lacks have nothing to
merge.
"""

from __future__ import annotations

import math
from typing import Final

import trio

from peer.compute.train_loop import learning_rate
from peer.errors import StageRefused
from swarm.pipeline.config import STALENESS
from swarm.pipeline.stage_trainer import WATCH_S, Adoption, StageTrainer, StageTrainerContext
from swarm.protocol.ledger import Range, contains, count, union, without
from swarm.rounds.trainer import TrainRequest, TrainResult

GRACE_S: Final = 4.0  # for micro-batches under way, when the round is to be wrapped up


class LocalSteps(StageTrainer):
    """Implements `swarm.rounds.trainer.Trainer`. Event `inner_step` at every step."""

    def __init__(self, context: StageTrainerContext) -> None:
        super().__init__(context)
        self._pending: dict[int, tuple[int, float]] = {}  # counted and not in a step: first sample -> tokens, loss
        self._stepped: set[int] = set()  # in steps since the last commit
        self._steps = 0  # as many
        self._losses: list[float] = []  # of the steps since the last capture
        self._captured: set[int] = set()
        self._captured_steps = 0
        self._captured_in = -1  # the generation of the worker that remembers the capture
        self._stepped_at = trio.current_time()
        self._ends = math.inf  # of the round's compute, if there is anything to hand in
        self._first_round = 0  # what the first stage has committed, as far as we heard

    async def run(self) -> None:
        async with trio.open_nursery() as nursery:
            if self._context.source is None:
                nursery.start_soon(self._follow_first_stage)
            await super().run()

    async def _follow_first_stage(self) -> None:
        """What it said last is remembered: records are short-lived, and whoever has committed the last round may be
        gone by the time that we need to know."""
        while True:
            said = self._context.first_round()
            if said is not None and said != self._first_round:
                self._first_round = said
                self._changed.notify()
            await trio.sleep(WATCH_S)

    def has_run_dry(self, round: int) -> bool:
        """Only a round that the first stage may have left behind while it was in reach: nobody's word makes us give up
        more of the run than that."""
        rounds = self._context.rounds
        return self._context.source is None and 0 < rounds <= min(self._first_round, round + STALENESS)

    async def _train(self, request: TrainRequest) -> TrainResult:
        began, made = trio.current_time(), self._steps
        self._ends = began + request.deadline_s
        if self._context.source is not None:
            await self._validate_if_due()
            began = trio.current_time()
            await self._dispatch_until_over(request)
        else:
            while not self._is_over(request):
                await self._changed.until(lambda: self._is_over(request), WATCH_S)
        async with self._alone():
            work = await self._capture(request)
        self._note_speed(self._steps - made, trio.current_time() - began)
        return work

    def _is_over(self, request: TrainRequest) -> bool:
        assert self.head is not None
        if self._cut_short:
            return True
        if not (self._pending or self._stepped):
            return self.has_run_dry(self.head.round + 1)
        if trio.current_time() > self._ends:
            return True
        later = max(self._server.later_epoch, self._first_round)
        return self._context.source is None and later > self.head.round

    async def _dispatch_until_over(self, request: TrainRequest) -> None:
        """Those under way when the round is over get a moment; what has not come back then is given up, for it might be
        assigned to somebody else."""
        done = trio.Event()

        async def stop() -> None:
            while not self._is_over(request):
                await self._changed.until(lambda: self._is_over(request), WATCH_S)
            with trio.move_on_after(min(GRACE_S, 2 * self._server.answer_s)):
                await done.wait()
            nursery.cancel_scope.cancel()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(stop)
            await self._dispatch(request)
            done.set()
            nursery.cancel_scope.cancel()

    # -- steps -------------------------------------------------------------------------------------------------------

    def _may_step(self) -> bool:
        return len(self._pending) * self._counting.micro_batch >= self._context.schedule.batch_size

    async def _step(self) -> None:
        schedule, head = self._context.schedule, self.head
        assert head is not None
        # However many steps this stage's replicas make in a round, its schedule keeps pace with the other stages'.
        number = max(head.inner_step, 0) + min(self._steps, schedule.steps(head) - 1)
        noted = set(self._pending)  # in the worker's sum; if they are in no step, they were thrown away meanwhile
        try:
            moved = await self._worker_group.step(number)
        except StageRefused as refused:
            if refused.reason == "empty":
                self._pending.clear()  # they are gone, with whatever came between
            elif refused.reason == "not_finite":
                await self._begin_anew()
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
                "inner_step",
                step=number,
                loss=round(self._losses[-1], 4),
                lr=learning_rate(schedule.inner, number),
                tokens_per_s=round(tokens / max(now - self._stepped_at, 1e-6), 1),
                skipped=0,
            )
        self._stepped_at = now

    async def _capture(self, request: TrainRequest) -> TrainResult:
        """Everything since the last commit; what was counted and not stepped on makes one last, smaller step."""
        generation, head = self._worker_group.generation, self.head
        assert head is not None
        if self._pending:
            await self._step()
        counted = union((first, first + self._counting.micro_batch) for first in self._stepped)
        if not self._fits(counted, request) or not head.ledger.is_free(counted):
            self._say_lost("counted out of turn", counted)
            await self._begin_anew()
            counted = ()
        await self._worker_group.export("delta", capture=True)
        self._counting.capture(counted)
        self._captured, self._captured_steps, self._captured_in = set(self._stepped), self._steps, generation
        if self._losses:
            self.loss = math.fsum(self._losses) / len(self._losses)
            self._losses = []
        return TrainResult(self._steps, count(counted), self.loss or 0.0, self._worker_group.delta, counted)

    # -- what stays and what goes ------------------------------------------------------------------------------------

    def _may_go_on(self, request: TrainRequest) -> bool:
        captured_is_lost = bool(self._captured) and self._captured_in != self._worker_group.generation
        return not captured_is_lost and self._fits(self._counting.counted, request)

    def _fits(self, counted: tuple[Range, ...], request: TrainRequest) -> bool:
        """Stage 0 counts what it is assigned, and nothing else: somebody else may be assigned it."""
        return self._context.schedule.stage > 0 or contains(request.assignment.ranges, counted)

    def _note_counted(self, span: Range, tokens: int, loss: float) -> None:
        if span[0] not in self._stepped:  # the step may be heard of first
            self._pending[span[0]] = (tokens, loss)
            if self._may_step():
                self._changed.notify()

    def _note_lost(self) -> None:
        """A contribution that is handed in stays what it is: until it is settled its samples must not count again."""
        self._pending.clear()
        self._stepped.clear()
        self._steps = 0
        self._captured_in = -1
        self._counting.capture((first, first + self._counting.micro_batch) for first in self._captured)
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
        submitted = union((first, first + self._counting.micro_batch) for first in self._captured)
        unmerged = without(submitted, without(submitted, self.head.ledger.free))
        if (
            unmerged and self._context.schedule.stage > 0
        ):  # the first stage issues them again, and they pass through here
            self._say_lost("not merged", unmerged)
        self._stepped -= self._captured
        self._steps = max(0, self._steps - self._captured_steps)
        self._captured, self._captured_steps, self._captured_in = set(), 0, -1
