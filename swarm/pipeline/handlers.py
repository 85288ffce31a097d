"""Where the stage before hands in micro-batches: checks, admission, and the answer.

Wrong input is refused with its cause, and who sent it is struck if it cannot have been an honest mistake: sizes and
token ids that the run's rules forbid, bytes that do not decode to finite values. To be in another group or epoch is no
offence.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Final

import trio

from peer import faults
from peer.errors import BarnraiseError, ProtocolViolation, StageRefused, WorkerError
from peer.net.host import Host
from peer.net.method import Call
from peer.net.wire import Buffer
from swarm.pipeline.accounting import Verdict
from swarm.pipeline.config import PipelineSettings
from swarm.pipeline.duplicate_checks import is_awaited
from swarm.pipeline.messages import REASON_MAX, RETRIED_MAX, Cause, ForwardReply, ForwardRequest
from swarm.pipeline.micro_batch import MicroBatchResult, MicroBatchRunner, MicroBatchTask
from swarm.pipeline.sender import Undelivered

HOLD_SHARE: Final = 0.5  # of the caller's time: it must be able to hear "later" and come again
WORKER_S: Final = 1.0  # when to come again while the worker is starting
_CLOSE_S: Final = 5.0
_NOTHING: Final = b""

Answer = tuple[ForwardReply, Buffer]


class ForwardHandler:
    """Serves PASS for the stage of `work`. `before()`: the replicas of the stage before it."""

    def __init__(
        self, host: Host, rules: PipelineSettings, work: MicroBatchRunner, before: Callable[[], Container[str]]
    ) -> None:
        self.later_epoch = 0
        self.on_later: Callable[[int], None] = lambda epoch: None
        self._host, self._rules, self._work, self._before = host, rules, work, before
        self._group = rules.groups[work.stage]
        self._under_way: set[trio.CancelScope] = set()
        self._held = 0
        self._closing = False
        self._changed = trio.Event()  # set and replaced when the epoch moves, or a call ends

    def moved(self) -> None:
        """The epoch has changed: held calls look again."""
        self._change()

    async def close(self) -> None:
        """Answer "elsewhere" from now on, and wait until nothing is under way."""
        self._closing = True
        with trio.move_on_after(_CLOSE_S) as timeout:
            timeout.shield = True
            while self._under_way:
                for scope in self._under_way:
                    scope.cancel()
                await self._changed.wait()

    async def serve(self, call: Call[ForwardRequest]) -> Answer:
        """The handler of PASS."""
        request = call.body
        if request.group != self._group or self._closing:
            return _elsewhere()
        try:
            self._check_shape(request, len(call.payload))
        except ProtocolViolation as error:
            return self._refuse(call.peer, "shape", error)
        try:
            task = self._task(call.peer, request, call.payload)
        except ProtocolViolation as error:
            return self._refuse(call.peer, "value", error)
        with self._scope() as scope:
            answer = await self._serve(call.peer, request, task)
        return _elsewhere(begun=True) if scope.cancelled_caught else answer

    async def _serve(self, peer: str, request: ForwardRequest, task: MicroBatchTask) -> Answer:
        not_now = await self._wait_for_epoch(peer, request, task)
        if not_now is not None:
            return not_now
        compute = self._work.compute
        if len(self._under_way) - self._held > self._rules.places or compute.waiting >= compute.worker_group.spec.slots:
            wait_s = compute.waiting * compute.service_s
            return ForwardReply("busy", "full", "the queue is full", retry_after_s=wait_s), _NOTHING
        try:
            returned = await (self._work.evaluate(task) if request.evaluate else self._work.run(task))
        except ProtocolViolation as error:
            return self._refuse(peer, "value", error)
        except StageRefused as refused:
            return self._stage_refused(refused)
        except WorkerError as error:
            return ForwardReply("later", "worker", _said(error), WORKER_S, begun=True), _NOTHING
        return await self._answer(returned, task)

    async def _answer(self, returned: MicroBatchResult | Undelivered, task: MicroBatchTask) -> Answer:
        if isinstance(returned, Undelivered):
            retried = min(max(0, returned.tries - 1), RETRIED_MAX)
            passed = ForwardReply(
                returned.outcome, returned.cause, returned.reason, begun=returned.begun, retried=retried
            )
            return passed, _NOTHING
        script = faults.reach("pipeline_answer", self._work.begun)
        if script == "drop":
            await trio.sleep_forever()
        gradient = returned.gradient if script != "garble" else b"\xff" * len(returned.gradient)
        times = task.times
        passed = ForwardReply(
            "done",
            loss=returned.loss,
            queued_s=times.queued_s,
            downstream_s=returned.downstream_s,
            waited_s=times.queued_s + returned.waited_s,
            retried=returned.retried,
        )
        return passed, gradient

    def _check_shape(self, request: ForwardRequest, payload_bytes: int) -> None:
        """Raises ProtocolViolation where the rules do not allow it."""
        rules, compute = self._rules, self._work.compute
        first, last = request.span
        full = request.batch == rules.micro_batch and first % rules.micro_batch == 0
        if last - first != request.batch or request.batch > rules.micro_batch or not (full or request.evaluate):
            raise ProtocolViolation(f"samples {first} to {last} in {request.batch} sequences are no micro-batch")
        if request.length != rules.seq_len:
            raise ProtocolViolation(f"sequences of {request.length} tokens instead of {rules.seq_len}")
        wanted = compute.payload_bytes(compute.size(request.batch, request.length))
        if payload_bytes != wanted:
            raise ProtocolViolation(f"a micro-batch of {payload_bytes} bytes instead of {wanted}")

    def _task(self, peer: str, request: ForwardRequest, payload: memoryview) -> MicroBatchTask:
        """Raises ProtocolViolation for token ids outside the vocabulary."""
        compute = self._work.compute
        size = compute.size(request.batch, request.length)
        return MicroBatchTask(
            span=request.span,
            epoch=request.epoch,
            size=size,
            tokens=compute.read_tokens(payload, size),
            coded=payload[size.token_bytes :],
            again=request.again,
            until=trio.current_effective_deadline(),
            confirm=partial(self._is_awaited, peer, request),
        )

    async def _is_awaited(self, peer: str, request: ForwardRequest) -> bool:
        """True; StageRefused if `peer` does not say that it still waits for the answer."""
        if await is_awaited(self._host, peer, request.span, request.ticket):
            return True
        raise StageRefused(f"{peer} does not say that it still waits for this micro-batch: send it again", "cancelled")

    async def _wait_for_epoch(self, peer: str, request: ForwardRequest, task: MicroBatchTask) -> Answer | None:
        """Hold a call that has come too early; None when its epoch is here."""
        counting, rules = self._work.counting, self._rules
        started = trio.current_time()
        hold_until = min(started + rules.hold_s, started + HOLD_SHARE * (task.until - started))
        while (verdict := self._verdict(peer, request)) == "early":
            left_s = hold_until - trio.current_time()
            if left_s <= 0 or self._held >= rules.places:
                reason = f"this stage is in epoch {counting.epoch}, not yet in {request.epoch}"
                return ForwardReply("later", "early", reason, retry_after_s=WORKER_S), _NOTHING
            self._held += 1
            try:
                with trio.move_on_after(left_s):
                    await self._changed.wait()
            finally:
                self._held -= 1
        task.times.queued_s += trio.current_time() - started
        task.counts = verdict == "count"
        if verdict == "stale":
            reason = f"this stage is in epoch {counting.epoch}, and {request.epoch} is too old"
            return ForwardReply("refused", "stale", reason), _NOTHING
        return None

    def _verdict(self, peer: str, request: ForwardRequest) -> Verdict:
        """Notes where a replica of the stage before is in a later epoch: the next one, for all that we believe it."""
        counting = self._work.counting
        later = min(request.epoch, counting.epoch + 1)
        if later > max(self.later_epoch, counting.epoch) and peer in self._before():
            self.later_epoch = later
            self.on_later(later)
        return counting.verdict(request.span, request.epoch)

    def _stage_refused(self, refused: StageRefused) -> Answer:
        """Nothing was counted here; later stages may have."""
        begun = self._work.sender is not None
        if refused.reason == "full":
            return ForwardReply("busy", "full", _said(refused), self._work.compute.service_s, begun), _NOTHING
        if refused.reason in ("epoch", "no_weights", "unknown", "cancelled"):  # weights are just being changed
            return ForwardReply("later", "worker", _said(refused), WORKER_S, begun), _NOTHING
        cause: Cause = "not_finite" if refused.reason == "not_finite" else "value"
        return ForwardReply("refused", cause, _said(refused), begun=begun), _NOTHING

    def _refuse(self, peer: str, cause: Cause, error: ProtocolViolation) -> Answer:
        self._host.rpc.server.strike(peer, f"pipeline.pass: {error}")
        return ForwardReply("refused", cause, _said(error)), _NOTHING

    @contextmanager
    def _scope(self) -> Iterator[trio.CancelScope]:
        """What `close` ends."""
        with trio.CancelScope() as scope:
            self._under_way.add(scope)
            try:
                yield scope
            finally:
                self._under_way.remove(scope)
                if self._closing:
                    self._change()

    def _change(self) -> None:
        changed, self._changed = self._changed, trio.Event()
        changed.set()


def _said(error: BarnraiseError) -> str:
    return str(error)[:REASON_MAX]


def _elsewhere(begun: bool = False) -> Answer:
    return ForwardReply("elsewhere", "closing", "this peer is not in that group", begun=begun), _NOTHING
