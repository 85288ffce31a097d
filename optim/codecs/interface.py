"""What a codec is: fp32 values to bytes and back, of a size known beforehand.

Shapes: n values; a row is `ROW` values, the unit in which codecs work and vectors may be cut.
"""

from __future__ import annotations

from typing import Final, Protocol

import numpy as np
import torch

from peer.errors import ProtocolViolation

Buffer = bytes | bytearray | memoryview | torch.Tensor

ROW: Final = 4096


class Codec(Protocol):
    """Maps fp32 vectors of shape (n,) to bytes and back.

    The size is an exact function of n. Cutting: the encoding of a vector is the concatenation of the encodings of its
    pieces, bit for bit, when it is cut at multiples of `granule`. Multi-byte fields are little-endian.

    `bits_per_value` is exact for whole rows. `unbiased`: the expectation of the decoded value is the value.
    `needs_error_feedback`: training goes wrong unless the sender adds to its next vector what this one lost.
    `idempotent`: coding a decoded vector again changes nothing. A codec that is random (`ternary`) gives other bytes
    each time; what is said here of bytes then holds for the same draws.
    """

    @property
    def name(self) -> str: ...
    @property
    def bits_per_value(self) -> float: ...
    @property
    def unbiased(self) -> bool: ...
    @property
    def needs_error_feedback(self) -> bool: ...
    @property
    def idempotent(self) -> bool: ...
    @property
    def granule(self) -> int: ...

    def encoded_size(self, numel: int) -> int:
        """Bytes that `numel` values take."""
        ...

    def encode(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """uint8, shape (encoded_size(n),), on x's device. `ProtocolViolation` if a value is not finite or too large
        for the format: such a vector must not be sent."""
        ...

    def encode_with_sqnorm(self, x: torch.Tensor, out: torch.Tensor | None = None) -> tuple[torch.Tensor, float]:
        """`encode`, and `decoded_sqnorm` of the result, in one pass over memory."""
        ...

    def decode(self, data: Buffer, numel: int, out: torch.Tensor | None = None) -> torch.Tensor:
        """fp32, shape (numel,), finite. `ProtocolViolation` unless `data` is exactly `encoded_size(numel)` bytes that
        stand for finite values; then `out` may be partly written. Allocates nothing that grows with `data`."""
        ...

    def decoded_sqnorm(self, data: Buffer, numel: int) -> float:
        """The squared L2 norm, summed in float64, of what `data` decodes to; `ProtocolViolation` as `decode`. Equal
        within 1e-12 on every CPU and however the vector is cut."""
        ...


def as_bytes(data: Buffer, size: int) -> torch.Tensor:
    """`data` as a uint8 tensor of shape (size,), not copied and not to be written; `ProtocolViolation` if it has
    another length."""
    if isinstance(data, torch.Tensor):
        if data.dtype != torch.uint8 or data.dim() != 1:
            raise ValueError("encoded data must be a flat uint8 tensor")
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
    """A copy of it, to be compared with others."""
    return data.numpy().tobytes() if isinstance(data, torch.Tensor) else bytes(data)


def check_vector(x: torch.Tensor) -> torch.Tensor:
    """`x` itself, if it can be encoded: fp32, flat, contiguous."""
    if x.dtype != torch.float32 or x.dim() != 1 or not x.is_contiguous():
        raise ValueError(f"a codec takes a flat contiguous fp32 vector, not {x.dtype} of shape {tuple(x.shape)}")
    return x


class _Unlocked:
    """A read-only array that poses as writable: torch warns of every read-only buffer it is shown, and we only read."""

    def __init__(self, array: np.ndarray[tuple[int], np.dtype[np.uint8]]) -> None:
        self._keep_alive = array
        described = dict(array.__array_interface__)
        described["data"] = (described["data"][0], False)
        self.__array_interface__ = described
