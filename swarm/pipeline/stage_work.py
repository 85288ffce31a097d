"""A micro-batch at one stage, whoever brought it: forward, on to the next stage, backward, counted once.

The backward that counts cannot be cancelled: once the worker may have added the gradient we wait for its word, so that
what is counted here is always what is counted there.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Final

import msgspec
import trio
from torch import Tensor

from peer import faults
from peer.errors import StageRefused, WorkerError
from peer.rpc import Reply
from peer.stage_gang import MicroBatch, Slot
from swarm.ledger import Range
from swarm.pipeline.compute import SMOOTHING, Size, StageCompute, Times
from swarm.pipeline.counting import Counting
from swarm.pipeline.messages import Pass, Passed
from swarm.pipeline.sender import Sender, Undelivered

OWN_RESERVE: Final = 0.1  # of the caller's time, for what is still to be done here when the answer comes
STALL_S: Final = 1.0
STALL: Final = 4.0  # times the usual: then something was wrong
HANG_UP_S: Final = 0.2
NOTHING: Final = memoryview(b"")


@dataclass
class Errand:
    """One micro-batch that is to go through, its group's affairs being settled.

    `tokens` (B, T + 1) int64; `coded`: its hidden state, None on the first stage; `counts`: it is to be counted here if
    it may; `until`: when our caller gives up. What it takes here is added to `times`.
    """

    span: Range
    epoch: int
    size: Size
    tokens: Tensor
    coded: memoryview | None = None
    counts: bool = True
    again: bool = False
    until: float = math.inf
    times: Times = field(default_factory=Times)
    began: float = field(default_factory=trio.current_time)


@dataclass(frozen=True)
class Returned:
    """It came back. `loss` in nats summed over its tokens; `gradient`: coded, that of its hidden state. `retried`:
    calls that were made once more, here and further on."""

    loss: float
    counted: bool
    gradient: memoryview = NOTHING
    downstream_s: float = 0.0
    waited_s: float = 0.0
    retried: int = 0


class StageWork:
    """What a replica does with micro-batches. `sender` is None on the last stage. `on_counted(span, tokens, loss)` is
    called as each is counted; loss in nats, summed. `on_lost(spans)`: when the
    worker was lost, and these with it."""

    def __init__(self, stage: int, compute: StageCompute, counting: Counting, sender: Sender | None) -> None:
        self.stage: Final = stage
        self.compute: Final = compute
        self.counting: Final = counting
        self.sender: Final = sender
        self.on_counted: Callable[[Range, int, float], None] = lambda span, tokens, loss: None
        self.on_lost: Callable[[tuple[Range, ...]], None] = lambda spans: None
        self.begun = 0
        """Micro-batches that have begun here."""
        self.answer_s = 0.0
        self._generation = compute.gang.generation
        self._backward_ended = trio.Event()

    def notice_loss(self) -> None:
        """If the worker was lost since, so is all that was counted in it."""
        if self._generation != self.compute.gang.generation:
            self._generation = self.compute.gang.generation
            self.on_lost(self.counting.forget())

    async def settled(self, span: Range) -> bool:
        """Whether the micro-batch is counted here; waits for a backward that is under way."""
        while True:
            self.notice_loss()
            if not self.counting.is_at(span):
                return self.counting.has(span)
            await self._backward_ended.wait()

    async def run(self, errand: Errand) -> Returned | Undelivered:
        """Raises StageRefused and WorkerError (nothing was counted, but later stages may have: see `Sender`), and
        ProtocolViolation where the hidden state does not decode."""
        try:
            return await self._run(errand)
        except StageRefused as refused:
            if refused.reason != "duplicate":
                raise
        errand.counts = False  # another copy is under way here, and it is that one which counts
        return await self._run(errand)

    async def _run(self, errand: Errand) -> Returned | Undelivered:
        self.notice_loss()
        self.begun += 1
        if faults.reach("pipeline_forward", self.begun) == "drop":
            await trio.sleep_forever()
        started = trio.current_time()
        of = self.compute.name(errand.span, errand.epoch, errand.counts)
        async with self._dropped_unless_done(of) as done:
            if self.sender is None:
                returned: Returned | Undelivered = await self._turn(of, errand)
            else:
                returned = await self._pass_on(of, errand, self.sender)
            done.append(isinstance(returned, Returned))
        if isinstance(returned, Returned):
            self._measured(trio.current_time() - started, errand.times)
        return returned

    async def evaluate(self, errand: Errand) -> Returned | Undelivered:
        """Only forward, for the loss."""
        compute, size, times = self.compute, errand.size, errand.times
        of = compute.name(errand.span, errand.epoch, False)
        async with compute.forward_slot(times) as slot:
            await compute.take_in(slot, size, errand.tokens, errand.coded, times)
            loss = await compute.forward(slot, of, size, times, keep=False)
            if self.sender is None:
                return Returned(loss, False)
            payload = await compute.take_out(slot, size, errand.tokens, times)
        delivered = await self.sender.send(_request(errand, evaluate=True), payload, _ignore, _give_up(errand.until))
        if isinstance(delivered, Undelivered):
            return delivered
        return Returned(delivered.passed.loss, False, waited_s=delivered.passed.waited_s)

    async def _turn(self, of: MicroBatch, errand: Errand) -> Returned:
        """The last stage: loss and gradient at once, in one slot."""
        compute, size, times = self.compute, errand.size, errand.times
        async with compute.forward_slot(times) as slot:
            await compute.take_in(slot, size, errand.tokens, errand.coded, times)
            loss = await compute.forward(slot, of, size, times)
            counted = await self._backward(slot, of, errand, loss)
            return Returned(loss, counted, await compute.gradient_out(slot, size, times))

    async def _pass_on(self, of: MicroBatch, errand: Errand, sender: Sender) -> Returned | Undelivered:
        compute, size, times = self.compute, errand.size, errand.times
        async with compute.forward_slot(times) as slot:
            await compute.take_in(slot, size, errand.tokens, errand.coded, times)
            await compute.forward(slot, of, size, times)
            payload = await compute.take_out(slot, size, errand.tokens, times)
        if faults.reach("pipeline_send", self.begun) == "garble":
            payload[size.token_bytes :] = b"\xff" * (len(payload) - size.token_bytes)
        sent = trio.current_time()
        counted, downstream_s, gradient = False, 0.0, NOTHING

        async def accept(reply: Reply[Passed]) -> None:
            nonlocal counted, downstream_s, gradient
            downstream_s = trio.current_time() - sent
            async with compute.backward_slot(times) as slot:
                await compute.take_gradient(slot, size, reply.payload, times)
                counted = await self._backward(slot, of, errand, reply.body.loss)
                gradient = await compute.gradient_out(slot, size, times)

        delivered = await sender.send(_request(errand), payload, accept, _give_up(errand.until))
        if isinstance(delivered, Undelivered):
            return delivered
        passed = delivered.passed
        retried = passed.retried + delivered.tries - 1
        return Returned(passed.loss, counted, gradient, downstream_s, passed.waited_s, retried)

    async def _backward(self, slot: Slot, of: MicroBatch, errand: Errand, loss: float) -> bool:
        """Whether it was counted."""
        counting, span = self.counting, errand.span
        faults.reach("pipeline_backward", self.begun)
        if trio.current_time() - errand.began > max(STALL_S, STALL * self.answer_s):
            # We may have been frozen, and given up for it: then our caller's hanging up is on its way to this task.
            await trio.sleep(HANG_UP_S)
        with trio.CancelScope(shield=True):
            self.notice_loss()
            counts = of.count and counting.begin(span, errand.epoch)
            try:
                pass_ = msgspec.structs.replace(of, count=counts)
                await self.compute.backward(slot, pass_, errand.size, errand.times)
                if counts:
                    counting.done(span)
                    self.on_counted(span, errand.size.batch * errand.size.length, loss)
            finally:
                if counts:
                    counting.undo(span)  # where it failed
                self.notice_loss()
                ended, self._backward_ended = self._backward_ended, trio.Event()
                ended.set()
        return counts

    def _measured(self, answer_s: float, times: Times) -> None:
        self.compute.served(times)
        self.answer_s += (answer_s - self.answer_s) * (SMOOTHING if self.answer_s else 1.0)

    @asynccontextmanager
    async def _dropped_unless_done(self, of: MicroBatch) -> AsyncIterator[list[bool]]:
        """The worker holds what a backward needs; if there is to be none, it lets go of it."""
        done: list[bool] = []
        try:
            yield done
        finally:
            if not any(done) and self.compute.gang.worker_pid is not None:
                with trio.CancelScope(shield=True):
                    try:
                        await self.compute.gang.drop(of)
                    except WorkerError:
                        self.notice_loss()


def _request(errand: Errand, evaluate: bool = False) -> Pass:
    """The group is filled in by the sender."""
    return Pass("", errand.span, errand.epoch, *errand.size.at, errand.again, evaluate)


def _give_up(until: float) -> float:
    """When a hop must be given up, so that our caller still hears of it."""
    now = trio.current_time()
    return until if math.isinf(until) else now + (1 - OWN_RESERVE) * (until - now)


async def _ignore(reply: Reply[Passed]) -> None:
    """A loss is all there is to it."""
