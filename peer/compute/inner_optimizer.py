"""Inner optimizers on flat vectors: AdamW, Lion, LAMB and Muon.

n: length of the flat vector. Their state is a peer's own: never averaged, never reset by a synchronization. All of it
but the count of steps is one vector, so that it can be kept outside the process and taken up again to the bit.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Final, Literal

import torch

from peer.config import InnerConfig
from peer.errors import ConfigError
from peer.model.layout import FlatLayout, TensorSlot

NEWTON_SCHULZ: Final = (3.4445, -4.7750, 2.0315)
_COUNT_BYTES: Final = 8  # of the count of steps in a saved state


@dataclass(frozen=True)
class InnerSpec:
    """`momentum`, `newton_schulz_steps` and `muon_scale` are Muon's. `decay`: which parameters `weight_decay` is for;
    "matrices" spares gains and biases."""

    optimizer: Literal["adamw", "adamw8bit", "lion", "lamb", "muon"] = "adamw"
    lr: float = 1e-2
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1
    momentum: float = 0.95
    newton_schulz_steps: int = 5
    muon_scale: Literal["original", "match_rms_adamw"] = "original"
    decay: Literal["all", "matrices"] = "all"

    @classmethod
    def of(cls, config: InnerConfig) -> InnerSpec:
        """What a run's manifest says; there, gains and biases do not decay."""
        return cls(
            optimizer=config.optimizer,
            lr=config.lr,
            betas=config.betas,
            eps=config.eps,
            weight_decay=config.weight_decay,
            momentum=config.momentum,
            newton_schulz_steps=config.newton_schulz_steps,
            muon_scale=config.muon_scale,
            decay="matrices",
        )


class InnerOptimizer(ABC):
    """`lr` is the next step's rate: schedules set it. `steps` counts the steps made. `state`: all else that it
    remembers, (k,), zero at first."""

    copies: ClassVar[int]
    """How many vectors like the weights it keeps."""

    def __init__(self, spec: InnerSpec, layout: FlatLayout, like: torch.Tensor) -> None:
        self.spec, self.layout, self.steps, self.lr = spec, layout, 0, spec.lr
        self.state = self._make_state(like)

    @abstractmethod
    def step(self, theta: torch.Tensor, gradient: torch.Tensor) -> None:
        """Move theta (n,) in place. `gradient` (n,) is only read."""

    @abstractmethod
    def state_dict(self) -> dict[str, torch.Tensor]:
        """By name: views of `state`, and what else a checkpoint needs."""

    @classmethod
    def state_size(cls, layout: FlatLayout) -> int:
        """Elements of `state`."""
        return cls.copies * layout.numel

    def save(self, out: torch.Tensor) -> None:
        """Into `out`, uint8 (state_bytes,)."""
        state = self.state.view(torch.uint8)
        out[: len(state)].copy_(state)
        out[-_COUNT_BYTES:].view(torch.int64).fill_(self.steps)

    def load(self, saved: torch.Tensor) -> None:
        """The inverse of `save`, to the bit. All zero is the state before the first step."""
        self.steps = int(saved[-_COUNT_BYTES:].view(torch.int64))
        if self.steps:  # else there is nothing, and reading it would cost memory
            state = self.state.view(torch.uint8)
            state.copy_(saved[: len(state)])

    def _make_state(self, like: torch.Tensor) -> torch.Tensor:
        return like.new_zeros(self.state_size(self.layout))

    def _rows(self, count: int) -> tuple[torch.Tensor, ...]:
        """`state` as so many vectors like the weights."""
        return self.state.view(count, -1).unbind()

    def _decays(self, slot: TensorSlot) -> float:
        """The weight decay of one parameter."""
        return self.spec.weight_decay if self.spec.decay == "all" or len(slot.shape) > 1 else 0.0

    def _places(self) -> Iterator[tuple[slice, float]]:
        """Where each parameter lies, and its weight decay: pieces that are small beside the whole."""
        for slot in self.layout.slots.values():
            yield slice(slot.offset, slot.offset + slot.numel), self._decays(slot)

    def _adam_direction(self, gradient: torch.Tensor, mean: torch.Tensor, square: torch.Tensor) -> torch.Tensor:
        """Adam's moments moved on, and the bias-corrected m / (sqrt(v) + eps), in torch's order of operations."""
        b1, b2 = self.spec.betas
        mean.mul_(b1).add_(gradient * (1 - b1))
        square.mul_(b2).add_(gradient * gradient * (1 - b2))
        denominator = (square.sqrt() / math.sqrt(1 - b2**self.steps)).add_(self.spec.eps)
        return (mean / (1 - b1**self.steps)).div_(denominator)


class AdamW(InnerOptimizer):
    """Decoupled weight decay (arXiv 1711.05101), before the step, as torch does it."""

    copies = 2

    def __init__(self, spec: InnerSpec, layout: FlatLayout, like: torch.Tensor) -> None:
        super().__init__(spec, layout, like)
        self.mean, self.square = self._rows(2)

    def step(self, theta: torch.Tensor, gradient: torch.Tensor) -> None:
        self.steps += 1
        for at, decay in self._places():
            direction = self._adam_direction(gradient[at], self.mean[at], self.square[at])
            theta[at].mul_(1 - self.lr * decay).sub_(direction.mul_(self.lr))

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {"mean": self.mean, "square": self.square, "steps": torch.tensor(self.steps)}


class Lamb(AdamW):
    """LAMB (arXiv 1904.00962): AdamW's direction plus decay, scaled by |theta| / |direction| for each parameter."""

    def step(self, theta: torch.Tensor, gradient: torch.Tensor) -> None:
        self.steps += 1
        for at, decay in self._places():
            weight = theta[at]
            move = self._adam_direction(gradient[at], self.mean[at], self.square[at]).add_(weight * decay)
            size, length = float(weight.norm()), float(move.norm())
            weight.sub_(move.mul_(self.lr * (size / length if size > 0 and length > 0 else 1.0)))


class Lion(InnerOptimizer):
    """Lion (arXiv 2302.06675), which wants a learning rate 3 to 10 times smaller than AdamW's."""

    copies = 1

    def step(self, theta: torch.Tensor, gradient: torch.Tensor) -> None:
        self.steps += 1
        b1, b2 = self.spec.betas
        for at, decay in self._places():
            g, mean = gradient[at], self.state[at]
            move = (mean * b1).add_(g * (1 - b1)).sign_()
            theta[at].mul_(1 - self.lr * decay).sub_(move.mul_(self.lr))
            mean.mul_(b2).add_(g * (1 - b2))

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {"mean": self.state}


class Muon(InnerOptimizer):
    """Muon (Jordan et al. 2024; torch.optim.Muon): momentum, orthogonalized, for matrices inside blocks. Embeddings,
    heads, gains and biases get AdamW, with the same learning rate: `muon_scale` "match_rms_adamw" (arXiv 2502.16982)
    makes one rate right for both. Orthogonalizes in the dtype of the weights, torch's own in bf16."""

    def __init__(self, spec: InnerSpec, layout: FlatLayout, like: torch.Tensor) -> None:
        super().__init__(spec, layout, like)
        self.momentum: dict[str, torch.Tensor] = {}
        self.mean: dict[str, torch.Tensor] = {}
        self.square: dict[str, torch.Tensor] = {}
        at = 0
        for name, slot in layout.slots.items():
            for store in (self.momentum,) if _is_inner_matrix(name, slot) else (self.mean, self.square):
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

    @classmethod
    def state_size(cls, layout: FlatLayout) -> int:
        return sum((1 if _is_inner_matrix(name, slot) else 2) * slot.numel for name, slot in layout.slots.items())

    def _scale(self, rows: int, columns: int) -> float:
        if self.spec.muon_scale == "original":
            return math.sqrt(max(1.0, rows / columns))
        return 0.2 * math.sqrt(max(rows, columns))


def _is_inner_matrix(name: str, slot: TensorSlot) -> bool:
    return len(slot.shape) == 2 and "embed" not in name and "lm_head" not in name


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
    """The optimizer `spec` names, with fresh state for vectors like `like`; `ConfigError` if there is none, or what it
    needs is not installed."""
    return _kind(spec)(spec, layout, like)


def state_bytes(spec: InnerSpec, layout: FlatLayout) -> int:
    """What a saved state of that optimizer takes, for fp32 weights. Loads no library."""
    kind = _kind(spec)
    size = kind.state_size(layout) * (1 if spec.optimizer == "adamw8bit" else 4)
    return size + -size % _COUNT_BYTES + _COUNT_BYTES  # the count is aligned


def _kind(spec: InnerSpec) -> type[InnerOptimizer]:
    if spec.optimizer == "adamw8bit":
        from peer.compute.adamw_8bit import AdamW8bit  # not at the top: it imports this file

        return AdamW8bit
    if spec.optimizer not in _KINDS:
        names = ", ".join([*_KINDS, "adamw8bit"])
        raise ConfigError(f"there is no inner optimizer {spec.optimizer!r}: choose one of {names}.")
    return _KINDS[spec.optimizer]
