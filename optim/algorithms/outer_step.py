"""DiLoCo's outer optimizer (arXiv 2311.08105): SGD with Nesterov momentum on the merged pseudo-gradient.

Peers compare hashes of the result, so every CPU must get the same bits. IEEE 754 fixes the bits of one multiplication
or addition, but not whether two are fused: torch's `add(alpha=...)`, `addcmul`, `lerp` and `torch.optim.SGD` fuse on
some CPUs only. Here every operation is its own call with its own rounding; `optim/kernels` computes the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch

CHUNK: Final = 1 << 16  # values; four chunks of fp32 stay in one core's L2 cache over the six passes


@dataclass(frozen=True)
class DilocoOuter:
    """The outer step. With momentum 0 and lr 1 the weights become the mean of the peers' weights. `nesterov=False`:
    heavy-ball momentum."""

    lr: float = 0.7
    momentum: float = 0.9
    nesterov: bool = True

    def step(self, theta: torch.Tensor, velocity: torch.Tensor, update: torch.Tensor) -> None:
        """Make `step_into` in place."""
        self.step_into(theta, velocity, theta, velocity, update)

    def step_into(
        self,
        next_theta: torch.Tensor,
        next_velocity: torch.Tensor,
        theta: torch.Tensor,
        velocity: torch.Tensor,
        update: torch.Tensor,
    ) -> None:
        """Make one outer step.

        next velocity = momentum * velocity + update;  next theta = theta - lr * (update + momentum * next velocity)

        All vectors are flat, of one shape and floating dtype; `update` (old weights minus new) is only read. As in
        torch, momentum has no dampening: the first velocity is the first update. Each slice can be stepped alone.
        """
        if not next_theta.shape == next_velocity.shape == theta.shape == velocity.shape == update.shape:
            raise ValueError("weights, velocity and update differ in shape: pass vectors of one shape")
        scratch = torch.empty_like(theta[:CHUNK])
        for first in range(0, theta.numel(), CHUNK):
            span = slice(first, first + CHUNK)
            u = update[span]
            v = torch.mul(velocity[span], self.momentum, out=next_velocity[span]).add_(u)
            if self.nesterov:
                move = torch.mul(v, self.momentum, out=scratch[: len(u)]).add_(u).mul_(self.lr)
            else:
                move = torch.mul(v, self.lr, out=scratch[: len(u)])
            torch.sub(theta[span], move, out=next_theta[span])
