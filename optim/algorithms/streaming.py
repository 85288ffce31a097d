"""Streaming DiLoCo (arXiv 2501.18512), and how a model is cut into fragments."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from optim.algorithms.diloco import Diloco
from optim.algorithms.outer_step import DilocoOuter
from peer.compute.mixing import mix_into
from peer.errors import ConfigError
from peer.model.layout import FlatLayout


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


def strided_fragments(names: Sequence[str], count: int) -> list[list[str]]:
    """Distribute whole blocks over `count` fragments: block i goes to fragment i mod count.

    Striding is the paper's choice (2501.18512): adjacent blocks differ less than distant ones in when they are needed.
    Parameters before the blocks join the first fragment, parameters after the blocks the last.
    """
    blocks = [next((int(part) for part in name.split(".") if part.isdigit()), None) for name in names]
    numbered = [b for b in blocks if b is not None]
    if len(set(numbered)) < count:
        found = len(set(numbered))
        raise ConfigError(f"{count} fragments for {found} blocks are too many: choose {found} or fewer")
    order = {block: i for i, block in enumerate(sorted(set(numbered)))}
    first = next(i for i, block in enumerate(blocks) if block is not None)
    fragments: list[list[str]] = [[] for _ in range(count)]
    for i, (name, block) in enumerate(zip(names, blocks, strict=True)):
        fragments[order[block] % count if block is not None else (0 if i < first else count - 1)].append(name)
    return fragments


def fragment_spans(layout: FlatLayout, names: Sequence[str]) -> list[slice]:
    """Return the fragment's spans of the flat vector, adjacent ones joined."""
    spans: list[slice] = []
    for slot in sorted(layout.slots[name] for name in names):
        if spans and spans[-1].stop == slot.offset:
            spans[-1] = slice(spans[-1].start, slot.offset + slot.numel)
        else:
            spans.append(slice(slot.offset, slot.offset + slot.numel))
    return spans
