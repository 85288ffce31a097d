"""fp32, fp16 and bf16: plain casts.

`optim/kernels/floats.c` computes the same bits: change both.
"""

from __future__ import annotations

import math
from typing import ClassVar

import torch

from optim.codecs.rows import RowCodec, absmax
from peer.errors import ProtocolViolation


class _Cast(RowCodec):
    _dtype: ClassVar[torch.dtype]

    @property
    def granule(self) -> int:
        return 1

    def row_bytes(self, values: int) -> int:
        return values * self._dtype.itemsize

    def encode_rows(self, x: torch.Tensor, out: torch.Tensor, work: torch.Tensor, valid: int) -> None:
        # What is checked is what is sent, not x, which a worker can write at any time.
        work.copy_(out.view(self._dtype).copy_(x))
        try:
            absmax(work)
        except ProtocolViolation:
            largest = float(absmax(x).max())  # raises if x itself is not finite
            raise ProtocolViolation(
                f"a vector holds {largest:g}, too large for {self.name}: choose the codec bf16, fp32 or int8"
            ) from None

    def decode_rows(self, data: torch.Tensor, out: torch.Tensor, work: torch.Tensor) -> None:
        out.copy_(data.view(self._dtype))
        low, high = float(out.amin()), float(out.amax())
        if not (low > -math.inf and high < math.inf):
            raise ProtocolViolation("an encoded vector holds a value that is infinite or not a number")


class Fp32(_Cast):
    """The values themselves."""

    name = "fp32"
    bits_per_value = 32.0
    unbiased = True
    _dtype = torch.float32


class Fp16(_Cast):
    """IEEE half precision, rounded to nearest: relative error 2^-11 from 6e-5 to 65504, absolute 3e-8 below."""

    name = "fp16"
    bits_per_value = 16.0
    _dtype = torch.float16


class Bf16(_Cast):
    """bfloat16, rounded to nearest: relative error 2^-8 over fp32's whole range."""

    name = "bf16"
    bits_per_value = 16.0
    _dtype = torch.bfloat16
