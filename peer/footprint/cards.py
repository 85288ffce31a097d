"""Common cards: their memory, and the FLOP/s that training keeps up on them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

UTILIZATION: Final = 0.4
"""Of a card's dense bf16 rate, as its vendor states it: what training commonly reaches. An H100 reached 0.38 with a
billion parameters, and 0.21 with an eighth of that (benchmarks/machine/steps.py)."""


@dataclass(frozen=True)
class Card:
    """`peak`: dense bf16 products with fp32 sums, FLOP/s."""

    memory_bytes: float
    peak: float

    @property
    def flops(self) -> float:
        """FLOP/s that training keeps up."""
        return UTILIZATION * self.peak


CARDS: Final[dict[str, Card]] = {
    "rtx3060": Card(12e9, 51e12),
    "rtx3090": Card(24e9, 71e12),
    "rtx4070": Card(12e9, 58e12),
    "rtx4080": Card(16e9, 97e12),
    "rtx4090": Card(24e9, 165e12),
    "rtx5090": Card(32e9, 210e12),
    "a100": Card(80e9, 312e12),
    "h100": Card(80e9, 989e12),
    "h200": Card(141e9, 989e12),
}
