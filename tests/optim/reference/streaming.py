"""Streaming DiLoCo (arXiv 2501.18512)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from optim.algorithms.fragments import fragment_spans
from optim.algorithms.outer_step import DilocoOuter
from peer.compute.mixing import mix_into
from peer.errors import ConfigError
from peer.model.layout import FlatLayout
from tests.optim.reference.diloco import Diloco


class Streaming(Diloco):
    """DiLoCo with one of F fragments exchanged at a time: every H / F inner steps (a slot) the next fragment moves.

    The fragment's delta is taken `tau` steps before the end of its slot and travels while training continues. At the
    end of the slot the global copy moves, and local <- alpha * local + (1 - alpha) * global. The next delta is taken
    against the global copy, so it contains the kept part of the local weights. With one fragment, tau 0 and alpha 0
    this is `Diloco` to the bit.

    `incoming` selects the next fragment. A discarded round is therefore retried with the same fragment, whose global
    copy has not changed.
    """

    def __init__(
        self,
        layout: FlatLayout,
        theta: torch.Tensor,
        H: int,
        fragments: Sequence[Sequence[str]],
        tau: int = 0,
        alpha: float = 0.0,
        outer: DilocoOuter | None = None,
    ) -> None:
        super().__init__(layout, theta, H, outer)
        named = sorted(name for fragment in fragments for name in fragment)
        if named != sorted(layout.slots) or not all(fragments):
            raise ConfigError("a parameter has no fragment or several, or a fragment is empty: name each exactly once")
        if H % len(fragments) or not 0 <= tau < H // len(fragments):
            raise ConfigError(
                f"H is {H} and tau {tau} with {len(fragments)} fragments:"
                " set H to a multiple of the fragments and tau below their quotient"
            )
        if not 0 <= alpha <= 1:
            raise ConfigError(f"alpha is {alpha}: set it to a value in [0, 1]")
        self.every = H // len(fragments)
        self.tau, self.alpha = tau, alpha
        self.spans = [fragment_spans(layout, fragment) for fragment in fragments]
        self.fragment = 0

    def sends(self, step: int) -> bool:
        return (step + self.tau) % self.every == 0

    def applies(self, step: int) -> bool:
        return step % self.every == 0

    def outgoing(self, local: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        """Return the current fragment's delta, (m,), m: the size of the fragment."""
        return torch.cat([self.theta[span] - local[span] for span in self.spans[self.fragment]])

    def incoming(self, merged: torch.Tensor | None, local: torch.Tensor) -> None:
        assert merged is not None
        first = 0
        for span in self.spans[self.fragment]:
            theta = self.theta[span]
            self.outer.step(theta, self.velocity[span], merged[first : first + len(theta)])
            first += len(theta)
            mix_into(local[span], theta, self.alpha)
        self.fragment = (self.fragment + 1) % len(self.spans)
