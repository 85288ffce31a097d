"""DeMo, decoupled momentum (arXiv 2411.19870), as its reference implementation has it.

Each step: delta <- decay * delta + lr * gradient; of each tile's cosine transform the k largest coefficients are sent
and leave delta, which so is momentum and error feedback at once; theta steps by lr against the SIGN of the mean of what
was sent. The mean of a coefficient is over those who sent it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from optim.methods.interface import Method, Sparse, mean_over_senders
from optim.methods.packing import SparsePacking
from optim.tiles import Cosines, Tiling, top_k
from peer.layout import FlatLayout


class Demo(Method[Sparse]):
    """`lr` is inside delta and in the step, as in the reference. `wd`: decoupled, before the step."""

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
        super().__init__(layout, theta)
        self.lr, self.decay, self.topk, self.wd = lr, decay, topk, wd
        self.delta = torch.zeros_like(theta)
        self._tilings = [Tiling(slot.shape, chunk) for slot in layout.slots.values()]
        self._cosines = [Cosines(tiling, theta.dtype) for tiling in self._tilings]

    def sends(self, step: int) -> bool:
        return True

    def outgoing(self, local: torch.Tensor, gradient: torch.Tensor) -> Sparse:
        self.delta.mul_(self.decay).add_(gradient * self.lr)
        parts = []
        deltas = self.layout.views(self.delta).values()
        for view, tiling, cosines in zip(deltas, self._tilings, self._cosines, strict=True):
            coefficients = cosines.forward(tiling.cut(view))
            index, value = top_k(coefficients, self.topk)
            sent = torch.zeros_like(coefficients).scatter_(1, index, value)
            view.sub_(tiling.join(cosines.inverse(sent)).view(view.shape))
            parts.append((index, value))
        return Sparse(tuple(parts))

    @property
    def packing(self) -> SparsePacking:
        sizes = [tiling.size for tiling in self._tilings]
        return SparsePacking(sizes, [max(1, min(self.topk, elements)) for _, elements in sizes], None)

    def merge(self, messages: Sequence[Sparse], weights: Sequence[float]) -> torch.Tensor:
        """Flat (n,): the mean over senders, back from the cosine domain."""
        means = mean_over_senders(messages, [tiling.size for tiling in self._tilings], weights)
        return torch.cat([t.join(c.inverse(m)) for t, c, m in zip(self._tilings, self._cosines, means, strict=True)])

    def incoming(self, merged: torch.Tensor | None, local: torch.Tensor) -> None:
        assert merged is not None
        if self.wd:
            self.theta.mul_(1 - self.lr * self.wd)
        self.theta.sub_(merged.sign() * self.lr)
        local.copy_(self.theta)

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {"delta": self.delta}
