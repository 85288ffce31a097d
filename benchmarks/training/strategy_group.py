"""K workers in one process that train through a run's strategies, as peers do."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from benchmarks.training.rounds import Rounds
from optim.algorithms.eager import EagerOffset
from optim.algorithms.outer_step import DilocoOuter
from optim.strategies.interface import OuterStrategy
from peer.compute.adamw_fused import FusedAdamW
from peer.compute.build_optimizer import build_inner
from peer.compute.held_weights import mix_into
from peer.compute.optimizer import InnerSpec
from tests.optim.support.layouts import layout_of

Corrupt = Callable[[list[torch.Tensor]], list[torch.Tensor]]


@dataclass(frozen=True)
class Overlap:
    """How a method trains on while its messages are under way."""

    tau: int = 0
    """Inner steps between a message and its result (Streaming DiLoCo)."""
    mix: float = 0.0
    """The part of the local weights that a result leaves in place (Streaming DiLoCo)."""
    eager: DilocoOuter | None = None
    """The outer step of eager updates, whose messages are under way for a whole round."""


class StrategyGroup:
    """K workers whose messages `Rounds` exchanges every `every` inner steps.

    `build` makes one peer's strategy. `init` names the tensors (fp32). `inner` is the workers' optimizer; a method that
    exchanges gradients uses only its learning rate. `tokens`: every worker's work in a round, for the gate (None: no
    gate). `steps_of`: the inner steps of the round that begins after so many (None: `every`). `corrupt`: what liars
    make of a round's products.
    """

    def __init__(
        self,
        build: Callable[[], OuterStrategy],
        init: Mapping[str, torch.Tensor],
        K: int,
        every: int,
        inner: InnerSpec,
        *,
        overlap: Overlap | None = None,
        tokens: int | None = None,
        steps_of: Callable[[int], int] | None = None,
        corrupt: Corrupt | None = None,
    ) -> None:
        self.layout = layout_of(init)
        theta = self._flat(init)
        self.rounds = Rounds(build, theta, K)
        self.local = [theta.clone() for _ in range(K)]
        build_optimizer = FusedAdamW if inner.optimizer == "adamw" else build_inner  # as a peer's worker does
        self.inner = [build_optimizer(inner, self.layout, theta) for _ in range(K)]
        self.overlap, self.lr = overlap or Overlap(), inner.lr
        self.steps = 0
        self._steps_of = steps_of or (lambda first: every)
        self._corrupt = corrupt
        self._first, self._last = 0, self._steps_of(0)  # steps before and at the end of this round
        self.bytes_up = self.bytes_down = 0
        """Payload that each worker has sent, and that it was sent."""
        self._weights = None if tokens is None else [tokens] * K
        self._sums = [torch.zeros_like(theta) for _ in range(K)]
        self._began = [theta.clone() for _ in range(K)]
        self._places: tuple[slice, ...] = ()
        self._offsets = [EagerOffset(self.layout.numel, self.overlap.eager) for _ in range(K) if self.overlap.eager]

    @property
    def theta(self) -> torch.Tensor:
        """The shared weights, (P,)."""
        return self.rounds.tensors[0]

    def params(self, k: int) -> dict[str, torch.Tensor]:
        """Return worker k's current parameters: views, not copies."""
        return self.layout.views(self.local[k])

    @property
    def sends_gradients(self) -> bool:
        """Whether the method exchanges mean gradients, and makes no inner steps."""
        return self.rounds.strategies[0].product == "gradient"

    def step(self, grads: Sequence[Mapping[str, torch.Tensor]], lr: float | None = None) -> None:
        """Make one inner step on every worker, then any synchronization that is due. `lr`: the learning rate from now
        on."""
        self.steps += 1
        self.lr = self.lr if lr is None else lr
        for inner, local, total, grad in zip(self.inner, self.local, self._sums, grads, strict=True):
            inner.lr = self.lr
            if self.sends_gradients:
                total.add_(self._flat(grad))
            else:
                inner.step(local, self._flat(grad))
        if self.steps == self._last - self.overlap.tau:
            self._exchange()
        if self.steps < self._last:
            return
        if not self._offsets:
            for local in self.local:
                for place in self._places:
                    mix_into(local[place], self.theta[place], self.overlap.mix)
        self._first, self._last = self._last, self._last + self._steps_of(self._last)

    def _exchange(self) -> None:
        if self.sends_gradients:
            products = [total / (self._last - self._first) for total in self._sums]
        else:
            began = self._began if self._offsets else [self.theta] * len(self.local)
            products = [start - local for start, local in zip(began, self.local, strict=True)]
        for total in self._sums:
            total.zero_()
        if self.overlap.eager:  # the next round begins before this one's result has come
            for k, (offset, product) in enumerate(zip(self._offsets, products, strict=True)):
                torch.add(self.theta, offset.advance(product, 1 / len(products)), out=self._began[k])
                self.local[k].copy_(self._began[k])
        if self._corrupt is not None:
            products = self._corrupt(products)
        self._places = self.rounds.exchange(products, self._weights, self.lr)
        self.bytes_up += self.rounds.bytes_up
        self.bytes_down += self.rounds.bytes_down

    def _flat(self, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return torch.cat([tensors[name].detach().reshape(-1) for name in self.layout.slots])
