"""What a codec is."""

from __future__ import annotations

from typing import Protocol

import torch

Buffer = bytes | bytearray | memoryview


class Codec(Protocol):
    """Maps fp32 vectors of shape (n,) to bytes and back. The size is an exact function of n. A vector may be encoded in
    pieces cut at multiples of `granule`; each piece then decodes alone."""

    name: str
    bits_per_value: float
    unbiased: bool
    needs_error_feedback: bool
    granule: int

    def encoded_size(self, numel: int) -> int:
        """Bytes that `numel` values take."""
        ...

    def encode(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """uint8, shape (encoded_size(n),). ProtocolViolation if a value is not finite or overflows the format."""
        ...

    def decode(self, data: Buffer, numel: int, out: torch.Tensor | None = None) -> torch.Tensor:
        """fp32, shape (numel,). ProtocolViolation unless `data` is exactly `encoded_size(numel)` bytes."""
        ...

    def decoded_sqnorm(self, data: Buffer, numel: int) -> float:
        """The squared L2 norm of what `data` decodes to; NaN or infinite if a value is."""
        ...
