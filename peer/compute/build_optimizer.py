"""The inner optimizers by name."""

from __future__ import annotations

from typing import Final

import torch

from peer.compute.adamw_8bit import AdamW8bit
from peer.compute.inner_optimizer import AdamW, Lamb, Lion, Muon
from peer.compute.optimizer import InnerOptimizer, InnerSpec
from peer.errors import ConfigError
from peer.model.layout import FlatLayout

_KINDS: Final[dict[str, type[InnerOptimizer]]] = {
    "adamw": AdamW,
    "lion": Lion,
    "lamb": Lamb,
    "muon": Muon,
    "adamw8bit": AdamW8bit,
}


def build_inner(spec: InnerSpec, layout: FlatLayout, like: torch.Tensor) -> InnerOptimizer:
    """Build the optimizer that `spec` names, with fresh state for vectors like `like`. Raises ConfigError for an
    unknown name or a missing library."""
    if spec.optimizer not in _KINDS:
        raise ConfigError(f"there is no inner optimizer {spec.optimizer!r}: choose one of {', '.join(_KINDS)}")
    return _KINDS[spec.optimizer](spec, layout, like)
