"""The test problem's trajectory through the strategies."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from benchmarks.training.rounds import Rounds as Rounds
from benchmarks.training.rounds import encoded as encoded
from optim.strategies.interface import Coding, OuterStrategy
from peer.model.layout import FlatLayout
from tests.optim.support.trajectory import STEPS, AdamWReference, Arrays, K, gradient, initial


def decoded(coding: Coding, messages: Sequence[torch.Tensor], numel: int) -> torch.Tensor:
    """Return what one peer's message decodes to, (P,), 0 elsewhere."""
    heard = torch.zeros(numel)
    for index, message in enumerate(messages):
        for place, update in coding.updates(index, coding.merge(index, [message], [1.0])):
            heard[place] = update
    return heard


def flat(arrays: Arrays) -> torch.Tensor:
    return torch.from_numpy(np.concatenate([value.ravel() for value in arrays.values()])).float()


def trajectory(build: Callable[[], OuterStrategy], layout: FlatLayout, every: int, lr: float = 0.0) -> list[Arrays]:
    """Return the weights of every worker after `STEPS` inner steps, in the form of
    `tests.optim.support.trajectory.replayed`: K strategies in fp32, fed by float64 workers."""
    rounds = Rounds(build, flat(initial()), K)
    inner = [AdamWReference() for _ in range(K)]
    workers = [initial() for _ in range(K)]
    gathered: list[list[Arrays]] = []
    for step in range(1, STEPS + 1):
        gathered.append([gradient(k, step, workers[k]) for k in range(K)])
        if rounds.strategies[0].product == "delta":
            for optimizer, params, grad in zip(inner, workers, gathered[-1], strict=True):
                optimizer.step(params, grad)
        if step % every:
            continue
        if rounds.strategies[0].product == "delta":
            products = [rounds.tensors[0] - flat(params) for params in workers]
        else:
            products = [sum((flat(grads[k]) for grads in gathered), torch.zeros(())) / len(gathered) for k in range(K)]
        gathered.clear()
        rounds.exchange(products, lr=lr)
        theta = layout.views(rounds.tensors[0])
        workers = [{n: v.double().numpy().copy() for n, v in theta.items()} for _ in range(K)]
    return workers
