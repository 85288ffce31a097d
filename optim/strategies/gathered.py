"""Small messages that the owner forwards unchanged: every member decodes and averages all of them.

A result: the number of senders n (uint64), their n weights (float64), then their n messages, in the roster's order; all
little-endian. Every member can check each message against its sender's commitment. The result grows with n: each of K
peers receives K messages instead of one merged vector.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import Generic, TypeVar

import numpy as np
import torch
from blake3 import blake3

from optim.bundles import bundle_hash
from optim.codecs import Buffer
from optim.codecs.interface import as_bytes, order_by_bytes
from optim.strategies.interface import Coding, Sent
from peer.errors import ProtocolViolation

M = TypeVar("M")
SQNORM_CLOSE = 1e-6  # relative; the owner checks committed norms with the same tolerance


class GatheredCoding(Coding, Generic[M]):
    """A coding whose results hold all messages. A subclass defines the message and the mean."""

    @abstractmethod
    def unpack(self, index: int, message: Buffer) -> M:
        """Decode a message; `ProtocolViolation` if it does not decode."""

    @abstractmethod
    def sqnorm(self, index: int, message: M) -> float:
        """Return the squared norm of a decoded message."""

    @abstractmethod
    def mean(self, index: int, messages: Sequence[M], weights: Sequence[float]) -> Iterator[tuple[slice, torch.Tensor]]:
        """Yield the merged update, as `updates` does; sums are in the order given and have the same bits on every CPU.
        `ProtocolViolation` if it is not finite."""

    def message_sqnorm(self, index: int, data: Buffer) -> float:
        return self.sqnorm(index, self.unpack(index, data))

    def merge(self, index: int, messages: Sequence[Buffer], weights: Sequence[float]) -> torch.Tensor:
        if len(messages) != len(weights) or not messages:
            raise ValueError(
                f"{len(messages)} contributions with {len(weights)} weights cannot be merged: pass one weight each"
            )
        for message in messages:
            self.unpack(index, message)  # raises if it does not decode
        header = np.array([len(messages)], "<u8").tobytes() + np.array(weights, "<f8").tobytes()
        parts = [as_bytes(header, len(header))]
        return torch.cat([*parts, *(as_bytes(message, self.message_bytes(index)) for message in messages)])

    def result_bytes(self, index: int, senders: int) -> int:
        return 8 + 8 * senders + self.message_bytes(index) * senders

    def check_result(self, indices: Sequence[int], results: Sequence[Buffer], sent: Sequence[Sent]) -> None:
        found = [self._split(index, data) for index, data in zip(indices, results, strict=True)]
        if any(weights != [s.weight for s in sent] for _, weights in found):
            raise ProtocolViolation("a result weighs its messages differently from the roster")
        for messages, s in zip(zip(*(messages for messages, _ in found), strict=True), sent, strict=True):
            if bundle_hash([blake3(message.numpy().data).digest() for message in messages]) != s.hash:
                raise ProtocolViolation("a result holds a message that its sender has not committed to")
            sqnorm = math.fsum(map(self.message_sqnorm, indices, messages))
            if not math.isclose(sqnorm, s.sqnorm, rel_tol=SQNORM_CLOSE):
                raise ProtocolViolation("a result holds a message of another norm than its sender committed to")

    def updates(self, index: int, data: Buffer) -> Iterator[tuple[slice, torch.Tensor]]:
        """Sum in the order of the messages' own bytes, so that the result does not depend on the senders' order."""
        messages, weights = self._split(index, data)
        order = order_by_bytes(messages, weights)
        yield from self.mean(index, [self.unpack(index, messages[i]) for i in order], [weights[i] for i in order])

    def _split(self, index: int, data: Buffer) -> tuple[list[torch.Tensor], list[float]]:
        size = self.message_bytes(index)
        found = data.numel() if isinstance(data, torch.Tensor) else memoryview(data).nbytes
        senders = (found - 8) // (8 + size)
        raw = as_bytes(data, self.result_bytes(index, max(1, senders)))
        weights = raw[8 : 8 + 8 * senders].numpy().view("<f8").tolist()
        if int(raw[:8].numpy().view("<u8")[0]) != senders or not all(0 < weight <= 1 for weight in weights):
            raise ProtocolViolation("a result has a wrong number of senders or a weight outside (0, 1]")
        return list(raw[8 + 8 * senders :].split(size)) if size else [raw[:0]] * senders, weights
