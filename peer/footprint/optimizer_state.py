"""The size of the inner optimizers' states."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Final

from peer.errors import ConfigError
from peer.footprint.parameters import Shape

COUNT_BYTES: Final = 8  # the size of the count of steps in a saved state
BLOCK: Final = 256  # values of adamw8bit that share a scale, as bitsandbytes' kernels fix it
SMALL: Final = 4096  # a smaller parameter keeps fp32 moments, as in bitsandbytes' own optimizer
_VECTORS: Final = {"adamw": 2, "lamb": 2, "lion": 1}


def state_size(optimizer: str, shapes: Iterable[tuple[str, Shape]]) -> int:
    """Return the number of elements of the state for parameters of these names and shapes: bytes of adamw8bit, else
    values like the weights. Raises ConfigError for an unknown name."""
    sizes = [(name, shape, math.prod(shape)) for name, shape in shapes]
    if optimizer in _VECTORS:
        return _VECTORS[optimizer] * sum(size for _, _, size in sizes)
    if optimizer == "muon":
        return sum((1 if is_inner_matrix(name, shape) else 2) * size for name, shape, size in sizes)
    if optimizer == "adamw8bit":
        coded = coded_names((name, shape) for name, shape, _ in sizes)
        return sum(2 * (scale_bytes(size, name in coded) + size * (name in coded)) for name, _, size in sizes)
    raise ConfigError(
        f"there is no inner optimizer {optimizer!r}: choose one of {', '.join((*_VECTORS, 'muon', 'adamw8bit'))}"
    )


def state_bytes(optimizer: str, shapes: Iterable[tuple[str, Shape]]) -> int:
    """Return the bytes of the state for fp32 weights."""
    return state_size(optimizer, shapes) * (1 if optimizer == "adamw8bit" else 4)


def saved_bytes(optimizer: str, shapes: Iterable[tuple[str, Shape]]) -> int:
    """Return the size of a saved state for fp32 weights: the state and the count of steps, which is aligned."""
    size = state_bytes(optimizer, shapes)
    return size + -size % COUNT_BYTES + COUNT_BYTES


def is_inner_matrix(name: str, shape: Shape) -> bool:
    """Whether Muon orthogonalizes the parameter; it leaves all others to AdamW."""
    return len(shape) == 2 and "embed" not in name and "lm_head" not in name


def coded_names(shapes: Iterable[tuple[str, Shape]]) -> frozenset[str]:
    """Return the parameters whose moments adamw8bit keeps in codes of one byte."""
    return frozenset(name for name, shape in shapes if math.prod(shape) >= SMALL)


def scale_bytes(size: int, is_coded: bool) -> int:
    """Return the bytes of the fp32 values that one moment of adamw8bit takes for a parameter of this many values."""
    return 4 * (-(-size // BLOCK) if is_coded else size)
