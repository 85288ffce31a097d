"""Micro-batches between the network and the stage's worker: slots, codes, and measured times.

Shapes: B sequences, T tokens, C hidden_size. Payloads are those of `swarm.pipeline.messages.ForwardRequest`: token
ids, then the coded hidden state. Coding works on the worker's shared memory, so this process never copies a hidden
state.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from itertools import count
from typing import Final

import numpy as np
import trio
from torch import Tensor

from peer.bounds import smoothed
from peer.errors import ProtocolViolation, StageRefused
from peer.model.marks import ids_of
from peer.worker.stage_client import MicroBatch, MicroBatchDone, MicroBatchSlot, StageWorkerGroup
from swarm.pipeline.activations import ActivationCode, new_payload, view_of
from swarm.pipeline.config import PipelineSettings
from swarm.pipeline.messages import decode_tokens, encode_tokens, token_bytes
from swarm.pipeline.micro_batch import MicroBatchTask

_KEPT_FOR_BACKWARDS: Final = 2  # slots that no forward may take: backwards would wait behind forwards
SMOOTHING: Final = 0.1
COLD: Final = 4  # micro-batches whose times are ignored: caches, threads and allocators warm up


class StageCompute:
    """Forward and backward of the stage of `worker_group`. The methods raise StageRefused and WorkerError as the worker
    group does, and ProtocolViolation for payloads that do not decode."""

    def __init__(self, worker_group: StageWorkerGroup, settings: PipelineSettings) -> None:
        self.worker_group: Final = worker_group
        self._settings = settings
        self._code = ActivationCode(settings.activations)
        self._attempts = count()
        self._forwards = trio.CapacityLimiter(max(1, worker_group.spec.slots - _KEPT_FOR_BACKWARDS))
        self._served = 0
        self.service_s = 0.0
        """Seconds of device and coding for a micro-batch, smoothed; 0 until measured."""

    @property
    def waiting(self) -> int:
        """How many micro-batches wait for their forward."""
        return self._forwards.statistics().tasks_waiting

    def name(self, task: MicroBatchTask, counts: bool) -> MicroBatch:
        """Return the worker's name for a new pass of the micro-batch through this stage."""
        first, index = task.samples[0], self.worker_group.spec.index
        return MicroBatch(str(first), index, task.epoch, counts, next(self._attempts), task.targets, first)

    def hidden_bytes(self, batch: int, length: int) -> int:
        """Return the bytes of a coded hidden state, or of its gradient."""
        return self._code.size_bytes(batch * length * self._settings.hidden_size)

    def payload_bytes(self, batch: int, length: int) -> int:
        """Return the bytes of token ids and coded hidden state."""
        return token_bytes(batch, length) + self.hidden_bytes(batch, length)

    @asynccontextmanager
    async def forward_slot(self, task: MicroBatchTask) -> AsyncIterator[MicroBatchSlot]:
        """Open a slot for a forward, first come, first served."""
        asked = trio.current_time()
        async with self._forwards, self.worker_group.slot() as slot:
            task.queued_s += trio.current_time() - asked
            yield slot

    async def take_in(self, slot: MicroBatchSlot, task: MicroBatchTask) -> None:
        """Write a micro-batch into the slot: its tokens, or at later stages its hidden state."""
        started = trio.current_time()
        if task.coded is None:
            slot.tokens(task.batch, task.length).copy_(ids_of(task.tokens[:, :-1]))
        else:
            await self._code.decode(task.coded, slot.hidden(task.batch, task.length))
        if self.worker_group.spec.is_last:
            slot.targets(task.batch, task.length).copy_(task.tokens[:, 1:])
        task.own_s += trio.current_time() - started

    async def forward(self, slot: MicroBatchSlot, of: MicroBatch, task: MicroBatchTask, keep: bool = True) -> float:
        """Return the loss in nats summed over the tokens on the last stage; on others 0, and the slot has the
        output."""
        done = await self._timed(self.worker_group.forward(of, slot, task.batch, task.length, keep), task)
        return 0.0 if done.loss is None else done.loss * task.batch * task.length

    async def take_out(self, slot: MicroBatchSlot, task: MicroBatchTask) -> memoryview:
        """Return the payload for the next stage."""
        started = trio.current_time()
        payload, ids = new_payload(self.payload_bytes(task.batch, task.length)), token_bytes(task.batch, task.length)
        payload.numpy()[:ids] = np.frombuffer(encode_tokens(task.tokens), np.uint8)
        await self._encode(slot.hidden(task.batch, task.length), payload[ids:])
        task.own_s += trio.current_time() - started
        return view_of(payload)

    @asynccontextmanager
    async def backward_slot(self, task: MicroBatchTask) -> AsyncIterator[MicroBatchSlot]:
        """Open a slot for a backward."""
        asked = trio.current_time()
        async with self.worker_group.slot() as slot:
            task.queued_s += trio.current_time() - asked
            yield slot

    async def take_gradient(self, slot: MicroBatchSlot, task: MicroBatchTask, gradient: memoryview) -> None:
        """Write the coded gradient of the stage's output into the slot."""
        started = trio.current_time()
        await self._code.decode(gradient, slot.hidden(task.batch, task.length))
        task.own_s += trio.current_time() - started

    async def backward(self, slot: MicroBatchSlot, of: MicroBatch, task: MicroBatchTask) -> MicroBatchDone:
        """Run the backward from the gradient in the slot (the last stage has none) to the gradient of the input
        there."""
        return await self._timed(self.worker_group.backward(of, slot, task.batch, task.length), task)

    async def gradient_out(self, slot: MicroBatchSlot, task: MicroBatchTask) -> memoryview:
        """Return the coded gradient of the input; empty on the first stage."""
        if self.worker_group.spec.is_first:
            return memoryview(b"")
        started = trio.current_time()
        payload = new_payload(self.hidden_bytes(task.batch, task.length))
        await self._encode(slot.hidden(task.batch, task.length), payload)
        task.own_s += trio.current_time() - started
        return view_of(payload)

    def served(self, task: MicroBatchTask) -> None:
        """Note the times of a micro-batch that went through."""
        self._served += 1
        if self._served > COLD:
            self.service_s = smoothed(self.service_s, task.own_s, max(SMOOTHING, 1 / (self._served - COLD)))

    def read_tokens(self, payload: memoryview, batch: int, length: int) -> Tensor:
        """Return (B, T + 1) int64, with marks. Raises ProtocolViolation for ids outside the vocabulary."""
        return decode_tokens(payload[: token_bytes(batch, length)], self._settings, length)

    async def _encode(self, x: Tensor, out: Tensor) -> None:
        try:
            await self._code.encode(x, out)
        except ProtocolViolation as error:  # our own value, so no violation of a peer
            raise StageRefused(str(error), "not_finite") from error

    async def _timed(self, call: Awaitable[MicroBatchDone], task: MicroBatchTask) -> MicroBatchDone:
        started = trio.current_time()
        done = await call
        task.own_s += done.seconds
        task.queued_s += max(0.0, trio.current_time() - started - done.seconds)
        return done
