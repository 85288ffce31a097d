"""The test problem, trained through the strategies."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from benchmarks.training.rounds import Rounds as Rounds
from benchmarks.training.rounds import encoded as encoded
from benchmarks.training.strategy_group import Overlap, StrategyGroup
from optim import config
from optim.strategies.interface import Coding, OuterStrategy
from optim.strategies.registry import build_strategy
from peer.compute.optimizer import InnerSpec
from peer.config import InnerConfig
from tests.optim.support.layouts import layout_of
from tests.optim.support.trajectory import STEPS, AdamWReference, Arrays, K, gradient, initial

if TYPE_CHECKING:  # it loads the network
    from benchmarks.training.gossip_group import GossipGroup

LR, WEIGHT_DECAY = 1e-2, 0.1
LAYOUT = layout_of({name: torch.from_numpy(value) for name, value in initial().items()})
INNER = InnerConfig(lr=LR, batch_size=4, total_steps=100, weight_decay=WEIGHT_DECAY)
FP32 = config.CodecConfig(up="fp32", down="fp32")


def built(
    method: config.OuterConfig, codec: config.CodecConfig | None = None, inner: InnerConfig = INNER
) -> Callable[[], OuterStrategy]:
    """Return what builds a peer's strategy as a run does; its vectors travel in fp32 if `codec` is left out."""
    usual = FP32 if isinstance(method, config.DENSE) else config.CodecConfig()
    return lambda: build_strategy(method, codec or usual, LAYOUT, inner)


def decoded(coding: Coding, messages: Sequence[torch.Tensor], numel: int) -> torch.Tensor:
    """Return what one peer's message decodes to, (P,), 0 elsewhere."""
    heard = torch.zeros(numel)
    for index, message in enumerate(messages):
        for place, update in coding.updates(index, coding.merge(index, [message], [1.0])):
            heard[place] = update
    return heard


def flat(arrays: Arrays) -> torch.Tensor:
    return torch.from_numpy(np.concatenate([value.ravel() for value in arrays.values()])).float()


class Float64AdamW:
    """A worker's optimizer: AdamW in float64, on the group's weights in fp32."""

    def __init__(self) -> None:
        self.lr, self._formula = LR, AdamWReference()

    def step(self, local: torch.Tensor, gradient: torch.Tensor) -> None:
        self._formula.lr = self.lr
        params = {"": local.double().numpy()}
        self._formula.step(params, {"": gradient.double().numpy()})
        local.copy_(torch.from_numpy(params[""]))


def trained(
    build: Callable[[], OuterStrategy],
    every: int,
    overlap: Overlap | None = None,
    *,
    lr: float = LR,
    workers: int = K,
    tokens: int | None = None,
) -> StrategyGroup:
    """Train the strategies that `build` makes on the test problem for `STEPS` inner steps, in fp32 and through bytes,
    with workers in float64. `lr`: the learning rate of a method that exchanges gradients."""
    init = {name: torch.from_numpy(value).float() for name, value in initial().items()}
    group = StrategyGroup(build, init, workers, every, InnerSpec(lr=lr), overlap=overlap, tokens=tokens)
    train(group)
    return group


def train(group: StrategyGroup | GossipGroup) -> None:
    """Train a new group on the test problem, with workers in float64."""
    group.inner[:] = [Float64AdamW() for _ in group.local]  # type: ignore[misc]
    for step in range(1, STEPS + 1):
        grads = [gradient(k, step, params) for k, params in enumerate(weights(group))]
        group.step([{n: torch.from_numpy(g).float() for n, g in grad.items()} for grad in grads])


def weights(group: StrategyGroup | GossipGroup) -> list[Arrays]:
    """Return the weights of every worker, in the form of `tests.optim.support.trajectory.replayed`."""
    return [{n: p.double().numpy() for n, p in group.layout.views(local).items()} for local in group.local]
