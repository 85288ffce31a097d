"""Micro-batches between the network and the stage's worker: slots, codes, and measured times.

Shapes: B sequences, T tokens, C hidden_size. Payloads are those of `swarm.pipeline.messages.ForwardRequest`: token
ids, then the coded hidden state. Both codings work on the worker's own memory: a hidden state is never copied on this
side.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import count
from typing import Final

import numpy as np
import torch
import trio
from torch import Tensor

from peer.errors import ProtocolViolation, StageRefused
from peer.worker.stage_client import MicroBatch, MicroBatchDone, MicroBatchSlot, StageWorkerGroup
from swarm.pipeline.activations import ActivationCode, new_payload, view_of
from swarm.pipeline.config import PipelineSettings
from swarm.pipeline.messages import TOKEN_BYTES
from swarm.protocol.ledger import Range

_KEPT_FOR_BACKWARDS: Final = 2  # slots that no forward may take: backwards would wait behind forwards for a place
SMOOTHING: Final = 0.1
COLD: Final = 4  # micro-batches that say nothing of what the later ones take: caches, threads and allocators warm up


@dataclass
class Timings:
    """Of one micro-batch at this stage, in seconds: on the device and in coding, and waiting for either."""

    own_s: float = 0.0
    queued_s: float = 0.0


@dataclass(frozen=True)
class BatchSize:
    """(B, T) of a micro-batch, and C."""

    batch: int
    length: int
    hidden: int

    @property
    def at(self) -> tuple[int, int]:
        return self.batch, self.length

    @property
    def token_bytes(self) -> int:
        return TOKEN_BYTES * self.batch * (self.length + 1)

    @property
    def values(self) -> int:
        return self.batch * self.length * self.hidden


class StageCompute:
    """Forward and backward of `worker_group`'s stage, for a station. Everything raises StageRefused and WorkerError as
    the gang does, and ProtocolViolation for payloads that do not decode."""

    def __init__(self, worker_group: StageWorkerGroup, settings: PipelineSettings) -> None:
        self.worker_group: Final = worker_group
        self._settings = settings
        self._code = ActivationCode(settings.activations)
        self._attempts = count()
        self._forwards = trio.CapacityLimiter(max(1, worker_group.spec.slots - _KEPT_FOR_BACKWARDS))
        self._served = 0
        self.service_s = 0.0
        """What a micro-batch takes of this stage's device and coding, smoothed; 0 until known."""

    @property
    def waiting(self) -> int:
        """Micro-batches that wait for their forward."""
        return self._forwards.statistics().tasks_waiting

    def name(self, samples: Range, epoch: int, counts: bool) -> MicroBatch:
        """A fresh pass of it through this stage."""
        return MicroBatch(str(samples[0]), self.worker_group.spec.index, epoch, counts, next(self._attempts))

    def size(self, batch: int, length: int) -> BatchSize:
        return BatchSize(batch, length, self._settings.hidden_size)

    def payload_bytes(self, size: BatchSize) -> int:
        """Of token ids and hidden state."""
        return size.token_bytes + self._code.size_bytes(size.values)

    def gradient_bytes(self, size: BatchSize) -> int:
        return self._code.size_bytes(size.values)

    @asynccontextmanager
    async def forward_slot(self, times: Timings) -> AsyncIterator[MicroBatchSlot]:
        """A slot for a forward, in the order of asking."""
        asked = trio.current_time()
        async with self._forwards, self.worker_group.slot() as slot:
            times.queued_s += trio.current_time() - asked
            yield slot

    async def take_in(
        self, slot: MicroBatchSlot, size: BatchSize, tokens: Tensor, coded: memoryview | None, times: Timings
    ) -> None:
        """Write a micro-batch into the slot: `tokens` (B, T + 1) int64, and for later stages the coded hidden state."""
        started = trio.current_time()
        if coded is None:
            slot.tokens(*size.at).copy_(tokens[:, :-1])
        else:
            await self._code.decode(coded, slot.hidden(*size.at))
        if self.worker_group.spec.is_last:
            slot.targets(*size.at).copy_(tokens[:, 1:])
        times.own_s += trio.current_time() - started

    async def forward(
        self, slot: MicroBatchSlot, of: MicroBatch, size: BatchSize, times: Timings, keep: bool = True
    ) -> float:
        """The loss in nats summed over the tokens, if this is the last stage; else 0, and the slot has the output."""
        done = await self._timed(self.worker_group.forward(of, slot, *size.at, keep), times)
        return 0.0 if done.loss is None else done.loss * size.batch * size.length

    async def take_out(self, slot: MicroBatchSlot, size: BatchSize, tokens: Tensor, times: Timings) -> memoryview:
        """The payload for the next stage."""
        started = trio.current_time()
        payload = new_payload(self.payload_bytes(size))
        payload.numpy()[: size.token_bytes] = np.frombuffer(tokens.numpy().astype("<u4").data.cast("B"), np.uint8)
        await self._encode(slot.hidden(*size.at), payload[size.token_bytes :])
        times.own_s += trio.current_time() - started
        return view_of(payload)

    @asynccontextmanager
    async def backward_slot(self, times: Timings) -> AsyncIterator[MicroBatchSlot]:
        asked = trio.current_time()
        async with self.worker_group.slot() as slot:
            times.queued_s += trio.current_time() - asked
            yield slot

    async def take_gradient(self, slot: MicroBatchSlot, size: BatchSize, gradient: memoryview, times: Timings) -> None:
        """Write the coded gradient of the stage's output into the slot."""
        started = trio.current_time()
        await self._code.decode(gradient, slot.hidden(*size.at))
        times.own_s += trio.current_time() - started

    async def backward(self, slot: MicroBatchSlot, of: MicroBatch, size: BatchSize, times: Timings) -> MicroBatchDone:
        """By the gradient in the slot (on the last stage there is none); it then has the gradient of the input."""
        return await self._timed(self.worker_group.backward(of, slot, *size.at), times)

    async def gradient_out(self, slot: MicroBatchSlot, size: BatchSize, times: Timings) -> memoryview:
        """The coded gradient of the input; empty on the first stage."""
        if self.worker_group.spec.is_first:
            return memoryview(b"")
        started = trio.current_time()
        payload = new_payload(self.gradient_bytes(size))
        await self._encode(slot.hidden(*size.at), payload)
        times.own_s += trio.current_time() - started
        return view_of(payload)

    def served(self, times: Timings) -> None:
        """A micro-batch went through."""
        self._served += 1
        if self._served > COLD:
            self.service_s += (times.own_s - self.service_s) * max(SMOOTHING, 1 / (self._served - COLD))

    def read_tokens(self, payload: memoryview, size: BatchSize) -> Tensor:
        """(B, T + 1) int64. Raises ProtocolViolation for ids outside the vocabulary."""
        ids = np.frombuffer(payload[: size.token_bytes], "<u4").reshape(size.batch, size.length + 1)
        if int(ids.max()) >= self._settings.vocab_size:
            raise ProtocolViolation(f"a token id of {ids.max()}, and the vocabulary has {self._settings.vocab_size}")
        return torch.from_numpy(ids.astype(np.int64))

    async def _encode(self, x: Tensor, out: Tensor) -> None:
        try:
            await self._code.encode(x, out)
        except ProtocolViolation as error:  # ours, and nobody's offence
            raise StageRefused(str(error), "not_finite") from error

    async def _timed(self, call: Awaitable[MicroBatchDone], times: Timings) -> MicroBatchDone:
        started = trio.current_time()
        done = await call
        times.own_s += done.seconds
        times.queued_s += max(0.0, trio.current_time() - started - done.seconds)
        return done
