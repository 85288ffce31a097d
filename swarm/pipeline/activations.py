"""Hidden states and their gradients as bytes.

int8 and int4 are blockwise with one scale a block (`optim.codecs.blockwise`), so an outlier costs only its own block
precision; "none" is plain fp32. Sizes are exact; decoding refuses malformed data and values that are not finite. Hidden
states have outliers in a few channels of every token, so int8's blocks are shorter here than for updates.

Shapes: n values, in the order of (B, T, C).
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

import torch
import trio
from torch import Tensor

from optim.codecs import Codec
from optim.codecs.blockwise import Int4, Int8
from optim.codecs.floats import Fp16, Fp32
from swarm.pipeline.config import Activations

_INLINE_VALUES: Final = 1 << 14  # below it a thread costs more than the coding (0.1 ms against 0.03)


class FineInt8(Int8):
    """int8 in rows of 256 values and their scale."""

    name = "int8 of 256"
    bits_per_value = 8 + 32 / 256
    row = 256


class ActivationCode:
    """Codes hidden states as the run's settings say.

    Coding runs in threads, off the network's loop. A thread is waited for even when the caller is cancelled: it reads
    and writes memory that is used again afterwards."""

    def __init__(self, activations: Activations) -> None:
        self.codec: Final[Codec] = _CODECS[activations]

    def size_bytes(self, values: int) -> int:
        return self.codec.encoded_size(values)

    async def encode(self, x: Tensor, out: Tensor) -> None:
        """Encode `x`, fp32 contiguous of any shape, into `out`, flat uint8 of `size_bytes(n)`. Raises ProtocolViolation
        where a value is not finite, or too large for the code."""
        flat = x.view(-1)
        if flat.numel() <= _INLINE_VALUES:
            self.codec.encode(flat, out)
        else:
            await trio.to_thread.run_sync(self.codec.encode, flat, out)

    async def decode(self, data: memoryview, out: Tensor) -> None:
        """Decode exactly `size_bytes(n)` bytes into `out`, fp32 contiguous. Raises ProtocolViolation; `out` may then be
        partly written."""
        flat = out.view(-1)
        if flat.numel() <= _INLINE_VALUES:
            self.codec.decode(data, flat.numel(), flat)
        else:
            await trio.to_thread.run_sync(self.codec.decode, data, flat.numel(), flat)


_CODECS: Final[Mapping[Activations, Codec]] = MappingProxyType(
    {"int8": FineInt8(), "int4": Int4(), "fp16": Fp16(), "none": Fp32()}
)


def new_payload(size_bytes: int) -> Tensor:
    """Return uninitialised flat uint8, to be written."""
    return torch.empty(size_bytes, dtype=torch.uint8)


def view_of(payload: Tensor) -> memoryview:
    """Return the bytes of `payload` without a copy."""
    return payload.numpy().data
