"""Where micro-batches lie while they pass between the network process and its compute worker.

One region of shared memory, passed to the worker when it starts, cut into equal slots. A slot takes one micro-batch of
up to `max_tokens` tokens; the worker reads its input there and writes its answer over it, so nothing of size goes
through the control socket, and a slot is one back-pressure ticket.

Shapes: B sequences, T tokens, C hidden_size.
"""

from __future__ import annotations

import torch
from torch import Tensor

from peer.stage_spec import StageSpec

_LINE = 64  # bytes: every view begins on a cache line


class SlotArea:
    """Views into the slots of `memory` (uint8, `size_bytes`)."""

    def __init__(self, spec: StageSpec, hidden_size: int, memory: Tensor) -> None:
        self._hidden_size = hidden_size
        self._ids_bytes = _aligned(8 * spec.max_tokens)
        self._slots = memory.view(spec.slots, -1)

    @staticmethod
    def size_bytes(spec: StageSpec, hidden_size: int) -> int:
        """Of the whole region."""
        slot = 2 * _aligned(8 * spec.max_tokens) + _aligned(4 * spec.max_tokens * hidden_size)
        return spec.slots * slot

    def tokens(self, slot: int, batch: int, length: int) -> Tensor:
        """(B, T) int64: what goes into the first stage."""
        return self._view(slot, 0, torch.int64, (batch, length))

    def targets(self, slot: int, batch: int, length: int) -> Tensor:
        """(B, T) int64: the ids that the last stage is to predict."""
        return self._view(slot, self._ids_bytes, torch.int64, (batch, length))

    def hidden(self, slot: int, batch: int, length: int) -> Tensor:
        """(B, T, C) fp32: a hidden state or the gradient of one, in either direction."""
        return self._view(slot, 2 * self._ids_bytes, torch.float32, (batch, length, self._hidden_size))

    def losses(self, slot: int, batch: int, length: int) -> Tensor:
        """(B, T) fp32, in nats: what the last stage's forward answers; in the place of `hidden`."""
        return self._view(slot, 2 * self._ids_bytes, torch.float32, (batch, length))

    def _view(self, slot: int, offset: int, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
        size_bytes = dtype.itemsize * torch.Size(shape).numel()
        return self._slots[slot, offset : offset + size_bytes].view(dtype).view(shape)


def _aligned(size_bytes: int) -> int:
    return size_bytes + -size_bytes % _LINE
