"""Rounds of K strategies in one process: what the network does with them, without the network."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from blake3 import blake3

from optim.strategies.interface import Coding, OuterStrategy, RoundInfo, Sent


class Rounds:
    """An in-memory exchange among K strategies that `build` makes.

    Each message is encoded to bytes, each slice is merged once, its result is checked as a receiver would check it, and
    the outer step is made on what the result decodes to.
    """

    def __init__(self, build: Callable[[], OuterStrategy], theta: torch.Tensor, peers: int) -> None:
        self.strategies = [build() for _ in range(peers)]
        self.tensors = [theta.clone(), *(torch.zeros_like(theta) for _ in self.strategies[0].shared)]
        """[theta, *shared] as all members hold it, each (P,) fp32."""
        self.order = list(range(peers))
        """The order of the peers in the roster."""
        self.round = 0
        """Commits so far."""
        self.bytes_up = self.bytes_down = 0
        """Payload of the last round: one peer's message, and all results."""

    def round_info(self, lr: float = 0.0) -> RoundInfo:
        """Return the next round's position. `lr`: the inner learning rate."""
        return RoundInfo(self.round + 1, self.round, lr)

    def exchange(
        self, products: Sequence[torch.Tensor], tokens: Sequence[int] | None = None, lr: float = 0.0
    ) -> tuple[slice, ...]:
        """Run one round and return the places that it changed. `products`: a vector (P,) for each peer. `tokens`: each
        peer's work, for the gate; without it all peers weigh alike and there is no gate."""
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
        taken = [(k, weight) for k, weight in zip(self.order, weights, strict=True) if weight > 0]
        self.bytes_up, self.bytes_down = sum(len(m) for m in sent[0][0]), 0
        after = [tensor.clone() for tensor in self.tensors]
        whole = torch.zeros_like(self.tensors[0])
        for index in range(coding.count):
            messages = [sent[k][0][index] for k, _ in taken]
            result = coding.merge(index, messages, [weight for _, weight in taken])
            assert len(result) == coding.result_bytes(index, len(messages))
            self.bytes_down += len(result)
            claims = [
                Sent(blake3(message.numpy().tobytes()).digest(), sent[k][1][index], weight)
                for message, (k, weight) in zip(messages, taken, strict=True)
            ]
            coding.check_result([index], [result], claims)
            for place, update in coding.updates(index, result.numpy().tobytes()):
                whole[place] = update
                if self.strategies[0].elementwise:
                    self.strategies[0].step_into(
                        round_info, [t[place] for t in after], [t[place] for t in self.tensors], update
                    )
        if not self.strategies[0].elementwise:
            self.strategies[0].step_into(round_info, after, self.tensors, whole)
        for k, weight in zip(self.order, weights, strict=True):
            if weight == 0:
                self.strategies[k].restore_residual(round_info, coding, sent[k][0])
        self.tensors, self.round = after, self.round + 1
        return coding.places


def encoded(
    strategy: OuterStrategy, round_info: RoundInfo, coding: Coding, product: torch.Tensor
) -> tuple[list[torch.Tensor], list[float]]:
    """Return a peer's message, one uint8 tensor a slice, and the slices' squared norms. `product` is (P,).

    The slices are unaligned pieces of one buffer, as on the network."""
    sizes = [coding.message_bytes(index) for index in range(coding.count)]
    room = torch.empty(sum(sizes), dtype=torch.uint8).split(sizes)
    sqnorms = strategy.encode(round_info, coding, torch.cat([product[place] for place in coding.places]), room)
    for index, (message, sqnorm) in enumerate(zip(room, sqnorms, strict=True)):
        assert abs(coding.message_sqnorm(index, message) - sqnorm) <= 1e-6 * sqnorm
    return list(room), sqnorms
