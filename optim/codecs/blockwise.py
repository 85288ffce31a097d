"""int8 and int4 with one scale a block: value = q * scale, q rounded to nearest in [-qmax, qmax].

The scale is absmax / qmax, rounded UP to so few significant bits that q * scale is exact in fp32. So no q needs
clamping, decoding never rounds, and coding a decoded vector again gives the same bytes. No scale is below 2^-126, so
that its reciprocal is finite.

The error of a value is at most half its block's scale, which is at most absmax / qmax * (1 + 2^-16) in int8,
(1 + 2^-7) in int4.

`optim/kernels/blockwise.c` computes the same bits: change both.
"""

from __future__ import annotations

from typing import ClassVar, Final

import torch

from optim.codecs.interface import ROW
from optim.codecs.rows import RowCodec, absmax, check_scales, field

TINY: Final = 2.0**-126  # fp32's smallest normal number: its reciprocal is finite


def scales_up(largest: torch.Tensor, qmax: int, clear_bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (scale, 1 / scale) for blocks of that absmax, which is overwritten: scale >= absmax / qmax, with
    `clear_bits` low bits zero."""
    scale = largest.div_(qmax)
    mask = (1 << clear_bits) - 1
    scale.view(torch.int32).add_(mask).bitwise_and_(~mask)  # of positive floats, order of bits is order of values
    return scale.clamp_(min=TINY), scale.reciprocal()


class Int8(RowCodec):
    """int8: block 4096, an fp32 scale of 17 significant bits. Row: scale (4 bytes), q (4096 bytes)."""

    name = "int8"
    bits_per_value = 8 + 32 / ROW
    _qmax: ClassVar[int] = 127

    def row_bytes(self, values: int) -> int:
        return 4 + values

    def encode_rows(self, x: torch.Tensor, out: torch.Tensor, work: torch.Tensor, valid: int) -> None:
        scale, inverse = scales_up(absmax(x), self._qmax, clear_bits=7)
        torch.mul(x, inverse, out=work).round_()
        out[:, :4] = scale.view(torch.uint8)
        out[:, 4:].view(torch.int8).copy_(work)

    def decode_rows(self, data: torch.Tensor, out: torch.Tensor, work: torch.Tensor) -> None:
        scale = field(data, 0, 4, torch.float32)  # (R, 1)
        check_scales(scale, largest=2.0**120)
        out.copy_(data[:, 4:].view(torch.int8)).mul_(scale)

    def chunk_sqnorm(self, data: torch.Tensor, values: torch.Tensor, wide: torch.Tensor) -> float:
        """Sum q^2, then multiply by scale^2. fp32 holds a sum of 1024 integers up to 2^14 without rounding, in any
        order."""
        rows, m = self._shape(values.numel())
        data, q = data.view(rows, -1), values.view(rows, m)
        scale = check_scales(field(data, 0, 4, torch.float32), largest=2.0**120).double().view(rows)
        q.copy_(data[:, 4:].view(torch.int8))
        torch.mul(q, q, out=q)
        sums = q.view(rows, -1, 1024).sum(-1).double() if m % 1024 == 0 else q.double()
        return float(torch.dot(sums.sum(-1), scale.square_()))


class Int4(RowCodec):
    """int4: block 128, a bf16 scale (fp16 would round the scales of small updates to 0). Row: 32 scales (64 bytes), q
    (2048).

    A byte holds 16 * high + low, one signed number: low is a value of the row's first half, high the value at the same
    place in its second half. Packing and unpacking are arithmetic on contiguous halves.
    """

    name = "int4"
    block = 128
    bits_per_value = 4 + 16 / 128
    _qmax: ClassVar[int] = 7

    def row_bytes(self, values: int) -> int:
        return values // self.block * 2 + values // 2

    def encode_rows(self, x: torch.Tensor, out: torch.Tensor, work: torch.Tensor, valid: int) -> None:
        rows, m = x.shape
        blocks = m // self.block
        scale, inverse = scales_up(absmax(x.view(rows, blocks, -1)), self._qmax, clear_bits=16)
        torch.mul(x.view(rows, blocks, -1), inverse, out=work.view(rows, blocks, -1))
        low, high = work.round_().view(rows, 2, -1).unbind(1)
        out[:, : 2 * blocks] = scale.view(rows, blocks).to(torch.bfloat16).view(torch.uint8)
        out[:, 2 * blocks :].view(torch.int8).copy_(low.add_(high, alpha=16))

    def decode_rows(self, data: torch.Tensor, out: torch.Tensor, work: torch.Tensor) -> None:
        rows, m = out.shape
        blocks = m // self.block
        scale = field(data, 0, 2 * blocks, torch.bfloat16).float().view(rows, blocks, 1)
        check_scales(scale, largest=2.0**120)
        both = work.view(-1)[: rows * m // 2].view(rows, -1).copy_(data[:, 2 * blocks :].view(torch.int8))
        low, high = out.view(rows, 2, -1).unbind(1)
        torch.mul(both, 1 / 16, out=high).round_()  # |low| <= 7 < 8: rounds to high exactly
        torch.sub(both, high, alpha=16, out=low)
        out.view(rows, blocks, -1).mul_(scale)
