"""DeMo (arXiv 2411.19870) and SparseLoCo (arXiv 2508.15706) on whole parameters, in any dtype."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from optim.algorithms.dct_tiles import pieces
from optim.algorithms.demo import DemoScheme
from optim.algorithms.packing import Sparse, SparsePacking
from optim.algorithms.sparse import Scheme
from optim.algorithms.sparseloco import SparseLocoScheme
from peer.model.layout import FlatLayout
from tests.optim.reference.interface import OuterAlgorithm


class SparseMethod(OuterAlgorithm[Sparse]):
    """An algorithm that applies a scheme to whole parameters. `lr`: the inner learning rate, if the scheme uses one."""

    def __init__(self, layout: FlatLayout, theta: torch.Tensor, scheme: Scheme, chunk: int, lr: float) -> None:
        super().__init__(layout, theta)
        self.scheme, self.lr = scheme, lr
        self.memory = torch.zeros_like(theta)
        self.pieces = pieces(layout, chunk, layout.numel)

    def product(self, local: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        """Return what is added to the memory."""
        return gradient if self.takes_gradients else self.theta - local

    def outgoing(self, local: torch.Tensor, gradient: torch.Tensor) -> Sparse:
        self.scheme.remember(self.memory, self.product(local, gradient), self.lr)
        taken = [self.scheme.take(self.memory[piece.span], piece.tiling) for piece in self.pieces]
        quantized = tuple(q for _, q in taken if q is not None)
        return Sparse(tuple(part for part, _ in taken), quantized or None)

    @property
    def packing(self) -> SparsePacking:
        return self.scheme.packing(self.pieces)

    def merge(self, messages: Sequence[Sparse], weights: Sequence[float]) -> torch.Tensor:
        parts = [[message.parts[p] for message in messages] for p in range(len(self.pieces))]
        means = [self.scheme.mean(part, weights, piece.tiling) for part, piece in zip(parts, self.pieces, strict=True)]
        return torch.cat(means)

    def incoming(self, merged: torch.Tensor | None, local: torch.Tensor) -> None:
        assert merged is not None
        self.scheme.step_into(self.theta, self.theta, merged, self.lr)
        local.copy_(self.theta)


class Demo(SparseMethod):
    """DeMo: an exchange every step."""

    takes_gradients = True

    def __init__(
        self,
        layout: FlatLayout,
        theta: torch.Tensor,
        lr: float,
        decay: float = 0.999,
        topk: int = 32,
        chunk: int = 64,
        wd: float = 0.0,
    ) -> None:
        super().__init__(layout, theta, DemoScheme(decay, topk, wd), chunk, lr)

    def sends(self, step: int) -> bool:
        return True

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {"delta": self.memory}


class SparseLoco(SparseMethod):
    """SparseLoCo: an exchange every H inner steps."""

    def __init__(
        self, layout: FlatLayout, theta: torch.Tensor, H: int, scheme: SparseLocoScheme, chunk: int = 64
    ) -> None:
        super().__init__(layout, theta, scheme, chunk, lr=0.0)
        self.every = H

    def sends(self, step: int) -> bool:
        return step % self.every == 0

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {"error": self.memory}
