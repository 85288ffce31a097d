"""The interface of inner optimizers on flat vectors.

n: length of the flat vector. The state is a peer's own: it is never averaged, and never reset by a synchronization. All
of it but the count of steps is one vector, so that it can be kept outside the process and restored to the bit.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Literal

import torch

from peer.config import InnerConfig
from peer.errors import ConfigError
from peer.footprint.optimizer_state import COUNT_BYTES, state_size
from peer.model.layout import FlatLayout, TensorSlot
from peer.model.split_weights import SplitVector

PIECE: Final = 1 << 21
"""Values of split weights that exist in fp32 at a time; a multiple of the values that share a scale in adamw8bit.
More of them leave a CPU's caches (2^22 took 1.6 times as long as 2^20), fewer keep a GPU waiting for launches."""


@dataclass(frozen=True)
class InnerSpec:
    """The settings of an inner optimizer. `momentum`, `newton_schulz_steps` and `muon_scale` apply to Muon only."""

    optimizer: Literal["adamw", "adamw8bit", "lion", "lamb", "muon"] = "adamw"
    lr: float = 1e-2
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1
    momentum: float = 0.95
    newton_schulz_steps: int = 5
    muon_scale: Literal["original", "match_rms_adamw"] = "original"
    decay: Literal["all", "matrices"] = "all"
    """The parameters that `weight_decay` applies to; "matrices" leaves out gains and biases."""

    @classmethod
    def of(cls, config: InnerConfig) -> InnerSpec:
        """Build the settings of a run's manifest, where gains and biases do not decay."""
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
    """An optimizer of flat vectors. `lr` is the rate of the next step, set by schedules. `steps` counts the steps made.
    `state` (k,) is all else that the optimizer remembers, zero at first."""

    def __init__(self, spec: InnerSpec, layout: FlatLayout, like: torch.Tensor) -> None:
        self.spec, self.layout, self.steps, self.lr = spec, layout, 0, spec.lr
        self.state = self._make_state(like)

    @abstractmethod
    def step(self, theta: torch.Tensor, gradient: torch.Tensor) -> None:
        """Move theta (n,) in place. `gradient` (n,) is only read."""

    def step_split(self, theta: SplitVector, gradient: torch.Tensor) -> None:
        """Move theta (n,), of which a piece at a time is fp32. `gradient` (n,) fp32 is only read. Raises ConfigError
        for an optimizer that needs whole parameters."""
        self.steps += 1
        for name, slot in self.layout.slots.items():
            for start in range(0, slot.numel, PIECE):
                within = slice(start, min(start + PIECE, slot.numel))
                at = slice(slot.offset + within.start, slot.offset + within.stop)
                values = theta.read(at)
                self._step_piece(name, within, values, gradient[at])
                theta.write(at, values)

    def _step_piece(self, name: str, within: slice, theta: torch.Tensor, gradient: torch.Tensor) -> None:
        """Move theta (m,), the elements `within` a parameter, in place; `steps` counts this step already."""
        raise ConfigError(f"{self.spec.optimizer} cannot move split weights: use adamw or adamw8bit, or fp32 weights")

    @abstractmethod
    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return views of `state` by name, and what else a checkpoint needs."""

    def save(self, out: torch.Tensor) -> None:
        """Write the state to `out`, uint8 (state_bytes,)."""
        state = self.state.view(torch.uint8)
        out[: len(state)].copy_(state)
        out[-COUNT_BYTES:].view(torch.int64).fill_(self.steps)

    def load(self, saved: torch.Tensor) -> None:
        """Restore what `save` wrote, to the bit. All zero is the state before the first step."""
        self.steps = int(saved[-COUNT_BYTES:].view(torch.int64))
        if self.steps:  # before the first step, reading the buffer would only cost memory
            state = self.state.view(torch.uint8)
            state.copy_(saved[: len(state)])

    def _make_state(self, like: torch.Tensor) -> torch.Tensor:
        return like.new_zeros(state_size(self.spec.optimizer, self.layout.shapes))

    def _decays(self, slot: TensorSlot) -> float:
        """Return the weight decay of one parameter."""
        return self.spec.weight_decay if self.spec.decay == "all" or len(slot.shape) > 1 else 0.0

    def _slices(self) -> Iterator[tuple[slice, float]]:
        """Yield the slice of each parameter and its weight decay; each slice is small beside the whole."""
        for slot in self.layout.slots.values():
            yield slice(slot.offset, slot.offset + slot.numel), self._decays(slot)

    def _adam_direction(self, gradient: torch.Tensor, mean: torch.Tensor, square: torch.Tensor) -> torch.Tensor:
        """Update Adam's moments and return the bias-corrected m / (sqrt(v) + eps), in torch's order of operations."""
        b1, b2 = self.spec.betas
        mean.mul_(b1).add_(gradient * (1 - b1))
        square.mul_(b2).add_(gradient * gradient * (1 - b2))
        denominator = (square.sqrt() / math.sqrt(1 - b2**self.steps)).add_(self.spec.eps)
        return (mean / (1 - b1**self.steps)).div_(denominator)
