"""NoLoCo (arXiv 2506.10911): outer steps in random pairs, without a common round."""

from __future__ import annotations

import torch


def pair_step(
    theta: torch.Tensor,
    move: torch.Tensor,
    delta: torch.Tensor,
    apart: torch.Tensor,
    constants: tuple[float, float, float],
) -> None:
    """Make one peer's outer step in place, on any span of its vectors. `delta`: the pair's mean of phi - local;
    `apart`: this peer's phi minus the pair's mean phi; `constants`: alpha, beta, gamma.

    With phi the outer weights (`theta`): move <- alpha * move - beta * delta - gamma * apart; phi <- phi + move. The
    last term pulls the replicas together; they are never equal. The paper's bound for pairs is alpha < gamma; its first
    author's code (jkolehm/noloco, sparse_optimizer_c.py) has gamma = beta = 0.7 and alpha 0.9.
    """
    alpha, beta, gamma = constants
    move.mul_(alpha).sub_(delta * beta).sub_(apart * gamma)
    theta.add_(move)


def pair_mean(mine: torch.Tensor, theirs: torch.Tensor) -> torch.Tensor:
    """Return the mean of two peers' vectors, with one rounding an operation: the same bits on both sides."""
    return (mine * 0.5).add_(theirs * 0.5)
