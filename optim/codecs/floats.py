"""fp32 and fp16: plain casts."""

from __future__ import annotations

import torch

from optim.codecs.interface import Buffer
from peer.errors import ProtocolViolation

CHUNK = 1 << 18  # values; stays in cache


def checked(data: Buffer, size: int) -> torch.Tensor:
    """`data` as uint8, not copied; ProtocolViolation unless it has exactly `size` bytes."""
    if len(data) != size:
        raise ProtocolViolation(f"an encoded vector has {len(data)} bytes instead of {size}")
    return torch.frombuffer(data, dtype=torch.uint8) if size else torch.empty(0, dtype=torch.uint8)


def require_finite(x: torch.Tensor) -> None:
    if not torch.isfinite(torch.linalg.vector_norm(x)):
        raise ProtocolViolation("a vector to be sent holds values that are not finite")


class _Cast:
    name: str
    bits_per_value: float
    unbiased = True
    needs_error_feedback = False
    granule = 1
    _dtype: torch.dtype

    def encoded_size(self, numel: int) -> int:
        return numel * self._dtype.itemsize

    def encode(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        out = torch.empty(self.encoded_size(x.numel()), dtype=torch.uint8) if out is None else out
        cast = out.view(self._dtype)
        cast.copy_(x)
        require_finite(cast.float() if self._dtype != torch.float32 else cast)
        return out

    def decode(self, data: Buffer, numel: int, out: torch.Tensor | None = None) -> torch.Tensor:
        values = checked(data, self.encoded_size(numel)).view(self._dtype)
        out = torch.empty(numel) if out is None else out
        return out.copy_(values)

    def decoded_sqnorm(self, data: Buffer, numel: int) -> float:
        values = checked(data, self.encoded_size(numel)).view(self._dtype)
        total = 0.0
        for piece in values.split(CHUNK):
            total += float(torch.linalg.vector_norm(piece.float())) ** 2
        return total


class Fp32(_Cast):
    name = "fp32"
    bits_per_value = 32.0
    _dtype = torch.float32


class Fp16(_Cast):
    name = "fp16"
    bits_per_value = 16.0
    _dtype = torch.float16
