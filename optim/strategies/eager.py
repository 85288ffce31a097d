"""Eager updates (arXiv 2502.12996) as a shared state and a private offset from it.

The paper gives each peer its own weights, stepped by its fresh delta and the others' old ones:

    e_k(r) = mean d(r-1) + w (d_k(r) - d_k(r-1));   (theta_k, velocity_k) <- Nesterov step on e_k(r)

Nothing of that could be voted on. But a Nesterov step is linear in weights, velocity and update, so theta_k = T + t_k:
T is stepped by mean d(r-1) alone, the same at all peers, `DilocoStrategy`'s state one round late; t_k starts at 0
without momentum and is stepped by w (d_k(r) - d_k(r-1)), which every peer can do by itself.
"""

from __future__ import annotations

import torch

from optim.algorithms.outer_step import DilocoOuter


class EagerOffset:
    """One peer's t_k, (P,); `outer` as the shared state's."""

    def __init__(self, numel: int, outer: DilocoOuter, dtype: torch.dtype = torch.float32) -> None:
        self.offset = torch.zeros(numel, dtype=dtype)
        self._velocity = torch.zeros_like(self.offset)
        self._before = torch.zeros_like(self.offset)
        self._outer = outer

    def advance(self, delta: torch.Tensor, share: float) -> torch.Tensor:
        """At the end of a round: `delta`, where I started from minus where I am, and `share`, what it will weigh in the
        mean as far as I know, 1 / K. Returns the offset to start the next round from, T + offset; not to be changed.

        What the last delta added is taken off again, whatever became of it in the merge: the pushes sum to the fresh
        term alone, so replicas stay no further apart than a round, even if a share was guessed wrong."""
        fresh = delta * share
        self._outer.step(self.offset, self._velocity, fresh - self._before)
        self._before = fresh
        return self.offset
