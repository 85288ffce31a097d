"""Stage 0's side: a micro-batch begins here, and ends here when its gradient has come back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

import trio
from torch import Tensor

from peer.errors import DeadlineExceeded, StageRefused, WorkerError
from peer.net.host import Host
from swarm.pipeline.config import PipelineSettings
from swarm.pipeline.duplicate_checks import IS_COUNTED_S, who_has
from swarm.pipeline.messages import Cause
from swarm.pipeline.micro_batch import MicroBatchResult, MicroBatchRunner, MicroBatchTask
from swarm.pipeline.sender import Undelivered
from swarm.protocol.ledger import Range

PAUSE_S: Final = 0.25  # before another try, where our own worker or epoch was in the way
REFUSALS_MAX: Final = 4  # of its input: then there is something wrong with it that no retry mends


@dataclass(frozen=True)
class DispatchResult:
    """What became of a micro-batch. `done`: its gradient came back; else it was given up for `cause` ("stale": its
    round is over; "not_finite", "value": it was refused again and again, for a `reason` in words). `counted`: here, on
    stage 0. `loss` in nats summed over its `tokens`; `retried`: calls that were made once more, on any hop.
    `unqueued_s`: of its `seconds`, those in which it waited for no device, on any stage."""

    span: Range
    done: bool
    counted: bool
    loss: float
    tokens: int
    seconds: float
    retried: int
    cause: Cause = ""
    reason: str = ""
    unqueued_s: float = 0.0


class Origin:
    """`mates`: the other replicas of stage 0, who may have counted what is issued once more."""

    def __init__(
        self, host: Host, rules: PipelineSettings, work: MicroBatchRunner, mates: Callable[[], Sequence[str]]
    ) -> None:
        self._host, self._rules, self._work, self._mates = host, rules, work, mates

    async def dispatch(self, span: Range, tokens: Tensor, again: bool, epoch: int | None = None) -> DispatchResult:
        """Until it is done, or there is no point in it any more. Cancelled, it is given up everywhere. `epoch`: the one
        that it is for, where a later stage of a synchronous run has not come as far as we."""
        work, counting = self._work, self._work.counting
        started, retried, refusals, reason = trio.current_time(), 0, 0, ""
        once_more = False
        if epoch is None and counting.synchronous:
            epoch = counting.epoch

        def result(returned: MicroBatchResult | None, cause: Cause = "") -> DispatchResult:
            seconds, tokens = trio.current_time() - started, self._rules.tokens
            if returned is None:
                return DispatchResult(span, False, False, 0.0, tokens, seconds, retried, cause, reason)
            unqueued_s = max(0.0, seconds - task.times.queued_s - returned.waited_s)
            return DispatchResult(
                span, True, returned.counted, returned.loss, tokens, seconds, retried, unqueued_s=unqueued_s
            )

        while True:
            task = self._task(span, tokens, again, epoch)
            verdict = counting.verdict(span, task.epoch)
            if verdict == "stale":
                return result(None, "stale")
            retried += once_more
            task.counts = verdict == "count"
            task.confirm = partial(self._is_ours, span)
            cause: Cause = "not_finite"
            try:
                with work.under_way(task):  # a mate's question may cross ours
                    if again and task.counts:
                        task.counts = await self._is_ours(span)
                    if not task.counts:
                        task.confirm = None  # whoever has counted it here, the later stages still want it of us
                    outcome = await work.run(task)
                if isinstance(outcome, MicroBatchResult):
                    retried += outcome.retried
                    return result(outcome)
                retried += max(0, outcome.tries - 1)
                cause, reason = outcome.cause, outcome.reason
                refusals += cause != "stale"
            except WorkerError:
                cause = "worker"  # a new one is starting
            except StageRefused as refused:
                reason = str(refused)
                refusals += refused.reason in ("not_finite", "value", "shape", "dtype")
            again = once_more = True  # later stages may have counted it
            if refusals >= REFUSALS_MAX:
                return result(None, cause)
            await trio.sleep(PAUSE_S)

    async def evaluate(self, tokens: Tensor, timeout_s: float) -> float:
        """Mean loss in nats a token. Raises StageRefused, WorkerError, and DeadlineExceeded where it has not come
        through, or found no replica of a later stage, in so many seconds."""
        task = self._task((0, len(tokens)), tokens, again=False, epoch=None)
        task.until = trio.current_time() + timeout_s
        returned = await self._work.evaluate(task)
        if isinstance(returned, Undelivered):
            raise DeadlineExceeded(f"the evaluation did not come through: {returned.reason}.")
        return returned.loss / (task.size.batch * task.size.length)

    async def _is_ours(self, span: Range) -> bool:
        """Whether no other replica of stage 0 has counted it."""
        return await who_has(self._host, self._rules.groups[0], span, self._mates(), IS_COUNTED_S) is None

    def _task(self, span: Range, tokens: Tensor, again: bool, epoch: int | None) -> MicroBatchTask:
        size = self._work.compute.size(len(tokens), tokens.shape[1] - 1)
        epoch = self._work.counting.epoch if epoch is None else epoch
        return MicroBatchTask(span=span, epoch=epoch, size=size, tokens=tokens, again=again)
