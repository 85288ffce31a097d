"""Weights as bf16 values and a correction of their rounding in int8: 3 bytes a value, with 16 bits of significand.

As in FlashOptim (arXiv 2602.23349): w = b + e, where b is w rounded to bf16, so that |e| is at most half the distance u
of b to its neighbour. The correction is the nearest integer to e / (u / 2) * 127. A product reads b as it is. Here e is
counted in places of fp32, of which u / 2 has 2^15: the bits of two floats of one sign, read as integers, differ by the
number of floats between them. So no division rounds, subnormal values need no rule of their own, and just below a power
of two, where the neighbour is at half the distance, the correction is twice as fine. n: number of values.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

CODE_MAX: Final = 127
_HALF_BITS: Final = 15  # half the distance of two bf16 values is 2^15 places
_PLACES: Final = 33026  # 2^15 / 127 places of one code, times 2^7
_PLACES_BITS: Final = 7


@dataclass(frozen=True)
class SplitVector:
    """n values: `narrow` (n,) bf16, the values rounded, and `correction` (n,) int8."""

    narrow: Tensor
    correction: Tensor

    @classmethod
    def zeros(cls, numel: int, device: torch.device) -> SplitVector:
        """Return `numel` zeros on that device."""
        return cls(
            torch.zeros(numel, dtype=torch.bfloat16, device=device),
            torch.zeros(numel, dtype=torch.int8, device=device),
        )

    @classmethod
    def of(cls, values: Tensor) -> SplitVector:
        """Return the split form of values (n,) fp32."""
        made = cls.zeros(len(values), values.device)
        made.write(slice(0, len(values)), values)
        return made

    def read(self, at: slice) -> Tensor:
        """Return the values at these elements, a new fp32 tensor."""
        places = (
            self.correction[at].int().mul_(_PLACES).add_(1 << (_PLACES_BITS - 1)).bitwise_right_shift_(_PLACES_BITS)
        )
        return places.add_(_bits(self.narrow[at])).view(torch.float32)

    def write(self, at: slice, values: Tensor) -> None:
        """Hold values (n,) fp32, contiguous and on the same device, at these n elements.

        What `read` returns then is off by at most 2^-8 of the distance of two bf16 values there, and exact for bf16
        values, NaN and infinities; written once more it is the same. A value beyond the largest one of bf16 (3.39e38)
        may become infinite.
        """
        self.narrow[at] = values
        error = values.view(torch.int32) - _bits(self.narrow[at])
        code = error.mul_(CODE_MAX).add_(1 << (_HALF_BITS - 1)).bitwise_right_shift_(_HALF_BITS)
        self.correction[at] = code.clamp_(-CODE_MAX, CODE_MAX)  # only a NaN, whose bits have no order, needs the clamp


def _bits(narrow: Tensor) -> Tensor:
    """Return the bits of bf16 values as those of the same values in fp32, int32."""
    return narrow.view(torch.int16).int().bitwise_left_shift_(16)
