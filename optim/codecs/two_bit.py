"""Two bits a value: a sign and one of two magnitudes, times a scale a block of 128.

The magnitudes are those of the best four-level quantizer of a normal distribution (Max, 1960; Lloyd, 1982): 0.4528 and
1.5104 standard deviations, the larger one from 0.9816 on. Blocks of an update are near normal. The threshold follows
the block's mean magnitude, which a few large values move less than they move its deviation; the scale is then the one
of least squared error for the magnitudes chosen. A normal block keeps an error of 0.34 of its norm, as the quantizer's
theory says (0.1175 of its square).

As an up codec it needs error feedback, as MuLoCo uses at two bits (arXiv 2505.23725). Down it goes without.
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
A_BYTE: Final = 4


class TwoBit(RowCodec):
    """Row: a bf16 scale a block, then a byte for each four neighbours, the first in the low bits."""

    name = "two_bit"
    block = 128
    bits_per_value = 2 + 16 / 128
    needs_error_feedback = True
    idempotent = False  # a block with three quarters of large values has another threshold once it is decoded

    def __init__(self) -> None:
        codes = torch.arange(256)[:, None] >> torch.tensor([0, 2, 4, 6]) & 3
        self._fours = torch.tensor(VALUES, dtype=torch.float32)[codes]  # (256, 4)

    def row_bytes(self, values: int) -> int:
        return values // self.block * 2 + values // A_BYTE

    def encode_rows(self, x: torch.Tensor, out: torch.Tensor, work: torch.Tensor, valid: int) -> None:
        absmax(x)  # finite
        rows, m = x.shape
        blocks = m // self.block
        starts = torch.arange(blocks, device=x.device) * self.block
        real = (valid - starts).clamp_(1, self.block).float().view(1, blocks, 1)  # values of each block
        sizes = torch.abs(x, out=work).view(rows, blocks, -1)
        total = sizes.sum(2, keepdim=True)
        large = sizes > total * (THRESHOLD / real)
        codes = large.view(torch.uint8).view(rows, m) * 2 + (x >= 0)
        count, of_large = large.sum(2, keepdim=True), sizes.mul_(large).sum(2, keepdim=True)
        squares = real * SMALL**2 + count * (LARGE**2 - SMALL**2)
        scale = ((total * SMALL + of_large * (LARGE - SMALL)) / squares).to(torch.bfloat16)
        check_scales(scale.float(), largest=2.0**120)  # a sum may overflow
        fours = codes.view(torch.int32)
        packed = fours | (fours >> 6) | (fours >> 12) | (fours >> 18)
        out[:, : 2 * blocks] = scale.view(rows, blocks).view(torch.uint8)
        out[:, 2 * blocks :] = packed & 0xFF

    def decode_rows(self, data: torch.Tensor, out: torch.Tensor, work: torch.Tensor) -> None:
        rows, m = out.shape
        blocks = m // self.block
        scale = field(data, 0, 2 * blocks, torch.bfloat16).float().view(rows, blocks, 1)
        check_scales(scale, largest=2.0**120)
        index = data[:, 2 * blocks :].to(torch.int32).view(-1)
        torch.index_select(self._fours.to(out.device), 0, index, out=out.view(-1, A_BYTE))
        out.view(rows, blocks, -1).mul_(scale)
