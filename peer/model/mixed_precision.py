"""Products in 16 bits over weights in fp32, and the scale of the loss that fp16 needs (arXiv 1710.03740)."""

from __future__ import annotations

import math
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
REPEATS_MAX: Final = 4
"""Of one backward pass. They divide its scale by 2, 4, 16 and 256, so by 2^15 in all."""
_SCALE_MAX: Final = torch.finfo(torch.float32).max
_END: Final = 65520.0
"""The smallest number that fp16 rounds to infinity."""
_HEADROOM: Final = 2.0**8
"""How much larger than a gradient that is scaled down for fp16 its products with activations and weights may be."""


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


class PassScale:
    """The `scale` of the loss in one backward pass of a stage, repeated at smaller scales while it overflows.

    It is that of the `scaler`, which follows it. A gradient of another stage that is too large for this scale gets a
    smaller one of its own, and the scaler stays: such a gradient says nothing of the next one.
    """

    def __init__(self, scaler: LossScaler, largest: float | None) -> None:
        """`largest`: the largest absolute value of the gradient that the pass begins with, of the mean loss over the
        tokens; None where the pass begins with the loss itself."""
        self.scale = self._before = scaler.scale
        self._scaler, self._largest, self._repeats = scaler, largest, 0
        self._is_own = largest is not None and largest * scaler.scale >= _END
        if largest is not None and self._is_own:
            powers = math.ceil(math.log2(largest * scaler.scale * _HEADROOM / _END))
            self.scale = max(SCALE_MIN, scaler.scale * BACKOFF**powers)

    @property
    def overflows(self) -> bool:
        """Whether the gradient that the pass begins with is infinite in fp16 already."""
        return self._largest is not None and self._largest * self.scale >= _END

    def shrink(self) -> bool:
        """Choose a smaller scale for a pass that overflowed; return whether there is one to try. If not, the scaler has
        its scale from before the pass again. Only after a pass that began with the loss, the next one begins where this
        one ended: no gradient of another peer is to blame."""
        if self.scale > SCALE_MIN and self._repeats < REPEATS_MAX:
            self.scale = max(SCALE_MIN, self.scale * BACKOFF ** (2**self._repeats))
            self._repeats += 1
            if not self._is_own:
                self._scaler.update(finite=False)
                self._scaler.scale = self.scale
            return True
        if self._largest is not None or self.scale <= SCALE_MIN:
            self._scaler.scale = self._before
        return False

    def keep(self) -> None:
        """Note that the pass did not overflow."""
        if not self._is_own:
            self._scaler.update(finite=True)
