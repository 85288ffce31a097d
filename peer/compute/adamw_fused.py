"""AdamW by torch's fused kernel: one pass over weights, gradient and moments."""

from __future__ import annotations

import torch
from torch.optim.adamw import adamw

from peer.compute.inner_optimizer import AdamW
from peer.compute.optimizer import InnerSpec
from peer.model.layout import FlatLayout


class FusedAdamW(AdamW):
    """`AdamW` except for rounding, and several times faster. The roundings differ between devices, so it is only for
    state that peers need not agree on."""

    def __init__(self, spec: InnerSpec, layout: FlatLayout, like: torch.Tensor) -> None:
        super().__init__(spec, layout, like)
        self._counts = torch.zeros(len(layout.slots), device=like.device)  # the kernel keeps one count a parameter
        self._means = list(layout.views(self.mean).values())
        self._squares = list(layout.views(self.square).values())
        self._by_decay: dict[float, list[int]] = {}
        for index, slot in enumerate(layout.slots.values()):
            self._by_decay.setdefault(self._decays(slot), []).append(index)

    def step(self, theta: torch.Tensor, gradient: torch.Tensor) -> None:
        self._counts.fill_(self.steps)
        counts = self._counts.unbind()
        weights, gradients = list(self.layout.views(theta).values()), list(self.layout.views(gradient).values())
        for decay, indices in self._by_decay.items():
            self._call(
                [weights[index] for index in indices],
                [gradients[index] for index in indices],
                [self._means[index] for index in indices],
                [self._squares[index] for index in indices],
                [counts[index] for index in indices],
                decay,
            )
        self.steps += 1

    def _step_piece(self, name: str, within: slice, theta: torch.Tensor, gradient: torch.Tensor) -> None:
        slot, count = self.layout.slots[name], self._counts[0].fill_(self.steps - 1)
        at = slice(slot.offset + within.start, slot.offset + within.stop)
        self._call([theta], [gradient], [self.mean[at]], [self.square[at]], [count], self._decays(slot))

    def _call(
        self,
        weights: list[torch.Tensor],
        gradients: list[torch.Tensor],
        means: list[torch.Tensor],
        squares: list[torch.Tensor],
        counts: list[torch.Tensor],
        decay: float,
    ) -> None:
        """Move weights by the kernel, which adds 1 to each count."""
        # The class torch.optim.AdamW would import torch._dynamo: 1.5 s and 100 MB for each worker.
        adamw(
            weights,
            gradients,
            means,
            squares,
            [],
            counts,
            fused=weights[0].device.type in ("cpu", "cuda"),
            amsgrad=False,
            beta1=self.spec.betas[0],
            beta2=self.spec.betas[1],
            lr=self.lr,
            weight_decay=decay,
            eps=self.spec.eps,
            maximize=False,
        )
