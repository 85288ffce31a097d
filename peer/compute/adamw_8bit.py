"""AdamW with moments of one byte a value (arXiv 2110.02861), by bitsandbytes, which is imported only on use."""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from peer.compute.optimizer import InnerOptimizer, InnerSpec
from peer.errors import ConfigError
from peer.footprint.optimizer_state import BLOCK, coded_names, scale_bytes
from peer.model.layout import FlatLayout
from peer.model.quantize import bitsandbytes


@dataclass(frozen=True)
class CodedMoments:
    """The two moments of each parameter as views into a state of uint8: first two fp32 vectors for each parameter (the
    moments of a small one, the scales of a coded one's blocks), then two vectors of codes for each coded one."""

    floats: Mapping[str, torch.Tensor]
    codes: Mapping[str, torch.Tensor]

    @classmethod
    def of(cls, state: torch.Tensor, layout: FlatLayout, coded: Container[str]) -> CodedMoments:
        """Divide `state` (k,) of the parameters of `layout`."""
        at, floats, codes = 0, {}, {}
        for name, slot in layout.slots.items():
            size = 2 * scale_bytes(slot.numel, name in coded)
            floats[name] = state[at : at + size].view(torch.float32).view(2, -1)
            at += size
        for name, slot in layout.slots.items():
            if name in coded:
                codes[name] = state[at : at + 2 * slot.numel].view(2, -1)
                at += 2 * slot.numel
        return cls(floats, codes)


class AdamW8bit(InnerOptimizer):
    """AdamW with 2 bytes of state a value instead of 8, for fp32 weights only. `coded`: the parameters that are large
    enough for it; a rank that has parts of a model decides as the whole model does."""

    def __init__(
        self, spec: InnerSpec, layout: FlatLayout, like: torch.Tensor, coded: Container[str] | None = None
    ) -> None:
        if like.dtype != torch.float32:
            raise ConfigError("adamw8bit works on fp32 weights only: choose adamw for other dtypes")
        self._coded = coded_names(layout.shapes) if coded is None else coded
        super().__init__(spec, layout, like)
        self._functional: Any = bitsandbytes("adamw8bit").functional
        self._maps = [self._functional.create_dynamic_map(signed=signed).to(like.device) for signed in (True, False)]
        self.moments = CodedMoments.of(self.state, layout, self._coded)

    def step(self, theta: torch.Tensor, gradient: torch.Tensor) -> None:
        self.steps += 1
        for name, slot in self.layout.slots.items():
            at = slice(slot.offset, slot.offset + slot.numel)
            self._step_piece(name, slice(0, slot.numel), theta[at], gradient[at])

    def _step_piece(self, name: str, within: slice, theta: torch.Tensor, gradient: torch.Tensor) -> None:
        theta.mul_(1 - self.lr * self._decays(self.layout.slots[name]))
        floats = self.moments.floats[name]
        if name in self._coded:
            blocks = slice(within.start // BLOCK, -(-within.stop // BLOCK))
            codes = self.moments.codes[name][:, within]
            self._coded_step(theta, gradient, codes.unbind(), floats[:, blocks].unbind())
        else:
            theta.sub_(self._adam_direction(gradient, *floats[:, within].unbind()).mul_(self.lr))

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {"state": self.state, "steps": torch.tensor(self.steps)}

    def _make_state(self, like: torch.Tensor) -> torch.Tensor:
        slots = self.layout.slots.items()
        sizes = [
            scale_bytes(slot.numel, name in self._coded) + slot.numel * (name in self._coded) for name, slot in slots
        ]
        return torch.zeros(2 * sum(sizes), dtype=torch.uint8, device=like.device)

    def _coded_step(
        self,
        weight: torch.Tensor,
        gradient: torch.Tensor,
        codes: tuple[torch.Tensor, ...],
        scales: tuple[torch.Tensor, ...],
    ) -> None:
        """Step a parameter, or whole blocks of one, without decay, by the kernel."""
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
