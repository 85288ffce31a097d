"""The random pseudo-gradients of averaging.py and their mean."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch
from blake3 import blake3


def delta_of(peer: int, numel: int) -> torch.Tensor:
    """Return peer number `peer`'s pseudo-gradient: normal, fp32, shape (numel,), the same in every process.

    All have the same norm (root mean square 1), so that our clipping of norms above the median changes nothing and the
    result is the plain mean.
    """
    delta = torch.randn(numel, generator=torch.Generator().manual_seed(1000 + peer))
    return delta.mul_(numel**0.5 / float(delta.norm()))


def float64_mean(peers: Iterable[int], numel: int) -> torch.Tensor:
    """Return the mean of the peers' pseudo-gradients in float64, shape (numel,)."""
    total = torch.zeros(numel, dtype=torch.float64)
    chosen = list(peers)
    for peer in chosen:
        total += delta_of(peer, numel)
    return total.div_(len(chosen))


def save(vector: torch.Tensor, file: Path) -> str:
    """Write a vector for the parent to judge; return the hash of its bits."""
    array = vector.numpy()
    array.tofile(file)
    return blake3(array.data.cast("B")).hexdigest()


def max_error(file: Path, mean: torch.Tensor) -> float:
    """Return the largest distance of a saved vector from `mean`."""
    vector = torch.from_numpy(np.fromfile(file, dtype=np.float32))
    return float((vector.double() - mean).abs_().max())
