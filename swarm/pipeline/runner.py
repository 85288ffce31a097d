"""A micro-batch at one stage: forward, on to the next stage, backward, counted once.

The backward that counts cannot be cancelled. Once the worker may have added the gradient we wait for its answer, so
what is counted here is always what is counted in the worker, and a peer that asks gets the answer even before it is
done. Before the backward `DuplicateCheck` makes sure that the micro-batch is still wanted.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Final

import msgspec
import trio

from peer import faults
from peer.bounds import smoothed
from peer.errors import StageRefused, WorkerError
from peer.net.rpc import Reply
from peer.notifier import Notifier
from peer.worker.stage_client import MicroBatch, MicroBatchSlot
from swarm.pipeline.accounting import SampleAccounting
from swarm.pipeline.duplicate_checks import BACKLOG_S
from swarm.pipeline.messages import ForwardReply, ForwardRequest, token_bytes
from swarm.pipeline.micro_batch import NOTHING, MicroBatchResult, MicroBatchTask
from swarm.pipeline.sender import Sender
from swarm.pipeline.stage_compute import SMOOTHING, StageCompute
from swarm.protocol.ledger import Range

OWN_RESERVE: Final = 0.1  # of the caller's time, for the work that is left here when the answer comes
SETTLE_S: Final = 0.2  # the asking peer waits for half a second


class MicroBatchRunner:
    """Takes micro-batches through this stage. `sender` is None on the last stage."""

    def __init__(
        self,
        stage: int,
        compute: StageCompute,
        accounting: SampleAccounting,
        sender: Sender | None,
        stood_still_until: Callable[[], float],
        on_counted: Callable[[Range, int, float], None],
        on_lost: Callable[[tuple[Range, ...]], None],
    ) -> None:
        """`stood_still_until()`: when our event loop was last frozen, in trio's time. `on_counted(samples, tokens,
        loss)` is called for each counted micro-batch, with how many of its tokens have a loss, and their losses in
        nats, summed; `on_lost(ranges)` when the worker was lost, with all its counted samples."""
        self.stage: Final = stage
        self.compute: Final = compute
        self.accounting: Final = accounting
        self.sender: Final = sender
        self.begun = 0
        """Micro-batches that have begun here."""
        self.answer_s = 0.0
        """Seconds from a micro-batch's arrival to its gradient, smoothed; 0 until measured."""
        self._on_counted, self._on_lost = on_counted, on_lost
        self._generation = compute.worker_group.generation
        self._stood_still_until = stood_still_until
        self._under_way: dict[Range, list[MicroBatchTask]] = {}
        self._backward_ended = Notifier()
        self._backwards = 0  # in progress, of those that count
        self._barred = False

    def notice_loss(self) -> None:
        """Forget what was counted if the worker has been lost since."""
        if self._generation != self.compute.worker_group.generation:
            self._generation = self.compute.worker_group.generation
            self._on_lost(self.accounting.forget())

    @asynccontextmanager
    async def nothing_counts(self) -> AsyncIterator[None]:
        """Hold off counting backwards inside the block, so that the worker has counted exactly what we have."""
        self._barred = True
        try:
            while self._backwards:
                await self._backward_ended.wait()
            yield
        finally:
            self._barred = False

    async def is_counted(self, samples: Range, asker: str) -> bool:
        """Return whether the micro-batch is counted here or is about to be. A backward in progress is waited for, but
        not for long. A copy that is under way here may be a duplicate from now on: `asker` may send it elsewhere."""
        for task in self._under_way.get(samples, ()):
            task.check.suspect(asker)
        self.notice_loss()
        with trio.move_on_after(SETTLE_S):
            while self.accounting.is_at(samples):
                await self._backward_ended.wait()
                self.notice_loss()
        return self.accounting.is_at(samples) or self.accounting.has(samples)

    async def run(self, task: MicroBatchTask) -> MicroBatchResult:
        """Take the micro-batch through. Raises StageRefused ("cancelled" where it is not wanted any more), WorkerError
        (nothing was counted here, but later stages may have counted it), and ProtocolViolation where the hidden state
        does not decode."""
        task.check.maybe_duplicate |= self._stood_still_until() > task.check.began - BACKLOG_S
        with self.under_way(task):
            try:
                return await self._run(task)
            except StageRefused as refused:
                if refused.reason != "duplicate":
                    raise
            task.counts = False  # the other copy that is under way here counts
            return await self._run(task)

    @contextmanager
    def under_way(self, task: MicroBatchTask) -> Iterator[None]:
        """Inside the block a question for the micro-batch's holder makes the task check for duplicates. Reentrant."""
        tasks = self._under_way.setdefault(task.samples, [])
        if task in tasks:
            yield
            return
        tasks.append(task)
        try:
            yield
        finally:
            tasks.remove(task)
            if not tasks:
                del self._under_way[task.samples]

    async def _run(self, task: MicroBatchTask) -> MicroBatchResult:
        self.notice_loss()
        self.begun += 1
        if faults.reach("pipeline_forward", self.begun) == "drop":
            await trio.sleep_forever()
        started = trio.current_time()
        of = self.compute.name(task, task.counts)
        async with self._dropped_unless_done(of) as done:
            if self.sender is None:
                result = await self._run_last(of, task)
            else:
                result = await self._run_through(of, task, self.sender)
            done.append(result.done)
        if result.done:
            self.compute.served(task)
            self.answer_s = smoothed(self.answer_s or None, trio.current_time() - started, SMOOTHING)
        return result

    async def evaluate(self, task: MicroBatchTask) -> MicroBatchResult:
        """Run the forward pass only, for the loss."""
        compute = self.compute
        of = compute.name(task, False)
        async with compute.forward_slot(task) as slot:
            await compute.take_in(slot, task)
            loss = await compute.forward(slot, of, task, keep=False)
            if self.sender is None:
                return MicroBatchResult("done", loss=loss, waited_s=task.queued_s)
            payload = await compute.take_out(slot, task)
        answer = await self.sender.send(_request(task, evaluate=True), payload, _ignore, _give_up(task.until))
        if answer.outcome != "done":
            return _not_done(answer)
        return MicroBatchResult("done", loss=answer.loss, waited_s=task.queued_s + answer.waited_s)

    async def _run_last(self, of: MicroBatch, task: MicroBatchTask) -> MicroBatchResult:
        """The last stage: loss and gradient at once, in one slot."""
        compute = self.compute
        async with compute.forward_slot(task) as slot:
            await compute.take_in(slot, task)
            loss = await compute.forward(slot, of, task)
            counted = await self._backward(slot, of, task, loss)
            gradient = await compute.gradient_out(slot, task)
        return MicroBatchResult("done", counted=counted, loss=loss, gradient=gradient, waited_s=task.queued_s)

    async def _run_through(self, of: MicroBatch, task: MicroBatchTask, sender: Sender) -> MicroBatchResult:
        """Any other stage: the gradient comes from the next one."""
        compute = self.compute
        async with compute.forward_slot(task) as slot:
            await compute.take_in(slot, task)
            await compute.forward(slot, of, task)
            payload = await compute.take_out(slot, task)
        if faults.reach("pipeline_send", self.begun) == "garble":
            ids = token_bytes(task.batch, task.length)
            payload[ids:] = b"\xff" * (len(payload) - ids)
        sent = trio.current_time()
        counted, downstream_s, gradient = False, 0.0, NOTHING

        async def accept(reply: Reply[ForwardReply]) -> None:
            nonlocal counted, downstream_s, gradient
            downstream_s = trio.current_time() - sent
            async with compute.backward_slot(task) as slot:
                await compute.take_gradient(slot, task, reply.payload)
                counted = await self._backward(slot, of, task, reply.body.loss)
                gradient = await compute.gradient_out(slot, task)

        answer = await sender.send(_request(task), payload, accept, _give_up(task.until), task.check.confirm)
        if answer.outcome != "done":
            return _not_done(answer)
        return MicroBatchResult(
            "done",
            counted=counted,
            loss=answer.loss,
            gradient=gradient,
            downstream_s=downstream_s,
            waited_s=task.queued_s + min(answer.waited_s, downstream_s),
            retried=answer.retried,
        )

    async def _backward(self, slot: MicroBatchSlot, of: MicroBatch, task: MicroBatchTask, loss: float) -> bool:
        """Run the backward; return whether it was counted."""
        accounting, samples = self.accounting, task.samples
        faults.reach("pipeline_backward", self.begun)
        wanted = of.count and await self._is_wanted(task)
        with trio.CancelScope(shield=True):
            self.notice_loss()
            if wanted and self._barred:
                raise StageRefused("what was counted here is being thrown away: send it again", "cancelled")
            counts = wanted and accounting.begin(samples, task.epoch)
            self._backwards += counts
            try:
                pass_ = msgspec.structs.replace(of, count=counts)
                await self.compute.backward(slot, pass_, task)
                if counts:
                    accounting.done(samples)
                    self._on_counted(samples, task.targets, loss)
            finally:
                if counts:
                    accounting.undo(samples)  # no effect after `done`
                    self._backwards -= 1
                self.notice_loss()
                self._backward_ended.notify()
        return counts

    async def _is_wanted(self, task: MicroBatchTask) -> bool:
        return await task.check.is_wanted(self._stood_still_until)

    @asynccontextmanager
    async def _dropped_unless_done(self, of: MicroBatch) -> AsyncIterator[list[bool]]:
        """Tell the worker to drop the activations it keeps for a backward, if there is to be none."""
        done: list[bool] = []
        try:
            yield done
        finally:
            if not any(done) and self.compute.worker_group.worker_pid is not None:
                with trio.CancelScope(shield=True):
                    try:
                        await self.compute.worker_group.drop(of)
                    except WorkerError:
                        self.notice_loss()


def _request(task: MicroBatchTask, evaluate: bool = False) -> ForwardRequest:
    """Return the request, without the group: the sender fills that in."""
    return ForwardRequest("", task.samples, task.epoch, task.batch, task.length, task.again, evaluate)


def _not_done(answer: ForwardReply) -> MicroBatchResult:
    return MicroBatchResult(answer.outcome, answer.cause, answer.reason, answer.begun, retried=answer.retried)


def _give_up(until: float) -> float:
    """Return when a hop must be abandoned, so that our caller still learns of it."""
    now = trio.current_time()
    return until if math.isinf(until) else now + (1 - OWN_RESERVE) * (until - now)


async def _ignore(reply: Reply[ForwardReply]) -> None:
    """Accept the answer to an evaluation: it has nothing but a loss."""
