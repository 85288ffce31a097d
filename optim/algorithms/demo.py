"""DeMo, decoupled momentum (arXiv 2411.19870), as in its reference implementation.

Each step: delta <- decay * delta + lr * gradient. The k largest coefficients of each tile's cosine transform are sent
and subtracted from delta, which is momentum and error feedback at once. theta steps by lr against the SIGN of the mean
of the sent coefficients; the mean of a coefficient is over the peers that sent it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from optim.algorithms.dct_tiles import Tiling, from_cosines, to_cosines
from optim.algorithms.packing import Part, Quantized
from optim.algorithms.sparse import Scheme


@dataclass(frozen=True)
class DemoScheme(Scheme):
    """DeMo's formulas. lr is both inside delta and in the step, as in the reference. `wd`: decoupled, before the step,
    on all parameters."""

    decay: float = 0.999
    topk: int = 32
    wd: float = 0.0
    bins = None

    def kept(self, elements: int) -> int:
        return max(1, min(self.topk, elements))

    def remember(self, memory: torch.Tensor, product: torch.Tensor, lr: float) -> None:
        memory.mul_(self.decay).add_(product * lr)

    def quantize(self, value: torch.Tensor) -> tuple[torch.Tensor, Quantized | None]:
        return value, None

    def coefficients(self, tiles: torch.Tensor, tiling: Tiling) -> torch.Tensor:
        return to_cosines(tiles, tiling)

    def values(self, coefficients: torch.Tensor, tiling: Tiling) -> torch.Tensor:
        return tiling.join(from_cosines(coefficients, tiling))

    def clipped(self, parts: Sequence[Part]) -> Sequence[Part]:
        return parts

    def step_into(self, after: torch.Tensor, before: torch.Tensor, update: torch.Tensor, lr: float) -> None:
        torch.mul(before, 1 - lr * self.wd, out=after)
        after.sub_(update.sign().mul_(lr))
