"""K workers that train by gossip (NoLoCo, arXiv 2506.10911), with the messages and the step of a run's peers."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

import torch

from optim.codecs import get_codec
from optim.config import CodecConfig, GossipConfig
from peer.compute.adamw_fused import FusedAdamW
from peer.compute.build_optimizer import build_inner
from peer.compute.optimizer import InnerSpec
from peer.model.layout import FlatLayout
from swarm.gossip.coding import PairCoding, PairMessage, step_alone


class GossipGroup:
    """K workers that step in pairs, drawn anew every `method.steps` inner steps from `seed`.

    A pair's messages are those of `swarm.gossip.coding`. Of an odd number of workers one steps alone. `theta`, the
    shared weights of other groups, is that of the first worker here: no two workers hold the same."""

    sends_gradients = False

    def __init__(
        self,
        method: GossipConfig,
        codec: CodecConfig,
        layout: FlatLayout,
        init: torch.Tensor,
        K: int,
        inner: InnerSpec,
        seed: int,
    ) -> None:
        build_optimizer = FusedAdamW if inner.optimizer == "adamw" else build_inner
        self.layout, self.every = layout, method.steps
        self.phi = [init.clone() for _ in range(K)]
        self.local = [init.clone() for _ in range(K)]
        self.inner = [build_optimizer(inner, layout, init) for _ in range(K)]
        self.steps = 0
        self.bytes_up = self.bytes_down = 0
        """Payload that each worker has sent, and that it was sent."""
        self._constants = (method.alpha, method.beta, method.gamma)
        self._moves = [torch.zeros_like(init) for _ in range(K)]
        self._codings = [PairCoding(layout.numel, get_codec(codec.up), get_codec(codec.down)) for _ in range(K)]
        self._random = random.Random(seed)

    @property
    def theta(self) -> torch.Tensor:
        return self.phi[0]

    def step(self, grads: Sequence[Mapping[str, torch.Tensor]], lr: float | None = None) -> None:
        """Make one inner step on every worker, and the outer step that is due. `lr`: the learning rate."""
        self.steps += 1
        for inner, local, grad in zip(self.inner, self.local, grads, strict=True):
            inner.lr = inner.lr if lr is None else lr
            inner.step(local, torch.cat([grad[name].reshape(-1) for name in self.layout.slots]))
        if self.steps % self.every == 0:
            order = list(range(len(self.local)))
            self._random.shuffle(order)
            for first in range(0, len(order), 2):
                self.meet(order[first : first + 2])

    def meet(self, pair: Sequence[int]) -> None:
        """Make the outer step of two workers, or of one that has no partner."""
        deltas = {k: self.phi[k] - self.local[k] for k in pair}
        if len(pair) == 1:
            (k,) = pair
            step_alone(self.phi[k], self._moves[k], deltas[k], self._constants)
        else:
            messages = {
                k: PairMessage(self._codings[k].pack_phi(self.phi[k]), self._codings[k].pack_delta(deltas[k]))
                for k in pair
            }
            for k, other in (pair, (pair[1], pair[0])):
                self._codings[k].step(self.phi[k], self._moves[k], messages[k], messages[other], self._constants)
            if 0 in pair:
                size = self._codings[0].total("phi") + self._codings[0].total("delta")
                self.bytes_up, self.bytes_down = self.bytes_up + size, self.bytes_down + size
        for k in pair:
            self.local[k].copy_(self.phi[k])
