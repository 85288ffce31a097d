"""NoLoCo (arXiv 2506.10911): outer steps in random pairs, without a common round."""

from __future__ import annotations

import random

import torch

from optim.algorithms.gossip import pair_step
from peer.model.layout import FlatLayout
from tests.optim.reference.interface import Dense


class Gossip(Dense):
    """NoLoCo. Every H inner steps a peer exchanges with one other, newly drawn. With phi its outer weights,
    delta = phi - local, and means over the pair:

        move <- alpha * move - beta * mean(delta) - gamma * (phi - mean(phi));  phi <- phi + move;  local <- phi

    The last term pulls the replicas together. They are never equal, so there is no state hash to vote on, and a
    checkpoint is one peer's. With an odd number of peers one merges with itself. The message is delta and phi, side by
    side: phi can be sent early. The paper's bound for pairs is alpha < gamma; its first author's code (jkolehm/noloco,
    sparse_optimizer_c.py) has gamma = beta = 0.7 and alpha 0.9.
    """

    def __init__(
        self,
        layout: FlatLayout,
        theta: torch.Tensor,
        H: int,
        alpha: float = 0.5,
        beta: float = 0.7,
        gamma: float = 0.6,
        seed: int = 0,
    ) -> None:
        super().__init__(layout, theta)
        self.every, self.alpha, self.beta, self.gamma, self.seed = H, alpha, beta, gamma, seed
        self.move = torch.zeros_like(theta)

    def sends(self, step: int) -> bool:
        return step % self.every == 0

    def outgoing(self, local: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        return torch.cat([self.theta - local, self.theta])

    def incoming(self, merged: torch.Tensor | None, local: torch.Tensor) -> None:
        assert merged is not None
        delta, phi = merged.chunk(2)
        pair_step(self.theta, self.move, delta, self.theta - phi, (self.alpha, self.beta, self.gamma))
        local.copy_(self.theta)

    def partners(self, exchange: int, peers: int) -> list[list[int]]:
        """Draw pairs from the seed, the same at every peer."""
        order = list(range(peers))
        random.Random(self.seed * 1_000_003 + exchange).shuffle(order)
        return [sorted(order[i : i + 2]) for i in range(0, peers, 2)]

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {"move": self.move}
