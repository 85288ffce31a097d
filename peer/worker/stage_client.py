"""The parent's side of a stage: micro-batches to its worker and back, many at a time, and steps of its weights.

Supervision is the whole model's (`peer.worker.client`): a worker that crashes, hangs or is killed costs what it was
computing and what it held (WorkerError), and another is started at once. That one has no weights until it is told to
import them, and refuses all else until then (StageRefused, "no_weights"); `StageWorkerGroup.generation` tells that it
is another.
"""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Literal, TypeVar

import trio

from peer.compute.stage_checks import check_size
from peer.errors import StageRefused, WorkerError
from peer.ipc import messages as control
from peer.ipc.stage_messages import (
    DropDone,
    DropMicroBatch,
    ExportDone,
    ExportProduct,
    ImportWeights,
    MicroBatchDone,
    MoveDone,
    Refusal,
    RunBackward,
    RunForward,
    RunStep,
    StageCommand,
    TakeDone,
    TakeGradient,
)
from peer.ipc.stage_slots import MicroBatchSlot, SlotArea
from peer.ipc.stage_spec import MicroBatch, Moved, StageSpec, Taken
from peer.worker.supervisor import Pending, Supervisor, WorkerBuffers, WorkerConfig

__all__ = [
    "MicroBatch",
    "MicroBatchDone",
    "MicroBatchSlot",
    "Moved",
    "StageSpec",
    "StageWorkerGroup",
    "Taken",
    "open_stage_worker_group",
]

_Reply = TypeVar("_Reply")


@dataclass(kw_only=True)
class _Pending(Pending):
    """Stays until the worker has answered or is dead, also where its caller has given up: the slot is in use."""

    inner: bool = False
    settled: Callable[[], None]

    def settle(self, result: control.Reply | WorkerError) -> None:
        super().settle(result)
        self.settled()


class StageWorkerGroup:
    """Commands to the worker of stage `spec`; from `open_stage_worker_group`. Any number of calls at a time: backwards
    run before forwards, and whatever takes or changes the state of the stage waits for all calls made before it, but
    for a step by its own gradient, which goes first.

    `outer` and `delta` are this stage's flat fp32 vectors, in the order of `layout`: the whole model's cut by
    `peer.model.layout.split_flat`. The caller writes `outer` (never during `import_weights` or `export`), and `delta`
    only for `step(merged=True)`. `inner_state` is the inner optimizer's state as of the last `export`; a new worker
    takes it up. Every call raises StageRefused, which changes nothing, or WorkerError, as a rule because the worker
    was lost: then `generation` has grown.
    """

    def __init__(self, config: WorkerConfig, spec: StageSpec, buffers: WorkerBuffers) -> None:
        assert buffers.slots is not None
        self.config, self.spec = config, spec
        self.layout = config.layout
        self.outer = buffers.outer.tensor
        self.delta = buffers.delta.tensor
        self.inner_state = buffers.inner_state.tensor
        self._area = SlotArea(spec, config.model.hidden_size, buffers.slots.tensor)
        self._ids = itertools.count()
        self._closing = False
        self._pending: dict[int, Pending] = {}
        self._supervisor = Supervisor(config, buffers, self._pending)
        self._free_slots, self._slots = trio.open_memory_channel[int](spec.slots)
        for number in range(spec.slots):
            self._free_slots.send_nowait(number)

    @property
    def worker_pid(self) -> int | None:
        """The live worker's process id; None while one is being started."""
        return None if self._supervisor.child is None else self._supervisor.child.pid

    @property
    def generation(self) -> int:
        """How many workers have been lost. When it has grown, all that was held, counted, learned and captured before
        is gone, and weights must be imported anew; it grows before any call that was lost raises WorkerError."""
        return self._supervisor.lost

    @property
    def queue_length(self) -> int:
        """Commands without an answer."""
        return len(self._pending)

    @property
    def free_slots(self) -> int:
        return self._slots.statistics().current_buffer_used

    @asynccontextmanager
    async def slot(self) -> AsyncIterator[MicroBatchSlot]:
        """A place for one micro-batch; waits for one, first come, first served. Its content is whatever was there."""
        slot = MicroBatchSlot(self._area, await self._slots.receive(), self._free_slots.send_nowait)
        try:
            yield slot
        finally:
            slot.release()

    async def forward(
        self, micro_batch: MicroBatch, slot: MicroBatchSlot, batch: int, length: int, keep: bool = True
    ) -> MicroBatchDone:
        """As `Stage.forward`, on what the caller has written to the slot's `tokens` (first stage) or `hidden`, and
        `targets` (last stage); the answer is in its `hidden` or `losses`. Cancelled, a micro-batch to keep is
        dropped."""
        check_size(self.spec, self.config.model, batch, length)

        def build(id: int) -> StageCommand:
            return RunForward(id, micro_batch, slot.number, batch, length, keep)

        if not keep:
            return await self._ask(build, MicroBatchDone, slot)
        return await self._compute(micro_batch, slot, build, counts=False)

    async def backward(self, micro_batch: MicroBatch, slot: MicroBatchSlot, batch: int, length: int) -> MicroBatchDone:
        """As `Stage.backward`, by the gradient in the slot's `hidden` (not on the last stage), over which the
        gradient of the stage's input is written (not on the first); `counted` of the answer tells whether it is in the
        stage's gradient now. Cancelled, the micro-batch is dropped; but if the worker is at one that counts, that is
        waited for, and the call returns like any other: whoever sees it cancelled knows that it is not counted."""
        check_size(self.spec, self.config.model, batch, length)

        def build(id: int) -> StageCommand:
            return RunBackward(id, micro_batch, slot.number, batch, length)

        return await self._compute(micro_batch, slot, build, counts=micro_batch.count)

    async def drop(self, micro_batch: MicroBatch) -> bool:
        """Let go of this pass of a micro-batch (its id and attempt tell), and have its calls that still wait refused
        ("cancelled"); whether there was anything. What is counted stays counted."""
        if self._supervisor.child is None:
            return False  # it went with its worker
        return (await self._ask(lambda id: DropMicroBatch(id, micro_batch.key), DropDone)).found

    async def read_gradient(self) -> Taken:
        """The mean gradient over all tokens counted since the last taking, into `delta`; more may be added."""
        return (await self._ask(lambda id: TakeGradient(id, forget=False), TakeDone)).taken

    async def take_gradient(self) -> Taken:
        """As `read_gradient`, and begin anew."""
        return (await self._ask(lambda id: TakeGradient(id, forget=True), TakeDone)).taken

    async def step(
        self, step: int, *, merged: bool = False, norm: float | None = None, epoch: int | None = None
    ) -> Moved:
        """As `Stage.step`: by the stage's own gradient, or by the `merged` one that the caller has left in `delta`."""
        return (await self._ask(lambda id: RunStep(id, step, merged, norm, epoch), MoveDone)).moved

    async def import_weights(self, epoch: int, *, rebase: bool = False) -> Moved:
        """As `Stage.import_weights`, from `outer`."""
        return (await self._ask(lambda id: ImportWeights(id, epoch, rebase), MoveDone)).moved

    async def export(self, product: Literal["delta", "weights"] = "delta", *, capture: bool = False) -> None:
        """outer - local, or the local weights, into `delta`; and the optimizer's state into `inner_state`. `capture`:
        the worker remembers the local weights for an import that rebases."""
        await self._ask(lambda id: ExportProduct(id, product, capture), ExportDone)

    async def _compute(
        self, micro_batch: MicroBatch, slot: MicroBatchSlot, build: Callable[[int], StageCommand], counts: bool
    ) -> MicroBatchDone:
        """Drops the micro-batch where it is cancelled, unless it `counts` and has been counted."""
        pending = await self._send(build, slot)
        try:
            await pending.done.wait()
        except trio.Cancelled:
            with trio.CancelScope(shield=True):
                if self._supervisor.child is not None:
                    await self._supervisor.child.send(DropMicroBatch(next(self._ids), micro_batch.key))
                if counts:
                    await pending.done.wait()  # not for long: the drop overtakes all but the command under way
            if not (isinstance(pending.result, MicroBatchDone) and pending.result.counted):
                raise
        return _answer(pending, MicroBatchDone)

    async def _ask(
        self, build: Callable[[int], StageCommand], kind: type[_Reply], slot: MicroBatchSlot | None = None
    ) -> _Reply:
        """The worker's answer. Raises StageRefused, WorkerError."""
        pending = await self._send(build, slot)
        await pending.done.wait()
        return _answer(pending, kind)

    async def _send(self, build: Callable[[int], StageCommand], slot: MicroBatchSlot | None = None) -> _Pending:
        """Raises WorkerError where no worker can be started."""
        child = await self._supervisor.ready()
        if self._closing:
            raise _closed()
        id = next(self._ids)

        def settled() -> None:
            del self._pending[id]
            if slot is not None:
                slot.release()

        if slot is not None:
            slot.acquire()
        pending = self._pending[id] = _Pending(settled=settled)
        pending.sent = True  # from here on a worker that dies settles it
        with trio.CancelScope(shield=True):  # half a message would be the end of the conversation
            await child.send(build(id))
        return pending

    async def _supervise(self) -> None:
        try:
            await self._supervisor.run()
        finally:  # a caller that is shielded from the cancellation would wait for ever
            self._closing = True
            for pending in tuple(self._pending.values()):  # settling removes it
                pending.settle(_closed())


def _answer(pending: Pending, kind: type[_Reply]) -> _Reply:
    """Raises StageRefused, WorkerError."""
    result = pending.result
    if isinstance(result, WorkerError):
        raise result
    if isinstance(result, Refusal):
        raise StageRefused(result.message, result.reason)
    assert isinstance(result, kind)
    return result


def _closed() -> WorkerError:
    return WorkerError("the stage is being closed: its worker answers no more")


@asynccontextmanager
async def open_stage_worker_group(config: WorkerConfig) -> AsyncIterator[StageWorkerGroup]:
    """Start the worker of `config.stage` and keep one running for as long as the block lasts.

    Raises ConfigError where the model cannot be cut so, or not computed on this machine; WorkerError where the worker
    dies while it loads; ResourceError where there is no memory for the buffers.
    """
    spec = config.stage
    assert spec is not None, "open_gang is for whole models"
    spec.check(config.model)
    config.directory.mkdir(parents=True, exist_ok=True)
    with WorkerBuffers.open(config) as buffers:
        worker_group = StageWorkerGroup(config, spec, buffers)
        try:
            await worker_group._supervisor.start()
            async with trio.open_nursery() as nursery:
                nursery.start_soon(worker_group._supervise)
                try:
                    yield worker_group
                finally:
                    nursery.cancel_scope.cancel()
        finally:
            await worker_group._supervisor.close()
