"""The interface of codecs, which map fp32 values to bytes of a known size and back.

Shapes: n values; a row is `ROW` values, the unit in which codecs work and vectors may be cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cmp_to_key
from typing import Final, Protocol

import numpy as np
import torch

from peer.errors import ProtocolViolation

Buffer = bytes | bytearray | memoryview | torch.Tensor

ROW: Final = 4096
_PIECE: Final = 4096  # bytes of two messages that are compared at a time


class Codec(Protocol):
    """A map of fp32 vectors of shape (n,) to bytes and back.

    The size depends on n alone. Multi-byte fields are little-endian. A random codec (`ternary`) gives different bytes
    each time; the statements about bytes here then hold for the same draws.
    """

    @property
    def name(self) -> str: ...
    @property
    def bits_per_value(self) -> float:
        """The size of whole rows, in bits a value."""
        ...

    @property
    def unbiased(self) -> bool:
        """Whether the expectation of a decoded value is the value."""
        ...

    @property
    def needs_error_feedback(self) -> bool:
        """Whether training fails unless the sender adds to its next vector what this one lost."""
        ...

    @property
    def idempotent(self) -> bool:
        """Whether coding a decoded vector again changes nothing."""
        ...

    @property
    def granule(self) -> int:
        """Values between cuts: the encodings of pieces cut at multiples of it, concatenated, are the encoding of the
        whole vector, bit for bit."""
        ...

    def encoded_size(self, numel: int) -> int:
        """Return the bytes that `numel` values take."""
        ...

    def encode(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Return uint8, shape (encoded_size(n),), on x's device. `ProtocolViolation` if a value is not finite or too
        large for the format: such a vector must not be sent."""
        ...

    def encode_with_sqnorm(self, x: torch.Tensor, out: torch.Tensor | None = None) -> tuple[torch.Tensor, float]:
        """Return `encode` and the result's `decoded_sqnorm`, in one pass over memory."""
        ...

    def decode(self, data: Buffer, numel: int, out: torch.Tensor | None = None) -> torch.Tensor:
        """Return fp32, shape (numel,), finite. `ProtocolViolation` unless `data` is `encoded_size(numel)` bytes that
        decode to finite values; `out` may be partly written then. Scratch memory does not grow with `data`."""
        ...

    def decoded_sqnorm(self, data: Buffer, numel: int) -> float:
        """Return the squared L2 norm of the decoded values, summed in float64; `ProtocolViolation` as `decode`. Equal
        within 1e-12 on every CPU and for every cut of the vector."""
        ...


def as_bytes(data: Buffer, size: int) -> torch.Tensor:
    """View `data` as a uint8 tensor of shape (size,), which must not be written. `ProtocolViolation` for another
    length."""
    if isinstance(data, torch.Tensor):
        if data.dtype != torch.uint8 or data.dim() != 1:
            raise ValueError(f"encoded data is {data.dtype} of {data.dim()} dimensions: pass a flat uint8 tensor")
        found = data.numel()
    else:
        found = memoryview(data).nbytes
    if found != size:
        raise ProtocolViolation(f"an encoded vector has {found} bytes instead of {size}")
    if isinstance(data, torch.Tensor):
        # A wider dtype may only be viewed at a multiple of its size.
        return data.contiguous() if data.storage_offset() % 8 == 0 else data.clone()
    if size == 0:
        return torch.empty(0, dtype=torch.uint8)
    return torch.from_numpy(np.asarray(_Unlocked(np.frombuffer(data, dtype=np.uint8))))


def bytes_of(data: Buffer) -> bytes:
    """Return a copy as bytes, to compare with others."""
    return data.numpy().tobytes() if isinstance(data, torch.Tensor) else bytes(data)


def order_by_bytes(messages: Sequence[Buffer], weights: Sequence[float]) -> list[int]:
    """Return the messages' indices in the order of their own bytes, of equal ones by weight, so that a sum does not
    depend on the senders' order. Reads no further than to the first difference of two."""
    views = [memoryview(data.numpy().data if isinstance(data, torch.Tensor) else data) for data in messages]

    def compared(i: int, j: int) -> int:
        for first in range(0, max(views[i].nbytes, views[j].nbytes), _PIECE):
            a, b = (bytes(view[first : first + _PIECE]) for view in (views[i], views[j]))
            if a != b:
                return -1 if a < b else 1
        return (weights[i] > weights[j]) - (weights[i] < weights[j])

    return sorted(range(len(messages)), key=cmp_to_key(compared))


def check_vector(x: torch.Tensor) -> torch.Tensor:
    """Return `x` if it can be encoded: fp32, flat, contiguous."""
    if x.dtype != torch.float32 or x.dim() != 1 or not x.is_contiguous():
        raise ValueError(f"a vector is {x.dtype} of shape {tuple(x.shape)}: pass a flat contiguous fp32 vector")
    return x


class _Unlocked:
    """A read-only array declared writable: torch warns of read-only buffers, and codecs only read them."""

    def __init__(self, array: np.ndarray[tuple[int], np.dtype[np.uint8]]) -> None:
        self._keep_alive = array
        described = dict(array.__array_interface__)
        described["data"] = (described["data"][0], False)
        self.__array_interface__ = described
