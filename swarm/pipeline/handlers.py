"""The handler of FORWARD: checks, admission, and the answer.

Wrong input is refused with its cause. The sender is penalized if its input cannot be an honest mistake: sizes and token
ids that the settings forbid, bytes that do not decode to finite values. To be in another group or epoch is no
violation.
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
from peer.notifier import Notifier
from swarm.pipeline.accounting import Verdict
from swarm.pipeline.config import PipelineSettings
from swarm.pipeline.duplicate_checks import DuplicateCheck, still_waits
from swarm.pipeline.messages import REASON_MAX, RETRIED_MAX, Cause, ForwardReply, ForwardRequest, token_bytes
from swarm.pipeline.micro_batch import MicroBatchResult, MicroBatchTask
from swarm.pipeline.runner import MicroBatchRunner
from swarm.protocol.ledger import Range

HOLD_SHARE: Final = 0.5  # of the caller's time: it must be able to hear "later" and call again
WORKER_S: Final = 1.0  # after which to call again while the worker is starting
_CLOSE_S: Final = 5.0
_NOTHING: Final = b""

Answer = tuple[ForwardReply, Buffer]


class ForwardHandler:
    """Serves FORWARD for the stage of `runner`. `senders()`: the replicas of the stage before it. `on_counted(samples,
    peer)`: what one of them has sent was counted.

    Calls of an epoch that the group has not reached are held. The calls in progress are bounded, so that a slow replica
    answers "busy" instead of hoarding micro-batches.
    """

    def __init__(
        self,
        host: Host,
        settings: PipelineSettings,
        runner: MicroBatchRunner,
        senders: Callable[[], Container[str]],
        on_later_epoch: Callable[[int], None],
        on_counted: Callable[[Range, str], None],
    ) -> None:
        self.later_epoch = 0
        """The latest epoch of a micro-batch from the stage before. Above ours: it has committed since."""
        self._host, self._settings, self._runner, self._senders = host, settings, runner, senders
        self._on_later_epoch, self._on_counted = on_later_epoch, on_counted
        self._group = settings.groups[runner.stage]
        self._under_way: set[trio.CancelScope] = set()
        self._held = 0
        self._closing = self._draining = False
        self._changed = Notifier()  # notified when the epoch moves, or a call ends

    def moved(self) -> None:
        """Let held calls look again: the epoch has changed."""
        self._changed.notify()

    def drain(self) -> None:
        """Answer "elsewhere" to new calls from now on; those in progress continue."""
        self._draining = True

    @property
    def idle(self) -> bool:
        """Whether no call is in progress."""
        return not self._under_way

    async def close(self) -> None:
        """Answer "elsewhere" from now on, and wait until no call is in progress."""
        self._closing = True
        with trio.move_on_after(_CLOSE_S) as timeout:
            timeout.shield = True
            while self._under_way:
                for scope in self._under_way:
                    scope.cancel()
                await self._changed.wait()

    async def serve(self, call: Call[ForwardRequest]) -> Answer:
        """Answer one FORWARD."""
        request = call.body
        if request.group != self._group or self._closing or self._draining:
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
        compute, concurrent = self._runner.compute, len(self._under_way) - self._held
        if concurrent > self._settings.max_concurrent or compute.waiting >= compute.worker_group.spec.slots:
            wait_s = compute.waiting * compute.service_s
            return ForwardReply("busy", "full", "the queue is full", retry_after_s=wait_s), _NOTHING
        try:
            result = await (self._runner.evaluate(task) if request.evaluate else self._runner.run(task))
        except ProtocolViolation as error:
            return self._refuse(peer, "value", error)
        except StageRefused as refused:
            return self._stage_refused(refused)
        except WorkerError as error:
            return ForwardReply("later", "worker", _said(error), WORKER_S, begun=True), _NOTHING
        if result.counted:
            self._on_counted(task.samples, peer)
        return await self._answer(result, task)

    async def _answer(self, result: MicroBatchResult, task: MicroBatchTask) -> Answer:
        retried = min(result.retried, RETRIED_MAX)
        if not result.done:
            reply = ForwardReply(result.outcome, result.cause, result.reason, begun=result.begun, retried=retried)
            return reply, _NOTHING
        script = faults.reach("pipeline_answer", self._runner.begun)
        if script == "drop":
            await trio.sleep_forever()
        gradient = result.gradient if script != "garble" else b"\xff" * len(result.gradient)
        reply = ForwardReply(
            "done",
            loss=result.loss,
            queued_s=task.queued_s,
            downstream_s=result.downstream_s,
            waited_s=result.waited_s,
            retried=retried,
        )
        return reply, gradient

    def _check_shape(self, request: ForwardRequest, payload_bytes: int) -> None:
        """Raises ProtocolViolation where the settings do not allow the request's sizes."""
        settings, compute = self._settings, self._runner.compute
        first, end = request.samples
        full = request.batch == settings.micro_batch and first % settings.micro_batch == 0
        if end - first != request.batch or request.batch > settings.micro_batch or not (full or request.evaluate):
            raise ProtocolViolation(f"samples {first} to {end} in {request.batch} sequences are no micro-batch")
        if request.length != settings.seq_len:
            raise ProtocolViolation(f"sequences of {request.length} tokens instead of {settings.seq_len}")
        wanted = compute.payload_bytes(request.batch, request.length)
        if payload_bytes != wanted:
            raise ProtocolViolation(f"a micro-batch of {payload_bytes} bytes instead of {wanted}")

    def _task(self, peer: str, request: ForwardRequest, payload: memoryview) -> MicroBatchTask:
        """Raises ProtocolViolation for token ids outside the vocabulary."""
        compute, until = self._runner.compute, trio.current_effective_deadline()
        return MicroBatchTask(
            samples=request.samples,
            epoch=request.epoch,
            tokens=compute.read_tokens(payload, request.batch, request.length),
            coded=payload[token_bytes(request.batch, request.length) :],
            again=request.again,
            until=until,
            check=DuplicateCheck(partial(self._confirm, peer, request), until),
        )

    async def _confirm(self, peer: str, request: ForwardRequest) -> bool:
        """Return True; StageRefused if `peer` does not say that it still waits for the answer."""
        if await still_waits(self._host, peer, request.samples, request.ticket):
            return True
        raise StageRefused(f"{peer} does not say that it still waits for this micro-batch: send it again", "cancelled")

    async def _wait_for_epoch(self, peer: str, request: ForwardRequest, task: MicroBatchTask) -> Answer | None:
        """Hold a call that has come too early. None when the group has reached its epoch, else the answer."""
        accounting, settings = self._runner.accounting, self._settings
        started = trio.current_time()
        hold_until = min(started + settings.hold_s, started + HOLD_SHARE * (task.until - started))
        while (verdict := self._verdict(peer, request)) == "early":
            left_s = hold_until - trio.current_time()
            if left_s <= 0 or self._held >= settings.max_concurrent:
                reason = f"this stage is in epoch {accounting.epoch}, not yet in {request.epoch}"
                return ForwardReply("later", "early", reason, retry_after_s=WORKER_S), _NOTHING
            self._held += 1
            try:
                await self._changed.wait(left_s)
            finally:
                self._held -= 1
        task.queued_s += trio.current_time() - started
        task.counts = verdict == "count"
        if verdict == "stale":
            reason = f"this stage is in epoch {accounting.epoch}, and {request.epoch} is too old"
            return ForwardReply("refused", "stale", reason), _NOTHING
        return None

    def _verdict(self, peer: str, request: ForwardRequest) -> Verdict:
        """Also note that a replica of the stage before is in a later epoch; at most the next one is believed."""
        accounting = self._runner.accounting
        later = min(request.epoch, accounting.epoch + 1)
        if later > max(self.later_epoch, accounting.epoch) and peer in self._senders():
            self.later_epoch = later
            self._on_later_epoch(later)
        return accounting.verdict(request.samples, request.epoch)

    def _stage_refused(self, refused: StageRefused) -> Answer:
        """Nothing was counted here; later stages may have counted it."""
        begun = self._runner.sender is not None
        if refused.reason == "full":
            return ForwardReply("busy", "full", _said(refused), self._runner.compute.service_s, begun), _NOTHING
        if refused.reason in ("epoch", "no_weights", "unknown", "cancelled"):  # the weights are being changed
            return ForwardReply("later", "worker", _said(refused), WORKER_S, begun), _NOTHING
        cause: Cause = "not_finite" if refused.reason == "not_finite" else "value"
        return ForwardReply("refused", cause, _said(refused), begun=begun), _NOTHING

    def _refuse(self, peer: str, cause: Cause, error: ProtocolViolation) -> Answer:
        self._host.rpc.server.penalize(peer, f"pipeline.forward: {error}")
        return ForwardReply("refused", cause, _said(error)), _NOTHING

    @contextmanager
    def _scope(self) -> Iterator[trio.CancelScope]:
        """Open the scope of a call, which `close` cancels."""
        with trio.CancelScope() as scope:
            self._under_way.add(scope)
            try:
                yield scope
            finally:
                self._under_way.remove(scope)
                if self._closing:
                    self._changed.notify()


def _said(error: BarnraiseError) -> str:
    return str(error)[:REASON_MAX]


def _elsewhere(begun: bool = False) -> Answer:
    return ForwardReply("elsewhere", "closing", "this peer is not in that group", begun=begun), _NOTHING
