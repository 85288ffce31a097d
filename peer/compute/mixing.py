"""Streaming DiLoCo's local update (arXiv 2501.18512)."""

from __future__ import annotations

import torch


def mix_into(local: torch.Tensor, outer: torch.Tensor, alpha: float) -> None:
    """local <- alpha * local + (1 - alpha) * outer, in place. The vectors may be on different devices."""
    if alpha:
        local.mul_(alpha).add_((outer * (1 - alpha)).to(local.device))
    else:
        local.copy_(outer)
