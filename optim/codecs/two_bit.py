"""Two bits a value: a sign and one of two magnitudes, times a scale a block of 128.

The magnitudes are those of the best four-level quantizer of a normal distribution (Max, 1960; Lloyd, 1982): 0.4528 and
1.5104 standard deviations, the larger one from 0.9816 on. Blocks of an update are near normal. The threshold follows
the block's mean magnitude, which a few large values move less than they move its deviation; the scale is then the one
of least squared error for the magnitudes chosen. A normal block keeps an error of 0.34 of its norm, as the quantizer's
theory says (0.1175 of its square).

As an up codec it needs error feedback, as MuLoCo uses at two bits (arXiv 2505.23725). Down it goes without.

`optim/kernels/blockwise.c` computes the same bits: change both.
"""

from __future__ import annotations

import math
from typing import Final

import torch

from optim.codecs.rows import RowCodec, absmax, check_scales, field

SMALL: Final = 0.4527800346364921  # standard deviations
LARGE: Final = 1.510417608499096
THRESHOLD: Final = (SMALL + LARGE) / 2 / math.sqrt(2 / math.pi)  # in mean magnitudes of a normal distribution
VALUES: Final = (-SMALL, SMALL, -LARGE, LARGE)
"""By code: bit 0 is the sign (1: at least 0), bit 1 the magnitude."""
QUARTER: Final = 32


def block_sums(x: torch.Tensor) -> torch.Tensor:
    """Return the sums of the last dimension of x (R, B, 128), shape (R, B, 1): its second half is added to its first
    one, and so on with the result. The order is part of the format: peers compare bytes."""
    while (half := x.shape[-1] // 2) > 0:
        x = x[..., :half] + x[..., half:]
    return x


class TwoBit(RowCodec):
    """Row: a bf16 scale a block, then 32 bytes a block. Byte k holds the codes of its values k, k + 32, k + 64 and
    k + 96, the first in the low bits. Neighbours so lie at the same bits of successive bytes: their loops vectorize."""

    name = "two_bit"
    block = 4 * QUARTER
    bits_per_value = 2 + 16 / 128
    needs_error_feedback = True
    idempotent = False  # a block with three quarters of large values has another threshold once it is decoded

    def __init__(self) -> None:
        codes = torch.arange(256)[:, None] >> torch.tensor([0, 2, 4, 6]) & 3
        self._fours = torch.tensor(VALUES, dtype=torch.float32)[codes]  # (256, 4)

    def row_bytes(self, values: int) -> int:
        return values // self.block * 2 + values // 4

    def encode_rows(self, x: torch.Tensor, out: torch.Tensor, work: torch.Tensor, valid: int) -> None:
        absmax(x)  # finite
        rows, m = x.shape
        blocks = m // self.block
        starts = torch.arange(blocks, device=x.device) * self.block
        real = (valid - starts).clamp_(1, self.block).float().view(1, blocks, 1)  # values of each block
        sizes = torch.abs(x, out=work).view(rows, blocks, -1)
        total = block_sums(sizes)
        large = sizes > total / real * THRESHOLD
        codes = large.view(torch.uint8).view(rows, m) * 2 + (x >= 0)
        count = large.view(torch.uint8).sum(2, keepdim=True, dtype=torch.uint8)  # at most 128
        of_large = block_sums(sizes.mul_(large))
        squares = real * SMALL**2 + count * (LARGE**2 - SMALL**2)
        scale = (total * SMALL + of_large * (LARGE - SMALL)) / squares
        check_scales(scale, largest=2.0**120)  # a sum may overflow
        a, b, c, d = codes.view(torch.int64).view(rows, blocks, 4, QUARTER // 8).unbind(2)  # eight codes at a time
        out[:, : 2 * blocks] = scale.view(rows, blocks).to(torch.bfloat16).view(torch.uint8)
        out[:, 2 * blocks :].view(rows, blocks, QUARTER).copy_((a | b << 2 | c << 4 | d << 6).view(torch.uint8))

    def decode_rows(self, data: torch.Tensor, out: torch.Tensor, work: torch.Tensor) -> None:
        rows, m = out.shape
        blocks = m // self.block
        scale = field(data, 0, 2 * blocks, torch.bfloat16).float().view(rows, blocks, 1)
        check_scales(scale, largest=2.0**120)
        index = data[:, 2 * blocks :].to(torch.int32).view(-1)
        torch.index_select(self._fours.to(out.device), 0, index, out=work.view(-1, 4))
        fours = work.view(rows, blocks, QUARTER, 4).transpose(2, 3)
        torch.mul(fours, scale[..., None], out=out.view(rows, blocks, 4, QUARTER))
