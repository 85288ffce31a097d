"""A micro-batch at one stage, whoever brought it: forward, on to the next stage, backward, counted once.

The backward that counts cannot be cancelled: once the worker may have added the gradient we wait for its word, so that
what is counted here is always what is counted there, and who asks may be told so before it is done.

Before it we make sure that it is still wanted. Who brought it may have given us up: we stood still, were cut off, or
took long; or somebody asks who has it, to take it elsewhere. Then whoever brought it is asked.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Final

import msgspec
import trio
from torch import Tensor

from peer import faults
from peer.errors import StageRefused, WorkerError
from peer.net.rpc import Reply
from peer.worker.stage_client import MicroBatch, MicroBatchSlot
from swarm.pipeline.accounting import SampleAccounting
from swarm.pipeline.duplicate_checks import Confirm
from swarm.pipeline.messages import RETRIED_MAX, ForwardReply, ForwardRequest
from swarm.pipeline.sender import Sender, Undelivered
from swarm.pipeline.stage_compute import SMOOTHING, BatchSize, StageCompute, Timings
from swarm.protocol.ledger import Range

OWN_RESERVE: Final = 0.1  # of the caller's time, for what is still to be done here when the answer comes
SURE_S: Final = 4.0  # so long after it came it is wanted for sure: the heartbeat takes 5 s to give a frozen peer up
SURE_SHARE: Final = 0.5  # of the caller's time: the same
BACKLOG_S: Final = 2.0  # what we read so soon after we stood still may have lain there
DOUBTS_MAX: Final = 3
DOUBTS_OF_ONE: Final = 2  # a retry asks as it begins, and before it is counted; who asks on and on is not minded
SETTLE_S: Final = 0.2  # who asks waits for half a second
NOTHING: Final = memoryview(b"")


@dataclass(eq=False)
class MicroBatchTask:
    """One micro-batch that is to go through, its group's affairs being settled.

    `tokens` (B, T + 1) int64; `coded`: its hidden state, None on the first stage; `counts`: it is to be counted here if
    it may; `until`: when our caller gives up. What it takes here is added to `times`. `confirm` asks whoever brought
    it; `sure_at`: when it was last wanted for sure; `doubted`: there is reason to ask; `doubts`: those that each
    peer has raised.
    """

    span: Range
    epoch: int
    size: BatchSize
    tokens: Tensor
    coded: memoryview | None = None
    counts: bool = True
    again: bool = False
    until: float = math.inf
    times: Timings = field(default_factory=Timings)
    confirm: Confirm | None = None
    began: float = field(default_factory=trio.current_time)
    sure_at: float = field(default_factory=trio.current_time)
    doubted: bool = False
    doubts: Counter[str] = field(default_factory=Counter)

    def doubt(self, asker: str) -> None:
        if self.doubts[asker] < DOUBTS_OF_ONE:
            self.doubts[asker] += 1
            self.doubted = True


@dataclass(frozen=True)
class MicroBatchResult:
    """It came back. `loss` in nats summed over its tokens; `gradient`: coded, that of its hidden state. `retried`:
    calls that were made once more, here and further on."""

    loss: float
    counted: bool
    gradient: memoryview = NOTHING
    downstream_s: float = 0.0
    waited_s: float = 0.0
    retried: int = 0


class MicroBatchRunner:
    """What a replica does with micro-batches. `sender` is None on the last stage. `on_counted(span, tokens, loss)` is
    called as each is counted; loss in nats, summed. `on_lost(spans)`: when the
    worker was lost, and these with it. `stood_still_until()`: when our event loop last did, in trio's time."""

    def __init__(
        self,
        stage: int,
        compute: StageCompute,
        counting: SampleAccounting,
        sender: Sender | None,
        stood_still_until: Callable[[], float],
    ) -> None:
        self.stage: Final = stage
        self.compute: Final = compute
        self.counting: Final = counting
        self.sender: Final = sender
        self.on_counted: Callable[[Range, int, float], None] = lambda span, tokens, loss: None
        self.on_lost: Callable[[tuple[Range, ...]], None] = lambda spans: None
        self.begun = 0
        """Micro-batches that have begun here."""
        self.answer_s = 0.0
        self._generation = compute.worker_group.generation
        self._stood_still_until = stood_still_until
        self._under_way: dict[Range, list[MicroBatchTask]] = {}
        self._backward_ended = trio.Event()
        self._backwards = 0  # that count, under way
        self._barred = False

    def notice_loss(self) -> None:
        """If the worker was lost since, so is all that was counted in it."""
        if self._generation != self.compute.worker_group.generation:
            self._generation = self.compute.worker_group.generation
            self.on_lost(self.counting.forget())

    @asynccontextmanager
    async def nothing_counts(self) -> AsyncIterator[None]:
        """No backward that counts is under way inside, so that what the worker has counted is what we have."""
        self._barred = True
        try:
            while self._backwards:
                await self._backward_ended.wait()
            yield
        finally:
            self._barred = False

    async def settled(self, span: Range, asker: str) -> bool:
        """Whether the micro-batch is counted here, or is about to be: one at its backward is waited for, but not for
        long. What is under way of it is in doubt from now on, for the `asker` may take it elsewhere."""
        for task in self._under_way.get(span, ()):
            task.doubt(asker)
        self.notice_loss()
        with trio.move_on_after(SETTLE_S):
            while self.counting.is_at(span):
                await self._backward_ended.wait()
                self.notice_loss()
        return self.counting.is_at(span) or self.counting.has(span)

    async def run(self, task: MicroBatchTask) -> MicroBatchResult | Undelivered:
        """Raises StageRefused ("cancelled" where it is wanted no more) and WorkerError (nothing was counted, but later
        stages may have: see `Sender`), and ProtocolViolation where the hidden state does not decode."""
        task.doubted |= self._stood_still_until() > task.began - BACKLOG_S
        with self.under_way(task):
            return await self._run_once(task)

    @contextmanager
    def under_way(self, task: MicroBatchTask) -> Iterator[None]:
        """Who asks meanwhile who has it puts it in doubt; also from within another such block."""
        tasks = self._under_way.setdefault(task.span, [])
        if task in tasks:
            yield
            return
        tasks.append(task)
        try:
            yield
        finally:
            tasks.remove(task)
            if not tasks:
                del self._under_way[task.span]

    async def _run_once(self, task: MicroBatchTask) -> MicroBatchResult | Undelivered:
        try:
            return await self._run(task)
        except StageRefused as refused:
            if refused.reason != "duplicate":
                raise
        task.counts = False  # another copy is under way here, and it is that one which counts
        return await self._run(task)

    async def _run(self, task: MicroBatchTask) -> MicroBatchResult | Undelivered:
        self.notice_loss()
        self.begun += 1
        if faults.reach("pipeline_forward", self.begun) == "drop":
            await trio.sleep_forever()
        started = trio.current_time()
        of = self.compute.name(task.span, task.epoch, task.counts)
        async with self._dropped_unless_done(of) as done:
            if self.sender is None:
                returned: MicroBatchResult | Undelivered = await self._turn(of, task)
            else:
                returned = await self._pass_on(of, task, self.sender)
            done.append(isinstance(returned, MicroBatchResult))
        if isinstance(returned, MicroBatchResult):
            self._measured(trio.current_time() - started, task.times)
        return returned

    async def evaluate(self, task: MicroBatchTask) -> MicroBatchResult | Undelivered:
        """Only forward, for the loss."""
        compute, size, times = self.compute, task.size, task.times
        of = compute.name(task.span, task.epoch, False)
        async with compute.forward_slot(times) as slot:
            await compute.take_in(slot, size, task.tokens, task.coded, times)
            loss = await compute.forward(slot, of, size, times, keep=False)
            if self.sender is None:
                return MicroBatchResult(loss, False)
            payload = await compute.take_out(slot, size, task.tokens, times)
        delivered = await self.sender.send(_request(task, evaluate=True), payload, _ignore, _give_up(task.until))
        if isinstance(delivered, Undelivered):
            return delivered
        return MicroBatchResult(delivered.passed.loss, False, waited_s=delivered.passed.waited_s)

    async def _turn(self, of: MicroBatch, task: MicroBatchTask) -> MicroBatchResult:
        """The last stage: loss and gradient at once, in one slot."""
        compute, size, times = self.compute, task.size, task.times
        async with compute.forward_slot(times) as slot:
            await compute.take_in(slot, size, task.tokens, task.coded, times)
            loss = await compute.forward(slot, of, size, times)
            counted = await self._backward(slot, of, task, loss)
            return MicroBatchResult(loss, counted, await compute.gradient_out(slot, size, times))

    async def _pass_on(self, of: MicroBatch, task: MicroBatchTask, sender: Sender) -> MicroBatchResult | Undelivered:
        compute, size, times = self.compute, task.size, task.times
        async with compute.forward_slot(times) as slot:
            await compute.take_in(slot, size, task.tokens, task.coded, times)
            await compute.forward(slot, of, size, times)
            payload = await compute.take_out(slot, size, task.tokens, times)
        if faults.reach("pipeline_send", self.begun) == "garble":
            payload[size.token_bytes :] = b"\xff" * (len(payload) - size.token_bytes)
        sent = trio.current_time()
        counted, downstream_s, gradient = False, 0.0, NOTHING

        async def accept(reply: Reply[ForwardReply]) -> None:
            nonlocal counted, downstream_s, gradient
            downstream_s = trio.current_time() - sent
            async with compute.backward_slot(times) as slot:
                await compute.take_gradient(slot, size, reply.payload, times)
                counted = await self._backward(slot, of, task, reply.body.loss)
                gradient = await compute.gradient_out(slot, size, times)

        delivered = await sender.send(_request(task), payload, accept, _give_up(task.until), task.confirm)
        if isinstance(delivered, Undelivered):
            return delivered
        passed = delivered.passed
        retried = passed.retried + delivered.tries - 1
        waited_s = min(passed.waited_s, downstream_s)
        return MicroBatchResult(passed.loss, counted, gradient, downstream_s, waited_s, min(retried, RETRIED_MAX))

    async def _backward(self, slot: MicroBatchSlot, of: MicroBatch, task: MicroBatchTask, loss: float) -> bool:
        """Whether it was counted."""
        counting, span = self.counting, task.span
        faults.reach("pipeline_backward", self.begun)
        wanted = of.count and await self._is_wanted(task)
        with trio.CancelScope(shield=True):
            self.notice_loss()
            if wanted and self._barred:
                raise StageRefused("what was counted here is being thrown away: send it again", "cancelled")
            counts = wanted and counting.begin(span, task.epoch)
            self._backwards += counts
            try:
                pass_ = msgspec.structs.replace(of, count=counts)
                await self.compute.backward(slot, pass_, task.size, task.times)
                if counts:
                    counting.done(span)
                    self.on_counted(span, task.size.batch * task.size.length, loss)
            finally:
                if counts:
                    counting.undo(span)  # where it failed
                    self._backwards -= 1
                self.notice_loss()
                ended, self._backward_ended = self._backward_ended, trio.Event()
                ended.set()
        return counts

    async def _is_wanted(self, task: MicroBatchTask) -> bool:
        """Whether it is still to be counted. Nothing happens between a yes and what is done at once after it. Raises
        StageRefused ("cancelled")."""
        doubts = 0
        while task.confirm is not None and self._is_doubtful(task):
            if doubts == DOUBTS_MAX:
                raise StageRefused("it is in doubt whether this micro-batch is wanted: send it again", "cancelled")
            doubts += 1
            asked = trio.current_time()
            task.doubted = False
            if not await task.confirm():
                return False
            task.sure_at = asked
        return True

    def _is_doubtful(self, task: MicroBatchTask) -> bool:
        sure_s = min(SURE_S, SURE_SHARE * (task.until - task.began))
        late = trio.current_time() - task.sure_at > sure_s and not math.isinf(task.until)
        return task.doubted or late or self._stood_still_until() > task.sure_at

    def _measured(self, answer_s: float, times: Timings) -> None:
        self.compute.served(times)
        self.answer_s += (answer_s - self.answer_s) * (SMOOTHING if self.answer_s else 1.0)

    @asynccontextmanager
    async def _dropped_unless_done(self, of: MicroBatch) -> AsyncIterator[list[bool]]:
        """The worker holds what a backward needs; if there is to be none, it lets go of it."""
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
    """The group is filled in by the sender."""
    return ForwardRequest("", task.span, task.epoch, *task.size.at, task.again, evaluate)


def _give_up(until: float) -> float:
    """When a hop must be given up, so that our caller still hears of it."""
    now = trio.current_time()
    return until if math.isinf(until) else now + (1 - OWN_RESERVE) * (until - now)


async def _ignore(reply: Reply[ForwardReply]) -> None:
    """A loss is all there is to it."""
