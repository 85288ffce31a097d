"""Inner optimizers on flat vectors: AdamW, Lion, LAMB and Muon.

Elementwise ones see one vector; LAMB and Muon need to know the parameters, and take them from the layout. Their state
is a peer's own: never averaged, never reset by a synchronization.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Final, Literal

import torch

from peer.errors import ConfigError
from peer.layout import FlatLayout

NEWTON_SCHULZ: Final = (3.4445, -4.7750, 2.0315)


@dataclass(frozen=True)
class InnerSpec:
    """`momentum` and `newton_schulz_steps` are Muon's; what is not a matrix of a block gets AdamW with the rest."""

    optimizer: Literal["adamw", "adamw8bit", "lion", "lamb", "muon"] = "adamw"
    lr: float = 1e-2
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1
    momentum: float = 0.95
    newton_schulz_steps: int = 5


class InnerOptimizer(ABC):
    def __init__(self, spec: InnerSpec, layout: FlatLayout, like: torch.Tensor) -> None:
        self.spec, self.layout, self.steps = spec, layout, 0
        self.lr = spec.lr  # schedules set it

    @abstractmethod
    def step(self, theta: torch.Tensor, gradient: torch.Tensor) -> None:
        """Move theta (n,) in place. `gradient` is only read."""

    @abstractmethod
    def state_dict(self) -> dict[str, torch.Tensor]: ...


class AdamW(InnerOptimizer):
    """Decoupled weight decay (arXiv 1711.05101), in torch's order of operations."""

    def __init__(self, spec: InnerSpec, layout: FlatLayout, like: torch.Tensor) -> None:
        super().__init__(spec, layout, like)
        self.mean, self.square = torch.zeros_like(like), torch.zeros_like(like)

    def step(self, theta: torch.Tensor, gradient: torch.Tensor) -> None:
        theta.mul_(1 - self.lr * self.spec.weight_decay)
        theta.sub_(self._direction(gradient).mul_(self.lr))

    def _direction(self, gradient: torch.Tensor) -> torch.Tensor:
        """The bias-corrected m / (sqrt(v) + eps)."""
        self.steps += 1
        b1, b2 = self.spec.betas
        self.mean.mul_(b1).add_(gradient * (1 - b1))
        self.square.mul_(b2).add_(gradient * gradient * (1 - b2))
        denominator = (self.square.sqrt() / math.sqrt(1 - b2**self.steps)).add_(self.spec.eps)
        return (self.mean / (1 - b1**self.steps)).div_(denominator)

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {"mean": self.mean, "square": self.square, "steps": torch.tensor(self.steps)}


class Lamb(AdamW):
    """LAMB (arXiv 1904.00962): AdamW's direction plus decay, scaled by |theta| / |direction| for each parameter."""

    def step(self, theta: torch.Tensor, gradient: torch.Tensor) -> None:
        direction = self._direction(gradient).add_(theta * self.spec.weight_decay)
        weights = self.layout.views(theta).values()
        for weight, move in zip(weights, self.layout.views(direction).values(), strict=True):
            size, length = float(weight.norm()), float(move.norm())
            weight.sub_(move * (self.lr * (size / length if size > 0 and length > 0 else 1.0)))


class Lion(InnerOptimizer):
    """Lion (arXiv 2302.06675)."""

    def __init__(self, spec: InnerSpec, layout: FlatLayout, like: torch.Tensor) -> None:
        super().__init__(spec, layout, like)
        self.mean = torch.zeros_like(like)

    def step(self, theta: torch.Tensor, gradient: torch.Tensor) -> None:
        b1, b2 = self.spec.betas
        move = (self.mean * b1).add_(gradient * (1 - b1)).sign_()
        theta.sub_(move.add_(theta * self.spec.weight_decay).mul_(self.lr))
        self.mean.mul_(b2).add_(gradient * (1 - b2))

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {"mean": self.mean}


class Muon(AdamW):
    """Muon (Jordan et al. 2024; torch.optim.Muon): momentum, orthogonalized, for matrices inside blocks. Embeddings,
    heads, gains and biases get AdamW. In the dtype of the weights; torch's own orthogonalizes in bf16."""

    def __init__(self, spec: InnerSpec, layout: FlatLayout, like: torch.Tensor) -> None:
        super().__init__(spec, layout, like)
        self.matrices = [
            name
            for name, slot in layout.slots.items()
            if len(slot.shape) == 2 and "embed" not in name and "lm_head" not in name
        ]
        self.momentum = torch.zeros_like(like)

    def step(self, theta: torch.Tensor, gradient: torch.Tensor) -> None:
        before = {name: self.layout.views(theta)[name].clone() for name in self.matrices}
        super().step(theta, gradient)
        beta = self.spec.momentum
        self.momentum.mul_(beta).add_(gradient * (1 - beta))
        ahead = (gradient * (1 - beta)).add_(self.momentum * beta)  # Nesterov
        weights, moves = self.layout.views(theta), self.layout.views(ahead)
        for name in self.matrices:
            rows, columns = before[name].shape
            move = orthogonalized(moves[name], self.spec.newton_schulz_steps)
            weights[name].copy_(before[name]).mul_(1 - self.lr * self.spec.weight_decay)
            weights[name].sub_(move * (self.lr * math.sqrt(max(1.0, rows / columns))))

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {**super().state_dict(), "momentum": self.momentum}


def orthogonalized(x: torch.Tensor, steps: int) -> torch.Tensor:
    """(a, b) -> about the nearest matrix with all singular values 1, by Newton and Schulz's quintic iteration."""
    a, b, c = NEWTON_SCHULZ
    tall = x.shape[0] > x.shape[1]  # the smaller Gram matrix is cheaper
    y: torch.Tensor = (x.T if tall else x) / x.norm().clamp(min=1e-7)
    for _ in range(steps):
        gram = y @ y.T
        y = torch.add(y * a, torch.mm(gram * b + torch.mm(gram, gram) * c, y))
    return y.T if tall else y


_KINDS: Final[dict[str, type[InnerOptimizer]]] = {"adamw": AdamW, "lion": Lion, "lamb": Lamb, "muon": Muon}


def build_inner(spec: InnerSpec, layout: FlatLayout, like: torch.Tensor) -> InnerOptimizer:
    """The optimizer `spec` names, with fresh state for vectors like `like`; `ConfigError` if there is none."""
    if spec.optimizer == "adamw8bit":
        from optim.inner_8bit import AdamW8bit  # not at the top: it imports this file, and bitsandbytes is heavy

        return AdamW8bit(spec, layout, like)
    if spec.optimizer not in _KINDS:
        names = ", ".join([*_KINDS, "adamw8bit"])
        raise ConfigError(f"there is no inner optimizer {spec.optimizer!r}: choose one of {names}.")
    return _KINDS[spec.optimizer](spec, layout, like)
