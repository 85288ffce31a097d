"""Products in 16 bits over weights in fp32, and the scale of the loss that fp16 needs (arXiv 1710.03740)."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

SCALE: Final = 2.0**16
"""At first. As all numbers of the rule, those of `torch.amp.GradScaler`."""
GROWTH: Final = 2.0
BACKOFF: Final = 0.5
GROWTH_INTERVAL: Final = 2000
"""Finite gradients in a row after which the scale grows."""
SCALE_MIN: Final = 2.0**-10
"""A gradient that is not finite at this scale is the fault of the weights or the data, not of fp16."""
_SCALE_MAX: Final = torch.finfo(torch.float32).max


def autocast(device: torch.device, dtype: torch.dtype | None, keeps_casts: bool = True) -> torch.autocast:
    """Return a context that computes products in `dtype`; None: in that of the tensors. With `keeps_casts` the cast
    weights stay until its end."""
    return torch.autocast(
        device.type, torch.bfloat16 if dtype is None else dtype, enabled=dtype is not None, cache_enabled=keeps_casts
    )


def scaler_for(dtype: torch.dtype | None) -> LossScaler | None:
    """Return a scaler for products in fp16; None for those in another type."""
    return LossScaler() if dtype == torch.float16 else None


class LossScaler:
    """The `scale` of a loss, which keeps small gradients above what fp16 rounds to zero. It grows while gradients are
    finite and halves when they are not. The ranks of a group note the same findings, so all have the same scale."""

    def __init__(self, scale: float = SCALE) -> None:
        self.scale = scale
        self._finite = 0  # gradients in a row

    def unscale_(self, gradient: Tensor) -> None:
        """Divide a gradient (n,) fp32 of the scaled loss by the scale, in place. NaN and Inf stay such."""
        gradient.mul_(1 / self.scale)

    def update(self, finite: bool) -> bool:
        """Note whether a gradient was finite. Return whether a smaller scale is left to try where it was not."""
        if finite:
            self._finite += 1
            if self._finite == GROWTH_INTERVAL:
                self._finite = 0
                if self.scale * GROWTH <= _SCALE_MAX:
                    self.scale *= GROWTH
            return True
        self._finite = 0
        if self.scale <= SCALE_MIN:
            return False
        self.scale = max(SCALE_MIN, self.scale * BACKOFF)
        return True
