"""Four-bit codes into a table of 16 values, times a scale a block: NF4 and fp4 E3M0.

value = table[code] * scale, with the code of the nearest table value. Comparing with 15 midpoints would be slow, so the
range is cut into cells that hold at most one midpoint each: one look-up finds the cell's lower code and its midpoint,
one comparison decides.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import ClassVar, Final

import torch

from optim.codecs.blockwise import scales_up
from optim.codecs.rows import RowCodec, absmax, check_scales, field

CELLS: Final = 256  # over [-1, 1]; the closest midpoints, E3M0's around 0, are 2 cells apart


class _Table(RowCodec):
    """A table codec. Row: bf16 scales, then a byte for each two neighbours, the first in the low half. The scale is the
    block's absmax, rounded up to bf16."""

    block: ClassVar[int]

    def __init__(self, values: Sequence[float]) -> None:
        """Prepare the cells. `values`: 16, ascending, between -1 and 1."""
        table = torch.tensor(values, dtype=torch.float32)
        middles = [(a + b) / 2 for a, b in pairwise(values)]
        lower = torch.empty(CELLS + 1, dtype=torch.float32)  # the last cell holds exactly 1
        split = torch.full_like(lower, math.inf)
        for cell in range(CELLS + 1):
            begin = cell * 2 / CELLS - 1
            lower[cell] = sum(m < begin for m in middles)
            inside = [m for m in middles if begin <= m < begin + 2 / CELLS]
            assert len(inside) <= 1, "two midpoints in one cell"
            if inside:
                split[cell] = inside[0]
        self._lower, self._split = lower, split
        pairs = torch.stack([table.repeat(16), table.repeat_interleave(16)], dim=1)  # (256, 2): low half, high half
        self._pairs = pairs.view(torch.int64).view(-1)

    def row_bytes(self, values: int) -> int:
        return values // self.block * 2 + values // 2

    def encode_rows(self, x: torch.Tensor, out: torch.Tensor, work: torch.Tensor, valid: int) -> None:
        rows, m = x.shape
        blocks = m // self.block
        scale, inverse = scales_up(absmax(x.view(rows, blocks, -1)), 1, clear_bits=16)
        torch.mul(x.view(rows, blocks, -1), inverse, out=work.view(rows, blocks, -1))
        cell = work.mul(CELLS / 2).add_(CELLS / 2).to(torch.int32).view(-1)
        cell.clamp_(0, CELLS)  # x may have grown since it was measured: a worker can write it at any time
        code = torch.index_select(self._lower.to(x.device), 0, cell)
        split = torch.index_select(self._split.to(x.device), 0, cell)
        code.add_(torch.gt(work.view(-1), split))
        pairs = code.to(torch.int8).view(torch.int16)  # first neighbour + 256 * second
        out[:, : 2 * blocks] = scale.view(rows, blocks).to(torch.bfloat16).view(torch.uint8)
        out[:, 2 * blocks :] = (pairs | (pairs >> 4)).view(rows, -1)

    def decode_rows(self, data: torch.Tensor, out: torch.Tensor, work: torch.Tensor) -> None:
        rows, m = out.shape
        blocks = m // self.block
        scale = field(data, 0, 2 * blocks, torch.bfloat16).float().view(rows, blocks, 1)
        check_scales(scale, largest=math.ldexp(1.0, 127))
        index = data[:, 2 * blocks :].to(torch.int32).view(-1)
        torch.index_select(self._pairs.to(out.device), 0, index, out=out.view(-1).view(torch.int64))
        out.view(rows, blocks, -1).mul_(scale)


NF4_VALUES: Final = (
    # QLoRA (arXiv 2305.14314), as in bitsandbytes: quantiles of the normal distribution, one of them 0.
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635),
    *(-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725),
    *(0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)


class Nf4(_Table):
    """The 4-bit NormalFloat of QLoRA, block 64, its scale in bf16 instead of fp32."""

    name = "nf4"
    block = 64
    bits_per_value = 4 + 16 / 64

    def __init__(self) -> None:
        super().__init__(NF4_VALUES)


class Fp4(_Table):
    """fp4 E3M0 (Streaming DiLoCo, arXiv 2501.18512): 0 and +-2^-6 ... 2^0 of the block's absmax; block 128. Rounded to
    the nearest value. The 16th code repeats the largest value and is never written."""

    name = "fp4_e3m0"
    block = 128
    bits_per_value = 4 + 16 / 128

    def __init__(self) -> None:
        powers = [2.0**-e for e in range(7)]
        super().__init__([*(-p for p in powers), 0.0, *reversed(powers), 1.0])
