"""K workers that average gradients as PowerSGD's paper does (arXiv 1905.13727), in two exchanges a step. No run does
so: it is the figure beside the codec `powersgd`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from peer.compute.adamw_fused import FusedAdamW
from peer.compute.optimizer import InnerSpec
from peer.model.layout import FlatLayout
from tests.optim.reference.powersgd import PowerSgdWorkers


class PowerSgdGroup:
    """Workers at the same weights `theta`, (P,), that step with AdamW on the averaged gradient, its norm clipped to
    `clip_norm`."""

    sends_gradients = True

    def __init__(
        self, layout: FlatLayout, theta: torch.Tensor, K: int, inner: InnerSpec, rank: int, clip_norm: float
    ) -> None:
        self.layout, self.theta, self.clip_norm = layout, theta.clone(), clip_norm
        self.local = [self.theta] * K
        self.bytes_up = self.bytes_down = 0
        """Payload that each worker has sent, and that it was sent, in fp32."""
        self._optimizer = FusedAdamW(inner, layout, self.theta)
        self._workers = PowerSgdWorkers(layout.views(self.theta), K, rank)

    def step(self, grads: Sequence[Mapping[str, torch.Tensor]], lr: float) -> None:
        """Make one step of all workers at the learning rate `lr`."""
        averaged = self._workers.step(grads)
        gradient = torch.cat([averaged[name].reshape(-1) for name in self.layout.slots])
        self._optimizer.lr = lr
        self._optimizer.step(self.theta, gradient * min(1.0, self.clip_norm / float(gradient.norm())))
        self.bytes_up += 4 * self._workers.values_sent
        self.bytes_down += 4 * self._workers.values_sent
