"""Slots for micro-batches in memory that the network process shares with its worker.

One region of shared memory is cut into equal slots. A slot takes one micro-batch of up to `max_tokens` tokens. The
worker reads its input there and writes its output over it, so no tensor goes through the control socket. A slot is also
one ticket of back-pressure.

Shapes: B sequences, T tokens, C hidden_size.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from peer.ipc.stage_spec import StageSpec

_LINE = 64  # bytes: every view begins on a cache line


class SlotArea:
    """Views into the slots of `memory` (uint8, `size_bytes`)."""

    def __init__(self, spec: StageSpec, hidden_size: int, memory: Tensor) -> None:
        self._hidden_size = hidden_size
        self._ids_bytes = _aligned(8 * spec.max_tokens)
        self._slots = memory.view(spec.slots, -1)

    @staticmethod
    def size_bytes(spec: StageSpec, hidden_size: int) -> int:
        """Return the size of the whole region."""
        slot = 2 * _aligned(8 * spec.max_tokens) + _aligned(4 * spec.max_tokens * hidden_size)
        return spec.slots * slot

    def tokens(self, slot: int, batch: int, length: int) -> Tensor:
        """(B, T) int64: the input of the first stage."""
        return self._view(slot, 0, torch.int64, (batch, length))

    def targets(self, slot: int, batch: int, length: int) -> Tensor:
        """(B, T) int64: the ids that the last stage predicts."""
        return self._view(slot, self._ids_bytes, torch.int64, (batch, length))

    def hidden(self, slot: int, batch: int, length: int) -> Tensor:
        """(B, T, C) fp32: a hidden state or the gradient of one, in either direction."""
        return self._view(slot, 2 * self._ids_bytes, torch.float32, (batch, length, self._hidden_size))

    def losses(self, slot: int, batch: int, length: int) -> Tensor:
        """(B, T) fp32, in nats: the output of the last stage's forward; at the place of `hidden`."""
        return self._view(slot, 2 * self._ids_bytes, torch.float32, (batch, length))

    def _view(self, slot: int, offset: int, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
        size_bytes = dtype.itemsize * torch.Size(shape).numel()
        return self._slots[slot, offset : offset + size_bytes].view(dtype).view(shape)


class MicroBatchSlot:
    """A slot of shared memory for one micro-batch (B, T), from `StageWorkerGroup.slot`. Do not touch it while a call
    that got it runs. The views are those of `SlotArea`."""

    def __init__(self, area: SlotArea, number: int, free: Callable[[int], None]) -> None:
        self.number = number
        self._area = area
        self._free = free
        self._users = 1  # the opener, and every command that the worker may still run

    def tokens(self, batch: int, length: int) -> Tensor:
        return self._area.tokens(self.number, batch, length)

    def targets(self, batch: int, length: int) -> Tensor:
        return self._area.targets(self.number, batch, length)

    def hidden(self, batch: int, length: int) -> Tensor:
        return self._area.hidden(self.number, batch, length)

    def losses(self, batch: int, length: int) -> Tensor:
        return self._area.losses(self.number, batch, length)

    def acquire(self) -> None:
        self._users += 1

    def release(self) -> None:
        self._users -= 1
        if not self._users:
            self._free(self.number)


def _aligned(size_bytes: int) -> int:
    return size_bytes + -size_bytes % _LINE
