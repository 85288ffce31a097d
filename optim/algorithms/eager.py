"""Eager updates (arXiv 2502.12996) in a form whose shared part peers can vote on.

In the paper each peer has its own weights, stepped by its fresh delta d_k and the others' deltas of the round before,
with w = 1 / K:

    e_k(r) = mean d(r-1) + w (d_k(r) - d_k(r-1));   (theta_k, velocity_k) <- Nesterov step on e_k(r)

No two peers hold the same weights, so they could vote on nothing. But a Nesterov step is linear in weights, velocity
and update, so theta_k = T + t_k. T is stepped by mean d(r-1) alone and is the same at all peers: it is
`DilocoStrategy`'s state one round late. t_k starts at 0 without momentum and is stepped by w (d_k(r) - d_k(r-1)), which
a peer can do alone.
"""

from __future__ import annotations

import torch

from optim.algorithms.outer_step import DilocoOuter


class EagerOffset:
    """One peer's t_k, (P,). `outer`: the same outer step as the shared state's."""

    def __init__(self, numel: int, outer: DilocoOuter, dtype: torch.dtype = torch.float32) -> None:
        self.offset = torch.zeros(numel, dtype=dtype)
        self._velocity = torch.zeros_like(self.offset)
        self._before = torch.zeros_like(self.offset)
        self._outer = outer

    def advance(self, delta: torch.Tensor, share: float) -> torch.Tensor:
        """End a round and return the offset of the next one, whose start is T + offset. The caller must not change it.

        `delta`: the weights at the round's start minus the weights now. `share`: the expected weight of `delta` in the
        mean, 1 / K.

        The step takes off what the last delta added, whatever the merge made of that delta. The offset is therefore
        driven by the fresh delta alone, and replicas stay at most one round apart, even after a wrong `share`.
        """
        fresh = delta * share
        self._outer.step(self.offset, self._velocity, fresh - self._before)
        self._before = fresh
        return self.offset
