"""Distributed Lion on the network (arXiv 2404.00438): votes up in a bit a value, their majority or their mean down.

A message up has 1 + 1/64 bits a value, which keep most votes of 0 (see `optim.codecs.votes`). A majority may be a tie,
so it comes down in 1.6 bits. The mean of n votes comes down as their sum, in ceil(log2(2 n + 1)) bits: 4 for 4 peers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import ClassVar

import torch

from optim.algorithms.lion import LionRule
from optim.codecs import Buffer
from optim.codecs.interface import as_bytes
from optim.codecs.rows import absmax
from optim.codecs.votes import SENDERS_MAX, Decisions, Votes, pack_tally, tally_bytes, unpack_tally
from optim.strategies.dense import CHUNK, DenseCoding
from optim.strategies.interface import (
    Check,
    Coding,
    NewVector,
    OuterStrategy,
    Product,
    RoundInfo,
    Sent,
    go_on,
    in_memory,
)
from peer.errors import ProtocolViolation


class MajorityCoding(DenseCoding):
    """A coding whose result is the sign of the sum of votes. Weights are not used: each peer has one vote. `turn`: the
    round's number, of which `Votes` asks whether it is even."""

    def __init__(self, numel: int, turn: int) -> None:
        super().__init__([slice(0, numel)], Votes(turn), Decisions())

    def merge(self, index: int, messages: Sequence[Buffer], weights: Sequence[float]) -> torch.Tensor:
        return self.down.encode(self._count(index, messages).sign_())

    def check_result(self, indices: Sequence[int], results: Sequence[Buffer], sent: Sequence[Sent]) -> None:
        """Refuse results with more values other than 0 than votes other than 0 were cast."""
        if self._sqnorm(indices, results) > math.fsum(s.sqnorm for s in sent):
            raise ProtocolViolation("a result has more votes than were cast")

    def _count(self, index: int, messages: Sequence[Buffer]) -> torch.Tensor:
        """Sum the votes. Sums of small integers are exact in any order."""
        votes = [self.up.decode(message, self.size(index)) for message in messages[:1]]
        scratch = torch.empty_like(votes[0])
        for message in messages[1:]:
            votes[0].add_(self.up.decode(message, self.size(index), scratch))
        return votes[0]


class AverageCoding(MajorityCoding):
    """A coding whose result is the number of senders (uint64) and the sums of their votes."""

    def merge(self, index: int, messages: Sequence[Buffer], weights: Sequence[float]) -> torch.Tensor:
        header = as_bytes(len(messages).to_bytes(8, "little"), 8)
        return torch.cat([header, pack_tally(self._count(index, messages), len(messages))])

    def result_bytes(self, index: int, senders: int) -> int:
        return 8 + tally_bytes(self.size(index), senders)

    def check_result(self, indices: Sequence[int], results: Sequence[Buffer], sent: Sequence[Sent]) -> None:
        """Refuse results whose squared norm exceeds the mean of the senders' squared norms."""
        total = 0.0
        for index, data in zip(indices, results, strict=True):
            if self._senders(data) != len(sent):
                raise ProtocolViolation("a result counts other voters than were agreed")
            total += sum(float(torch.dot(piece, piece)) for _, piece in self.updates(index, data))
        if total * len(sent) > (1 + 1e-3) * math.fsum(s.sqnorm for s in sent):
            raise ProtocolViolation("a result has more votes than were cast")

    def updates(self, index: int, data: Buffer) -> Iterator[tuple[slice, torch.Tensor]]:
        senders, size, begin = self._senders(data), self.size(index), index * self.length
        body = as_bytes(data, self.result_bytes(index, senders))[8:]
        mean = unpack_tally(body, size, senders).div_(senders)
        for first in range(0, size, CHUNK):
            piece = mean[first : first + CHUNK]
            yield slice(begin + first, begin + first + len(piece)), piece

    def _senders(self, data: Buffer) -> int:
        head = (data.numpy() if isinstance(data, torch.Tensor) else memoryview(data))[:8]
        senders = int.from_bytes(bytes(head), "little")
        if not 1 <= senders <= SENDERS_MAX:
            raise ProtocolViolation("a result states an impossible number of voters")
        return senders


class LionStrategy(OuterStrategy):
    """Distributed Lion: one step a round, by the inner learning rate. Momentum is each peer's own. A vote that was not
    counted needs no memory: its gradient is in the momentum."""

    product: ClassVar[Product] = "gradient"

    def __init__(self, numel: int, rule: LionRule, majority: bool, new_vector: NewVector = in_memory) -> None:
        self.rule, self._new_vector = rule, new_vector
        kind = MajorityCoding if majority else AverageCoding
        self._codings = [kind(numel, turn) for turn in (0, 1)]

    @cached_property
    def _momentum(self) -> torch.Tensor:
        return self._new_vector(self._codings[0].numel)

    def coding(self, round_info: RoundInfo, state: Sequence[torch.Tensor], check: Check = go_on) -> MajorityCoding:
        return self._codings[round_info.round % 2]

    def slices(self, round_info: RoundInfo) -> int:
        return self._codings[0].count

    def step_into(
        self, round_info: RoundInfo, after: Sequence[torch.Tensor], before: Sequence[torch.Tensor], update: torch.Tensor
    ) -> None:
        self.rule.step_into(after[0], before[0], update, round_info.lr)

    def weights(self, tokens: Sequence[int], norms: Sequence[float]) -> tuple[float, ...]:
        """Weigh all peers that did any work alike."""
        counts = [work > 0 and math.isfinite(norm) for work, norm in zip(tokens, norms, strict=True)]
        return tuple(1 / sum(counts) if counted else 0.0 for counted in counts)

    def encode(
        self, round_info: RoundInfo, coding: Coding, product: torch.Tensor, out: Sequence[torch.Tensor]
    ) -> list[float]:
        assert isinstance(coding, MajorityCoding)
        absmax(product)  # finite
        sqnorms = []
        for i in range(coding.count):
            ballot = self.rule.vote(self._momentum[coding.span(i)], product[coding.span(i)])
            sqnorms.append(coding.up.encode_with_sqnorm(ballot, out[i])[1])
        return sqnorms

    def restore_residual(self, round_info: RoundInfo, coding: Coding, messages: Sequence[Buffer]) -> None:
        pass
