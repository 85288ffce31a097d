"""AdamW with moments of one byte a value (arXiv 2110.02861), by bitsandbytes, which is imported only on use."""

from __future__ import annotations

import importlib
import warnings
from typing import Any

import torch

from peer.compute.optimizer import InnerOptimizer, InnerSpec
from peer.errors import ConfigError
from peer.footprint.optimizer_state import SMALL, scales, state_size
from peer.model.layout import FlatLayout


class AdamW8bit(InnerOptimizer):
    """AdamW with 2 bytes of state a value instead of 8, for fp32 weights only.

    `state` is uint8: first two fp32 vectors for each parameter (the moments of a small one, the scales of a large one's
    blocks), then the codes of the large parameters.
    """

    def __init__(self, spec: InnerSpec, layout: FlatLayout, like: torch.Tensor) -> None:
        super().__init__(spec, layout, like)
        if like.dtype != torch.float32:
            raise ConfigError("adamw8bit works on fp32 weights only: choose adamw for other dtypes")
        self._functional: Any = _bitsandbytes().functional
        self._maps = [self._functional.create_dynamic_map(signed=signed).to(like.device) for signed in (True, False)]
        at, coded = 0, sum(2 * 4 * scales(slot.numel) for slot in layout.slots.values())
        self._floats: dict[str, tuple[torch.Tensor, ...]] = {}
        self._codes: dict[str, tuple[torch.Tensor, ...]] = {}
        for name, slot in layout.slots.items():
            size = 2 * 4 * scales(slot.numel)
            self._floats[name] = self.state[at : at + size].view(torch.float32).view(2, -1).unbind()
            at += size
            if slot.numel >= SMALL:
                self._codes[name] = self.state[coded : coded + 2 * slot.numel].view(2, *slot.shape).unbind()
                coded += 2 * slot.numel

    def step(self, theta: torch.Tensor, gradient: torch.Tensor) -> None:
        self.steps += 1
        weights, gradients = self.layout.views(theta), self.layout.views(gradient)
        for name, slot in self.layout.slots.items():
            weight = weights[name].mul_(1 - self.lr * self._decays(slot))
            one, two = self._floats[name]
            if slot.numel < SMALL:
                direction = self._adam_direction(gradients[name].view(-1), one, two)
                weight.view(-1).sub_(direction.mul_(self.lr))
            else:
                self._coded_step(weight, gradients[name], self._codes[name], (one, two))

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {"state": self.state, "steps": torch.tensor(self.steps)}

    def _make_state(self, like: torch.Tensor) -> torch.Tensor:
        return torch.zeros(state_size("adamw8bit", self.layout.shapes), dtype=torch.uint8, device=like.device)

    def _coded_step(
        self,
        weight: torch.Tensor,
        gradient: torch.Tensor,
        codes: tuple[torch.Tensor, ...],
        scales: tuple[torch.Tensor, ...],
    ) -> None:
        """Step one parameter without decay, by the kernel."""
        self._functional.optimizer_update_8bit_blockwise(
            "adam",
            gradient,
            weight,
            *codes,
            *self.spec.betas,
            0.0,  # beta3 and alpha are AdEMAMix's
            0.0,
            self.spec.eps,
            self.steps,
            self.lr,
            *self._maps,
            *scales,
        )


def _bitsandbytes() -> Any:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it warns on every machine without a GPU
            return importlib.import_module("bitsandbytes")
    except ImportError:
        raise ConfigError('adamw8bit needs bitsandbytes: pip install "barnraise[gpu]"') from None
