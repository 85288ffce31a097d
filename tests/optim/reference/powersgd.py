"""PowerSGD (arXiv 1905.13727) with two exchanges a step: low-rank gradients, error feedback, warm start.

No run uses it. The network has `optim.strategies.low_rank`, one exchange within DiLoCo.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch

EPS = 1e-8


class PowerSgdWorkers:
    """K workers that average gradients, in the dtype of `like`, name -> tensor.

    For each matrix M = error + gradient (a worker's own): P <- mean of M Q; P <- orthonormal P; Q <- mean of M^T P
    (kept for the next step); the group's gradient is P Q^T, and error <- M - P Q^T. Vectors are averaged plainly.

    A tensor of more dimensions is the matrix whose two sides have the smallest sum. A matrix is compressed if that
    saves at least `saving_min` of it (one half: hivemind's rule); others are averaged plainly too.
    """

    def __init__(
        self, like: Mapping[str, torch.Tensor], workers: int, rank: int, saving_min: float = 0.5, seed: int = 0
    ) -> None:
        self.shapes = {
            name: shape
            for name, tensor in like.items()
            if (shape := _as_matrix(tuple(tensor.shape))) and 1 - rank * sum(shape) / tensor.numel() >= saving_min
        }
        """(rows, columns) of each compressed matrix."""
        generator = torch.Generator().manual_seed(seed)
        self.q = {
            name: torch.randn(columns, rank, generator=generator, dtype=torch.float64).to(like[name])
            for name, (_, columns) in self.shapes.items()
        }
        self.errors = [{name: torch.zeros_like(like[name]) for name in self.shapes} for _ in range(workers)]
        self.values_sent = sum(
            rank * sum(self.shapes[name]) if name in self.shapes else tensor.numel() for name, tensor in like.items()
        )
        """What each worker sends in a step, both exchanges together."""

    def step(self, gradients: Sequence[Mapping[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        """Return the averaged gradient of one step. `gradients`: each worker's, which are only read."""
        averaged = {}
        for name in gradients[0]:
            if name not in self.shapes:
                averaged[name] = _mean([gradient[name] for gradient in gradients])
                continue
            wanted = [error[name] + gradient[name] for error, gradient in zip(self.errors, gradients, strict=True)]
            matrices = [m.reshape(self.shapes[name]) for m in wanted]
            p = orthonormal(_mean([m @ self.q[name] for m in matrices]))
            self.q[name] = _mean([m.T @ p for m in matrices])
            averaged[name] = (p @ self.q[name].T).view_as(wanted[0])
            for error, m in zip(self.errors, wanted, strict=True):
                error[name] = m - averaged[name]
        return averaged


def orthonormal(p: torch.Tensor) -> torch.Tensor:
    """Orthonormalize the columns of p (rows, rank) in order, in place (Gram-Schmidt)."""
    for i in range(p.shape[1]):
        column = p[:, i]
        column.div_(column.norm().clamp(min=EPS))
        rest = p[:, i + 1 :]
        rest.sub_(torch.outer(column, column @ rest))
    return p


def _mean(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.stack(list(tensors)).mean(0)


def _as_matrix(shape: tuple[int, ...]) -> tuple[int, int] | None:
    """Return the split of the dimensions into two with the smallest sum; None for vectors."""
    splits = [(math.prod(shape[:i]), math.prod(shape[i:])) for i in range(1, len(shape))]
    return min(splits, key=sum) if splits else None
