"""DiLoCo (arXiv 2311.08105), Streaming DiLoCo (2501.18512) and eager updates (2502.12996)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from optim.algorithms.interface import Dense
from optim.algorithms.outer_step import DilocoOuter
from peer.errors import ConfigError
from peer.model.layout import FlatLayout


class Diloco(Dense):
    """Every H inner steps: delta = theta - local; theta <- outer step on the mean delta; local <- theta.

    H = 1 or momentum 0 and lr 1: FedAvg and Local SGD.
    """

    def __init__(self, layout: FlatLayout, theta: torch.Tensor, H: int, outer: DilocoOuter | None = None) -> None:
        super().__init__(layout, theta)
        if H < 1:
            raise ConfigError(f"H is {H}: a round needs at least 1 inner step.")
        self.every = H
        self.outer = outer or DilocoOuter()
        self.velocity = torch.zeros_like(theta)

    def sends(self, step: int) -> bool:
        return step % self.every == 0

    def outgoing(self, local: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        return self.theta - local

    def incoming(self, merged: torch.Tensor | None, local: torch.Tensor) -> None:
        assert merged is not None
        self.outer.step(self.theta, self.velocity, merged)
        local.copy_(self.theta)

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {"velocity": self.velocity}


class Streaming(Diloco):
    """DiLoCo a fragment at a time: one slot every H / F inner steps, each slot the next fragment's turn.

    The fragment's delta is taken `tau` steps before its slot, and travels while training goes on. In its slot the
    global copy moves, and local <- alpha * local + (1 - alpha) * global. The next delta is against the global copy, so
    what was kept of the local weights comes back in it. With one fragment, tau 0, alpha 0 this is `Diloco` to the bit.

    A round that is discarded is retried with the same fragment: `incoming` is what advances the turn, and without it
    the fragment's global copy is what it was.
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
            raise ConfigError("fragments: name every parameter in exactly one fragment, and leave none empty.")
        if H % len(fragments) or not 0 <= tau < H // len(fragments):
            raise ConfigError(
                f"H = {H} must be a multiple of the {len(fragments)} fragments, and tau = {tau} below their quotient."
            )
        if not 0 <= alpha <= 1:
            raise ConfigError(f"alpha is {alpha}: it must lie in [0, 1].")
        self.every = H // len(fragments)
        self.tau, self.alpha = tau, alpha
        self.spans = [fragment_spans(layout, fragment) for fragment in fragments]
        self.turn = 0

    def sends(self, step: int) -> bool:
        return (step + self.tau) % self.every == 0

    def applies(self, step: int) -> bool:
        return step % self.every == 0

    def outgoing(self, local: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        """(m,), m: the size of the fragment whose turn it is."""
        return torch.cat([self.theta[span] - local[span] for span in self.spans[self.turn]])

    def incoming(self, merged: torch.Tensor | None, local: torch.Tensor) -> None:
        assert merged is not None
        first = 0
        for span in self.spans[self.turn]:
            theta, mine = self.theta[span], local[span]
            self.outer.step(theta, self.velocity[span], merged[first : first + len(theta)])
            first += len(theta)
            if self.alpha:
                mine.mul_(self.alpha).add_(theta * (1 - self.alpha))
            else:
                mine.copy_(theta)
        self.turn = (self.turn + 1) % len(self.spans)


def strided_fragments(names: Sequence[str], count: int) -> list[list[str]]:
    """`count` fragments of whole blocks, strided: block i goes to fragment i mod count, since neighbours differ less
    than far blocks do in when they are needed (2501.18512). What comes before the blocks joins the first, what comes
    after them the last."""
    blocks = [next((int(part) for part in name.split(".") if part.isdigit()), None) for name in names]
    numbered = [b for b in blocks if b is not None]
    if len(set(numbered)) < count:
        raise ConfigError(f"{count} fragments need at least as many blocks: choose {len(set(numbered))} or fewer.")
    order = {block: i for i, block in enumerate(sorted(set(numbered)))}
    first = next(i for i, block in enumerate(blocks) if block is not None)
    fragments: list[list[str]] = [[] for _ in range(count)]
    for i, (name, block) in enumerate(zip(names, blocks, strict=True)):
        fragments[order[block] % count if block is not None else (0 if i < first else count - 1)].append(name)
    return fragments


class Eager(Diloco):
    """DiLoCo whose exchange lasts a whole round. Each peer steps with its own fresh delta and the others' old ones:

        e_k = delta_k(r) / K + (mean delta(r-1) - delta_k(r-1) / K);  (theta_k, velocity_k) <- outer step on e_k

    In the first round the others' term is missing, NOT replaced: stepping with delta_k instead of delta_k / K sets the
    replicas apart for good. Every peer has its own theta and velocity, a round's difference apart, so nothing can be
    voted on. `share`: my weight in the mean, 1 / K. With K = 8, lr 0.7 and momentum 0.9 it is unstable.
    """

    lag = 1
    replicas_equal = False

    def __init__(
        self, layout: FlatLayout, theta: torch.Tensor, H: int, share: float, outer: DilocoOuter | None = None
    ) -> None:
        super().__init__(layout, theta, H, outer)
        self.share = share
        self._fresh = torch.zeros_like(theta)
        self._sent_before = torch.zeros_like(theta)

    def outgoing(self, local: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        self._fresh = self.theta - local
        return self._fresh

    def incoming(self, merged: torch.Tensor | None, local: torch.Tensor) -> None:
        update = self._fresh * self.share
        if merged is not None:
            update.add_(merged).sub_(self._sent_before * self.share)
        self._sent_before = self._fresh
        self.outer.step(self.theta, self.velocity, update)
        local.copy_(self.theta)

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {"velocity": self.velocity, "sent_before": self._sent_before}


def fragment_spans(layout: FlatLayout, names: Sequence[str]) -> list[slice]:
    """The fragment's stretches of the flat vector, neighbours joined."""
    spans: list[slice] = []
    for slot in sorted(layout.slots[name] for name in names):
        if spans and spans[-1].stop == slot.offset:
            spans[-1] = slice(spans[-1].start, slot.offset + slot.numel)
        else:
            spans.append(slice(slot.offset, slot.offset + slot.numel))
    return spans
