"""DiLoCo's outer optimizer (arXiv 2311.08105): SGD with Nesterov momentum on the merged pseudo-gradient.

Peers compare hashes of the result, so every CPU must get the same bits. IEEE 754 fixes the bits of one multiplication
or addition, but not whether two are fused, and torch's `add(alpha=...)`, `addcmul`, `lerp` and `torch.optim.SGD` fuse
on some CPUs and not on others. So: one rounding an operation, each its own call.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch

CHUNK: Final = 1 << 16  # values; four chunks of fp32 stay in one core's L2 cache over the six passes


@dataclass(frozen=True)
class DilocoOuter:
    """momentum 0 and lr 1: FedAvg, Local SGD. `nesterov=False`: heavy-ball momentum."""

    lr: float = 0.7
    momentum: float = 0.9
    nesterov: bool = True

    def step(self, theta: torch.Tensor, velocity: torch.Tensor, update: torch.Tensor) -> None:
        """velocity <- momentum * velocity + update;  theta <- theta - lr * (update + momentum * velocity).

        In place; all flat and of one shape and floating dtype; `update` (old weights minus new) is only read. torch's
        form of momentum: no dampening, so the first velocity is the first update. Any slice can be stepped by itself.
        """
        if not theta.shape == velocity.shape == update.shape:
            raise ValueError("weights, velocity and update must have one shape")
        scratch = torch.empty_like(theta[:CHUNK])
        for first in range(0, theta.numel(), CHUNK):
            span = slice(first, first + CHUNK)
            t, v, u = theta[span], velocity[span], update[span]
            v.mul_(self.momentum).add_(u)
            if self.nesterov:
                move = torch.mul(v, self.momentum, out=scratch[: len(t)]).add_(u).mul_(self.lr)
            else:
                move = torch.mul(v, self.lr, out=scratch[: len(t)])
            t.sub_(move)
