"""The network process's handle on the "stage" program: many micro-batches in flight, and changes of the weights.

A worker that crashes, hangs or is killed loses what it was computing and what it held (WorkerError), and is replaced at
once. The new worker has no weights: it refuses all else (StageRefused, "no_weights") until it imports them.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import (
    AbstractAsyncContextManager,
    asynccontextmanager,
    closing,
    contextmanager,
)
from dataclasses import replace
from typing import Final, Literal

import torch
import trio

from peer.compute.stage_checks import check_size
from peer.errors import ConfigError
from peer.ipc.messages import Command
from peer.ipc.shared_memory import SharedBuffer
from peer.ipc.stage_messages import (
    DropMicroBatch,
    ExportProduct,
    ImportWeights,
    LoadStage,
    MicroBatchDone,
    RunBackward,
    RunForward,
    RunStep,
    TakeGradient,
)
from peer.ipc.stage_slots import MicroBatchSlot, SlotArea
from peer.ipc.stage_spec import MicroBatch, Moved, StageSpec, Taken
from peer.worker.commands import WorkerCommands
from peer.worker.config import WorkerBuffers, WorkerConfig
from peer.worker.supervisor import Pending

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


class StageWorkerGroup(WorkerCommands):
    """Commands to the worker of stage `spec`; from `open_stage_worker_group`. Any number of calls may run at a time.

    Backwards run before forwards. A call that reads or changes the state of the stage waits for all calls made before
    it; only `step` overtakes them. Every call raises StageRefused, which changes nothing, or WorkerError. After a lost
    worker `generation` has grown, and all that was held, counted, learned and captured is gone.

    `outer` and `delta` are this stage's part of the model's vector (`peer.model.layout.split_flat`). The caller writes
    `outer`, never during `import_weights` or `export`. A new worker begins with the inner optimizer's state at the last
    `export`; a large one may be some minutes older.
    """

    starts_max = (
        5  # some 8 s plus the starts: the pipeline expects a live peer's part, and does without a peer that left
    )

    def __init__(self, config: WorkerConfig, buffers: WorkerBuffers) -> None:
        super().__init__(config, buffers)
        assert buffers.slots is not None
        self.spec: Final = _spec_of(config)
        self._slots = buffers.slots
        self._area = SlotArea(self.spec, config.model.hidden_size, buffers.slots.tensor)
        self._freed, self._free = trio.open_memory_channel[int](self.spec.slots)
        for number in range(self.spec.slots):
            self._freed.send_nowait(number)
        self._overflows = 0

    @classmethod
    @contextmanager
    def open_buffers(cls, config: WorkerConfig) -> Iterator[WorkerBuffers]:
        size = SlotArea.size_bytes(_spec_of(config), config.model.hidden_size)
        with (
            closing(SharedBuffer.create(config.directory, size, torch.uint8)) as slots,
            WorkerBuffers.open(config) as buffers,
        ):
            yield replace(buffers, slots=slots)

    def _first_message(self, rank: int) -> LoadStage:
        config = self.config
        return LoadStage(
            rank=rank,
            layout=config.ranks,
            meeting=self._meeting,
            run=config.run,
            model=config.model,
            inner=config.inner,
            stage=self.spec,
            compute=config.compute,
            directory=str(config.private_folder),
            vectors=self._buffers.vectors,
            slots_fd=self._slots.fd,
            base=config.base,
        )

    @asynccontextmanager
    async def slot(self) -> AsyncIterator[MicroBatchSlot]:
        """Wait for a slot for one micro-batch, first come, first served. Its content is undefined."""
        slot = MicroBatchSlot(self._area, await self._free.receive(), self._freed.send_nowait)
        try:
            yield slot
        finally:
            slot.release()

    async def forward(
        self, micro_batch: MicroBatch, slot: MicroBatchSlot, batch: int, length: int, keep: bool = True
    ) -> MicroBatchDone:
        """Run `Stage.forward` on the slot's `tokens` (first stage) or `hidden`, and `targets` (last stage). The output
        is in the slot's `hidden` or `losses`. If the call is cancelled, a micro-batch to keep is dropped."""
        check_size(self.spec, self.config.model, batch, length)
        command = RunForward(next(self._ids), micro_batch, slot.number, batch, length, keep)
        if not keep:
            pending = await self._send(command, slot)
            await pending.done.wait()
            return pending.results(MicroBatchDone)[0]
        return await self._compute(command, slot, counts=False)

    async def backward(self, micro_batch: MicroBatch, slot: MicroBatchSlot, batch: int, length: int) -> MicroBatchDone:
        """Run `Stage.backward` by the gradient in the slot's `hidden` (not on the last stage). The gradient of the
        stage's input is written over it (not on the first stage).

        If the call is cancelled, the micro-batch is dropped. One that counts and is being computed is waited for, and
        the call then returns: a caller that sees Cancelled knows that the micro-batch is not counted.
        """
        check_size(self.spec, self.config.model, batch, length)
        command = RunBackward(next(self._ids), micro_batch, slot.number, batch, length)
        done = await self._compute(command, slot, counts=micro_batch.count)
        self._overflows += done.overflows
        return done

    def take_overflows(self) -> int:
        """Return how often a backward was repeated in fp16, at a smaller scale, since the last call."""
        overflows, self._overflows = self._overflows, 0
        return overflows

    async def drop(self, micro_batch: MicroBatch) -> bool:
        """Drop this pass of a micro-batch (by its id and attempt), and have its waiting calls refused ("cancelled").
        Returns whether there was anything. Counted samples stay counted."""
        if not self._supervisor.workers:
            return False  # it was lost with its worker
        return await self.ask(DropMicroBatch(next(self._ids), micro_batch.key), bool)

    async def read_gradient(self) -> Taken:
        """Write the mean gradient over all tokens counted since it was last taken to `delta`; more may be added."""
        return await self.ask(TakeGradient(next(self._ids), clear=False), Taken)

    async def take_gradient(self) -> Taken:
        """As `read_gradient`, and clear the sum."""
        return await self.ask(TakeGradient(next(self._ids), clear=True), Taken)

    async def step(self, step: int) -> Moved:
        """Make inner step `step` by the stage's own gradient."""
        return await self.ask(RunStep(next(self._ids), step), Moved)

    async def import_weights(self, epoch: int, *, rebase: bool = False) -> Moved:
        """Run `Stage.import_weights` from `outer`."""
        return await self.ask(ImportWeights(next(self._ids), epoch, rebase), Moved)

    async def export(self, product: Literal["delta", "weights"] = "delta", *, capture: bool = False) -> None:
        """Write outer - local, or the local weights, to `delta`. `capture`: the worker remembers the local weights for
        an import that rebases."""
        await self.ask(ExportProduct(next(self._ids), product, capture), object)

    async def _compute(self, command: RunForward | RunBackward, slot: MicroBatchSlot, counts: bool) -> MicroBatchDone:
        """Drops the micro-batch if the call is cancelled, unless it `counts` and has been counted."""
        pending = await self._send(command, slot)
        try:
            await pending.done.wait()
        except trio.Cancelled:
            with trio.CancelScope(shield=True):
                await self._supervisor.tell(DropMicroBatch(next(self._ids), command.micro_batch.key))
                if counts:
                    await pending.done.wait()  # not long: the drop overtakes all but the running command
            if not _was_counted(pending):
                raise
        return pending.results(MicroBatchDone)[0]

    async def _send(self, command: Command, slot: MicroBatchSlot) -> Pending:
        """Send the command. The slot stays in use until the worker has answered or is dead, even if the caller gives
        up. Raises WorkerError."""
        slot.acquire()
        try:
            return await self._supervisor.send(command, on_settled=slot.release)
        except BaseException:
            slot.release()
            raise


def _was_counted(pending: Pending) -> bool:
    """Whether the worker has answered that the gradient is in the stage's sum."""
    if pending.error is not None or any(reply.error is not None for reply in pending.replies.values()):
        return False
    return any(done.counted for done in pending.results(MicroBatchDone))


def open_stage_worker_group(config: WorkerConfig) -> AbstractAsyncContextManager[StageWorkerGroup]:
    """Open a group that computes `config.stage`; see `WorkerCommands.open`. Raises ConfigError if the model cannot be
    split like this."""
    _spec_of(config).check(config.model)
    return StageWorkerGroup.open(config)


def _spec_of(config: WorkerConfig) -> StageSpec:
    if config.stage is None:
        raise ConfigError("WorkerConfig.stage is not set: set it, or open a group for the whole model")
    return config.stage
