"""PowerSGD (arXiv 1905.13727) with two exchanges a step: low-rank gradients, error feedback, warm start.

No run uses it. The network has `optim.strategies.low_rank`, one exchange within DiLoCo.
"""

from __future__ import annotations

import math

import torch

from peer.compute.optimizer import InnerOptimizer
from peer.model.layout import FlatLayout
from tests.optim.reference.interface import Dense

EPS = 1e-8


class PowerSgd(Dense):
    """PowerSGD. For each matrix M = error + gradient (a peer's own): P <- mean of M Q; P <- orthonormal P; Q <- mean of
    M^T P (kept for the next step); the group's gradient is P Q^T, and error <- M - P Q^T. Vectors are averaged plainly.

    The second merge needs the first's result (`exchanges` = 2), so a step costs the latency of two exchanges. The error
    is meaningful only while the same peers stay; a joiner starts with 0 and must fetch Q (`state_dict`). A matrix is
    compressed if that at least halves it (`saving_min`, hivemind's rule).
    """

    takes_gradients = True
    exchanges = 2

    def __init__(
        self,
        layout: FlatLayout,
        theta: torch.Tensor,
        optimizer: InnerOptimizer,
        rank: int,
        saving_min: float = 0.5,
        seed: int = 0,
    ) -> None:
        super().__init__(layout, theta)
        self.optimizer, self.rank = optimizer, rank
        self.error = torch.zeros_like(theta)  # holds M between the two exchanges
        self.gradient = torch.zeros_like(theta)
        self.shapes = {
            name: shape
            for name, slot in layout.slots.items()
            if (shape := _as_matrix(slot.shape)) and 1 - rank * sum(shape) / slot.numel >= saving_min
        }
        generator = torch.Generator().manual_seed(seed)
        self.q = {
            name: torch.randn(columns, rank, generator=generator, dtype=torch.float64).to(theta)
            for name, (_, columns) in self.shapes.items()
        }
        self._p: dict[str, torch.Tensor] = {}
        self._second = False

    def sends(self, step: int) -> bool:
        return True

    def outgoing(self, local: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        views = self.layout.views(self.error)
        if not self._second:
            self.error.add_(gradient)
            parts = [views[name].view(shape) @ self.q[name] for name, shape in self.shapes.items()]
        else:
            parts = [views[name].view(shape).T @ self._p[name] for name, shape in self.shapes.items()]
            parts += [view for name, view in views.items() if name not in self.shapes]
        return torch.cat([part.reshape(-1) for part in parts]) if parts else self.error[:0]

    def incoming(self, merged: torch.Tensor | None, local: torch.Tensor) -> None:
        assert merged is not None
        if not self._second:
            self._second = True
            sizes = [rows * self.rank for rows, _ in self.shapes.values()]
            for (name, (rows, _)), flat in zip(self.shapes.items(), merged.split(sizes), strict=True):
                self._p[name] = orthonormal(flat.view(rows, self.rank).clone())
            return
        gradients, first = self.layout.views(self.gradient), 0
        for name, (_, columns) in self.shapes.items():
            self.q[name] = merged[first : first + columns * self.rank].view(columns, self.rank).clone()
            first += columns * self.rank
            gradients[name].copy_((self._p[name] @ self.q[name].T).view(gradients[name].shape))
        for name, view in gradients.items():
            if name not in self.shapes:
                view.copy_(merged[first : first + view.numel()].view(view.shape))
                first += view.numel()
        self._second = False
        self.error.sub_(self.gradient)
        self.optimizer.step(self.theta, self.gradient)
        local.copy_(self.theta)

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {"error": self.error, **{f"q.{name}": q for name, q in self.q.items()}, **self.optimizer.state_dict()}


def orthonormal(p: torch.Tensor) -> torch.Tensor:
    """Orthonormalize the columns of p (rows, rank) in order, in place (Gram-Schmidt)."""
    for i in range(p.shape[1]):
        column = p[:, i]
        column.div_(column.norm().clamp(min=EPS))
        rest = p[:, i + 1 :]
        rest.sub_(torch.outer(column, column @ rest))
    return p


def _as_matrix(shape: tuple[int, ...]) -> tuple[int, int] | None:
    """Return the split of the dimensions into two with the smallest sum; None for vectors."""
    splits = [(math.prod(shape[:i]), math.prod(shape[i:])) for i in range(1, len(shape))]
    return min(splits, key=sum) if splits else None
