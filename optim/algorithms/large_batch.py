"""One step of AdamW or LAMB that all members of a run make on the same merged gradient.

All CPUs get the same bits: every operation is its own call with its own rounding, and norms are summed in a fixed order
(`optim.deterministic`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

import torch

from optim.deterministic import norm, power, square_root
from peer.model.layout import FlatLayout

CHUNK: Final = 1 << 16  # values; the six vectors' chunks stay in the L2 cache


@dataclass(frozen=True)
class LargeBatchStep:
    """AdamW with decoupled decay (arXiv 1711.05101) in torch's order of operations, or LAMB (1904.00962, algorithm 2
    with phi the identity): AdamW's direction plus decay, scaled by |theta| / |direction| for each parameter.

    The gradient is clipped to `clip_norm` first. `matrices_only`: gains and biases do not decay.
    """

    optimizer: Literal["adamw", "lamb"] = "adamw"
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1
    clip_norm: float = math.inf
    matrices_only: bool = False

    def step_into(
        self,
        after: Sequence[torch.Tensor],
        before: Sequence[torch.Tensor],
        gradient: torch.Tensor,
        layout: FlatLayout,
        t: int,
        lr: float,
    ) -> None:
        """Make step number `t` (from 1). `after`, `before`: [theta, mean, square], each (P,), on the CPU; they may be
        the same tensors. `lr`: the run's, the same at all members."""
        length = norm(gradient)
        shorten = self.clip_norm / length if length > self.clip_norm else 1.0
        for slot in layout.slots.values():
            decay = self.weight_decay if len(slot.shape) > 1 or not self.matrices_only else 0.0
            span = slice(slot.offset, slot.offset + slot.numel)
            direction = torch.empty_like(gradient[span]) if self.optimizer == "lamb" else None
            for first in range(span.start, span.stop, CHUNK):
                part = slice(first, min(first + CHUNK, span.stop))
                move = self._direction([x[part] for x in after], [x[part] for x in before], gradient[part], shorten, t)
                theta, new = before[0][part], after[0][part]
                if direction is not None:
                    torch.add(move, theta * decay, out=direction[part.start - span.start : part.stop - span.start])
                else:
                    torch.mul(theta, 1 - lr * decay, out=new).sub_(move.mul_(lr))
            if direction is not None:
                size, length = norm(before[0][span]), norm(direction)
                ratio = size / length if size > 0 and length > 0 else 1.0
                torch.sub(before[0][span], direction.mul_(lr * ratio), out=after[0][span])

    def _direction(
        self,
        after: Sequence[torch.Tensor],
        before: Sequence[torch.Tensor],
        gradient: torch.Tensor,
        shorten: float,
        t: int,
    ) -> torch.Tensor:
        """Update a chunk's moments and return its bias-corrected m / (sqrt(v) + eps)."""
        b1, b2 = self.betas
        g = gradient * shorten
        mean = torch.mul(before[1], b1, out=after[1]).add_(g * (1 - b1))
        square = torch.mul(before[2], b2, out=after[2]).add_(g.mul_(g).mul_(1 - b2))
        root = square_root(square, out=g).div_(math.sqrt(1 - power(b2, t))).add_(self.eps)
        return (mean / (1 - power(b1, t))).div_(root)
