"""Inner optimizers on flat vectors: AdamW, LAMB, Lion and Muon."""

from __future__ import annotations

import math
from typing import Final

import torch

from peer.compute.optimizer import InnerOptimizer, InnerSpec
from peer.footprint.optimizer_state import is_inner_matrix
from peer.model.layout import FlatLayout

NEWTON_SCHULZ: Final = (3.4445, -4.7750, 2.0315)


class AdamW(InnerOptimizer):
    """Decoupled weight decay (arXiv 1711.05101), before the step, as torch does it."""

    def __init__(self, spec: InnerSpec, layout: FlatLayout, like: torch.Tensor) -> None:
        super().__init__(spec, layout, like)
        self.mean, self.square = self.state.view(2, -1).unbind()

    def step(self, theta: torch.Tensor, gradient: torch.Tensor) -> None:
        self.steps += 1
        for at, decay in self._slices():
            direction = self._adam_direction(gradient[at], self.mean[at], self.square[at])
            theta[at].mul_(1 - self.lr * decay).sub_(direction.mul_(self.lr))

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {"mean": self.mean, "square": self.square, "steps": torch.tensor(self.steps)}


class Lamb(AdamW):
    """LAMB (arXiv 1904.00962): AdamW's direction plus decay, scaled by |theta| / |direction| for each parameter."""

    def step(self, theta: torch.Tensor, gradient: torch.Tensor) -> None:
        self.steps += 1
        for at, decay in self._slices():
            weight = theta[at]
            move = self._adam_direction(gradient[at], self.mean[at], self.square[at]).add_(weight * decay)
            size, length = float(weight.norm()), float(move.norm())
            weight.sub_(move.mul_(self.lr * (size / length if size > 0 and length > 0 else 1.0)))


class Lion(InnerOptimizer):
    """Lion (arXiv 2302.06675). Its learning rate is 3 to 10 times smaller than AdamW's."""

    def step(self, theta: torch.Tensor, gradient: torch.Tensor) -> None:
        self.steps += 1
        b1, b2 = self.spec.betas
        for at, decay in self._slices():
            g, mean = gradient[at], self.state[at]
            move = (mean * b1).add_(g * (1 - b1)).sign_()
            theta[at].mul_(1 - self.lr * decay).sub_(move.mul_(self.lr))
            mean.mul_(b2).add_(g * (1 - b2))

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {"mean": self.state}


class Muon(InnerOptimizer):
    """Muon (Jordan et al. 2024; torch.optim.Muon): orthogonalized momentum for matrices inside blocks.

    Embeddings, heads, gains and biases get AdamW with the same learning rate; `muon_scale` "match_rms_adamw" (arXiv
    2502.16982) makes one rate right for both. Orthogonalizes in the dtype of the weights; torch's Muon does in bf16.
    """

    def __init__(self, spec: InnerSpec, layout: FlatLayout, like: torch.Tensor) -> None:
        super().__init__(spec, layout, like)
        self.momentum: dict[str, torch.Tensor] = {}
        self.mean: dict[str, torch.Tensor] = {}
        self.square: dict[str, torch.Tensor] = {}
        at = 0
        for name, slot in layout.slots.items():
            for store in (self.momentum,) if is_inner_matrix(name, slot.shape) else (self.mean, self.square):
                store[name] = self.state[at : at + slot.numel].view(slot.shape)
                at += slot.numel

    def step(self, theta: torch.Tensor, gradient: torch.Tensor) -> None:
        self.steps += 1
        beta = self.spec.momentum
        weights, gradients = self.layout.views(theta), self.layout.views(gradient)
        for name, slot in self.layout.slots.items():
            g, rate = gradients[name], self.lr
            if name in self.momentum:
                momentum = self.momentum[name].mul_(beta).add_(g * (1 - beta))
                ahead = (g * (1 - beta)).add_(momentum * beta)  # Nesterov
                move = orthogonalized(ahead, self.spec.newton_schulz_steps)
                rate *= self._scale(*slot.shape)
            else:
                move = self._adam_direction(g, self.mean[name], self.square[name])
            weights[name].mul_(1 - self.lr * self._decays(slot)).sub_(move * rate)

    def state_dict(self) -> dict[str, torch.Tensor]:
        named = {"momentum": self.momentum, "mean": self.mean, "square": self.square}
        parts = {f"{part}.{name}": value for part, values in named.items() for name, value in values.items()}
        return {**parts, "steps": torch.tensor(self.steps)}

    def _scale(self, rows: int, columns: int) -> float:
        if self.spec.muon_scale == "original":
            return math.sqrt(max(1.0, rows / columns))
        return 0.2 * math.sqrt(max(rows, columns))


def orthogonalized(x: torch.Tensor, steps: int) -> torch.Tensor:
    """Approximate the nearest matrix to x (a, b) with all singular values 1, by the quintic Newton-Schulz iteration."""
    a, b, c = NEWTON_SCHULZ
    tall = x.shape[0] > x.shape[1]  # the smaller Gram matrix is cheaper
    y: torch.Tensor = (x.T if tall else x) / x.norm().clamp(min=1e-7)
    for _ in range(steps):
        gram = y @ y.T
        y = torch.add(y * a, torch.mm(gram * b + torch.mm(gram, gram) * c, y))
    return y.T if tall else y
