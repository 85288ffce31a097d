"""Rounds of K recipes in one process: what the network does with them, without the network."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from blake3 import blake3

from optim.strategies.interface import Coding, OuterStrategy, RoundInfo, Sent
from peer.model.layout import FlatLayout
from tests.optim.support.trajectory import STEPS, AdamWReference, Arrays, K, gradient, initial


class Rounds:
    """`tensors`: [theta, *shared] as all members hold it. `order`: in which the roster names the peers."""

    def __init__(self, build: Callable[[], OuterStrategy], theta: torch.Tensor, peers: int = K) -> None:
        self.strategies = [build() for _ in range(peers)]
        self.tensors = [theta.clone(), *(torch.zeros_like(theta) for _ in self.strategies[0].shared)]
        self.order = list(range(peers))
        self.round = 0
        self.bytes_up = self.bytes_down = 0

    def round_info(self, lr: float = 0.0) -> RoundInfo:
        return RoundInfo(self.round + 1, self.round, lr)

    def exchange(self, products: Sequence[torch.Tensor], tokens: Sequence[int] | None = None, lr: float = 0.0) -> None:
        """A round: `products` are whole vectors (P,). Without `tokens` all weigh alike: no gate."""
        round_info = self.round_info(lr)
        coding = self.strategies[0].coding(round_info, self.tensors)
        sent = [
            encoded(strategy, round_info, coding, product)
            for strategy, product in zip(self.strategies, products, strict=True)
        ]
        norms = [sum(sqnorms) ** 0.5 for _, sqnorms in sent]
        weights: Sequence[float] = [1 / len(sent)] * len(sent)
        if tokens is not None:
            weights = self.strategies[0].weights([tokens[k] for k in self.order], [norms[k] for k in self.order])
        after = [tensor.clone() for tensor in self.tensors]
        whole = torch.zeros_like(self.tensors[0])
        self.bytes_up, self.bytes_down = sum(len(m) for m in sent[0][0]), 0
        for index in range(coding.count):
            messages = [sent[k][0][index] for k in self.order]
            result = coding.merge(index, messages, weights)
            assert len(result) == coding.result_bytes(index, len(messages))
            self.bytes_down += len(result)
            claims = [
                Sent(blake3(m.numpy().tobytes()).digest(), sent[k][1][index], w)
                for k, m, w in zip(self.order, messages, weights, strict=True)
            ]
            coding.check_result(index, result, claims)
            for place, update in coding.updates(index, result.numpy().tobytes()):
                whole[place] = update
                if self.strategies[0].elementwise:
                    self.strategies[0].step_into(
                        round_info, [t[place] for t in after], [t[place] for t in self.tensors], update
                    )
        if not self.strategies[0].elementwise:
            self.strategies[0].step_into(round_info, after, self.tensors, whole)
        self.tensors, self.round = after, self.round + 1


def encoded(
    strategy: OuterStrategy, round_info: RoundInfo, coding: Coding, product: torch.Tensor
) -> tuple[list[torch.Tensor], list[float]]:
    """A peer's message, into unaligned pieces of one block as the network does it, and its squared norms."""
    sizes = [coding.message_bytes(index) for index in range(coding.count)]
    room = torch.empty(sum(sizes), dtype=torch.uint8).split(sizes)
    sqnorms = strategy.encode(round_info, coding, torch.cat([product[place] for place in coding.places]), room)
    for index, (message, sqnorm) in enumerate(zip(room, sqnorms, strict=True)):
        assert abs(coding.message_sqnorm(index, message) - sqnorm) <= 1e-6 * sqnorm
    return list(room), sqnorms


def decoded(coding: Coding, messages: Sequence[torch.Tensor], numel: int) -> torch.Tensor:
    """What one peer's message says, (P,), 0 elsewhere."""
    heard = torch.zeros(numel)
    for index, message in enumerate(messages):
        for place, update in coding.updates(index, coding.merge(index, [message], [1.0])):
            heard[place] = update
    return heard


def flat(arrays: Arrays) -> torch.Tensor:
    return torch.from_numpy(np.concatenate([value.ravel() for value in arrays.values()])).float()


def trajectory(build: Callable[[], OuterStrategy], layout: FlatLayout, every: int, lr: float = 0.0) -> list[Arrays]:
    """The weights of every worker after `STEPS` inner steps, in the form of `tests.optim.support.trajectory.replayed`:
    K recipes in fp32, fed by float64 workers."""
    rounds = Rounds(build, flat(initial()))
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
            products = [sum(flat(grads[k]) for grads in gathered) / len(gathered) for k in range(K)]
        gathered.clear()
        rounds.exchange(products, lr=lr)
        theta = layout.views(rounds.tensors[0])
        workers = [{n: v.double().numpy().copy() for n, v in theta.items()} for _ in range(K)]
    return workers
