"""Messages that are vectors: coded on their way to the owner, merged there, and coded again on the way back."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Final

import torch

from optim.codecs import Buffer, Codec
from optim.codecs.interface import as_bytes, order_by_bytes
from optim.codecs.rows import absmax
from optim.rules.interface import MergeRule
from optim.rules.registry import MEAN
from optim.strategies.interface import Check, Coding, NewVector, Sent, go_on, in_memory
from optim.wire_sizes import SLICE_VALUES_MAX as SLICE_VALUES_MAX
from optim.wire_sizes import SLICE_VALUES_MIN, SLICES_WANTED
from peer.errors import ProtocolViolation

RESULT_SLACK: Final = 2.0  # more than any codec adds to a norm
CHUNK: Final = 1 << 16  # values; the update and a few pieces of state stay in one core's L2 cache


def slice_length(numel: int) -> int:
    """Return the slice length of a message of this many values."""
    return min(max(-(-numel // SLICES_WANTED), SLICE_VALUES_MIN), SLICE_VALUES_MAX)


class MergedCoding(Coding):
    """A coding whose slices are vectors. `up` codes a contributor's, `down` the owner's result, `rule` merges."""

    def __init__(self, up: Codec, down: Codec, rule: MergeRule = MEAN) -> None:
        self.up, self.down, self.rule = up, down, rule

    @abstractmethod
    def size(self, index: int) -> int:
        """Return the number of values of a slice."""

    def code(self, index: int) -> Codec:
        """Return the codec of contributors' slices."""
        return self.up

    def message_bytes(self, index: int) -> int:
        size: int = self.code(index).encoded_size(self.size(index))
        return size

    def message_sqnorm(self, index: int, data: Buffer) -> float:
        return self.code(index).decoded_sqnorm(data, self.size(index))

    def merge(self, index: int, messages: Sequence[Buffer], weights: Sequence[float]) -> torch.Tensor:
        """Merge in the order of the messages' own bytes, so that the result does not depend on the senders' order."""
        order = order_by_bytes(messages, weights)
        return self.rule.merge(
            self.code(index), [messages[i] for i in order], [weights[i] for i in order], self.size(index), self.down
        )

    def result_bytes(self, index: int, senders: int) -> int:
        return self.down.encoded_size(self.size(index))

    def check_result(self, indices: Sequence[int], results: Sequence[Buffer], sent: Sequence[Sent]) -> None:
        """Refuse results whose norm exceeds what the rule can make of the contributions' norms."""
        bound = self.rule.norm_bound([s.weight for s in sent], [s.sqnorm for s in sent])
        if self._sqnorm(indices, results) > (RESULT_SLACK * bound) ** 2:
            raise ProtocolViolation("a result is larger than any merge of the committed contributions")

    def _sqnorm(self, indices: Sequence[int], results: Sequence[Buffer]) -> float:
        """Return the squared norm of the results of these slices together."""
        pairs = zip(indices, results, strict=True)
        return math.fsum(self.down.decoded_sqnorm(data, self.size(index)) for index, data in pairs)


class DenseCoding(MergedCoding):
    """A coding with slices of equal length, cut at the codecs' granules, the same at every peer of a run.

    A message is the values at `places`, concatenated; there may be gaps between the places.
    """

    def __init__(self, places: Sequence[slice], up: Codec, down: Codec, rule: MergeRule = MEAN) -> None:
        super().__init__(up, down, rule)
        self.places = tuple(places)
        self.numel = sum(place.stop - place.start for place in places)
        granule: int = math.lcm(up.granule, down.granule)
        self.length: int = -(-slice_length(self.numel) // granule) * granule
        self.count: int = -(-self.numel // self.length)

    def span(self, index: int) -> slice:
        """Return the slice's span of the message."""
        return slice(index * self.length, min(self.numel, (index + 1) * self.length))

    def size(self, index: int) -> int:
        span = self.span(index)
        return int(span.stop - span.start)

    def updates(self, index: int, data: Buffer) -> Iterator[tuple[slice, torch.Tensor]]:
        numel = self.size(index)
        encoded = as_bytes(data, self.down.encoded_size(numel))
        step = CHUNK if CHUNK % self.down.granule == 0 else numel
        values = torch.empty(min(step, numel), dtype=torch.float32)
        for first in range(0, numel, step):
            size, begin = min(step, numel - first), self.down.encoded_size(first)
            piece = self.down.decode(encoded[begin : begin + self.down.encoded_size(size)], size, values[:size])
            for place, part in self._placed(index * self.length + first, size):
                yield place, piece[part]

    def placed(self, index: int) -> Iterator[tuple[slice, slice]]:
        """Yield where the values of a slice belong: a span of the flat vector, and the same values' span of the
        slice."""
        return self._placed(index * self.length, self.size(index))

    def _placed(self, first: int, size: int) -> Iterator[tuple[slice, slice]]:
        """Cut a piece of the message, which begins at value `first`, at the ends of its places."""
        reached = 0  # values of the message before this place
        for place in self.places:
            begin, end = max(first, reached), min(first + size, reached + place.stop - place.start)
            if begin < end:
                offset = place.start - reached
                yield slice(begin + offset, end + offset), slice(begin - first, end - first)
            reached += place.stop - place.start


class Feedback:
    """A peer's coding errors, for codecs that need error feedback (arXiv 1901.09847).

    Each set of places (a fragment) has its own residual, which is added to the next message of the same places."""

    def __init__(self, new_vector: NewVector = in_memory) -> None:
        self._new_vector = new_vector
        self._residuals: dict[tuple[tuple[int, int], ...], torch.Tensor] = {}

    def encode(self, coding: DenseCoding, vector: torch.Tensor, out: Sequence[torch.Tensor]) -> list[float]:
        """Encode the vector plus the residual into `out`; keep what the code lost. Returns the slices' squared
        norms."""
        if not coding.up.needs_error_feedback:
            return [coding.code(i).encode_with_sqnorm(vector[coding.span(i)], out[i])[1] for i in range(coding.count)]
        absmax(vector)  # finite: nothing else may enter the residual
        residual = self._residual(coding)
        sqnorms = []
        for i in range(coding.count):
            span = coding.span(i)
            wanted = residual[span] + vector[span]
            sqnorms.append(coding.code(i).encode_with_sqnorm(wanted, out[i])[1])
            torch.sub(wanted, coding.code(i).decode(out[i], coding.size(i)), out=residual[span])
        return sqnorms

    def memory(self, coding: DenseCoding) -> Sequence[torch.Tensor]:
        return (self._residual(coding),) if coding.up.needs_error_feedback else ()

    def restore_residual(self, coding: DenseCoding, messages: Sequence[Buffer]) -> None:
        """Add a message that was not merged to the residual again."""
        if coding.up.needs_error_feedback:
            residual = self._residual(coding)
            for i, message in enumerate(messages):
                residual[coding.span(i)] += coding.code(i).decode(message, coding.size(i))

    def _residual(self, coding: DenseCoding) -> torch.Tensor:
        key = tuple((place.start, place.stop) for place in coding.places)
        if key not in self._residuals:
            self._residuals[key] = self._new_vector(coding.numel)
        return self._residuals[key]


class MessageFormat(ABC):
    """The form of a dense method's messages, independent of the outer step. `encode` and `restore_residual` use this
    peer's memory."""

    fragments: int
    """One of these is exchanged at a time."""
    rule: MergeRule = MEAN
    """How owners merge."""

    @abstractmethod
    def coding(self, fragment: int, momentum: torch.Tensor, check: Check = go_on, turn: int = 0) -> Coding:
        """Return the fragment's coding, a pure function of `momentum` (the shared state's, (P,), only read) and `turn`,
        the number of commits of the fragment before. `check` as in `OuterStrategy.coding`."""

    @abstractmethod
    def slices(self, fragment: int) -> int:
        """Return how many slices the fragment's coding has, whatever the state."""

    @abstractmethod
    def encode(self, coding: Coding, vector: torch.Tensor, out: Sequence[torch.Tensor]) -> list[float]:
        """Do as `OuterStrategy.encode`."""

    @abstractmethod
    def memory(self, coding: Coding) -> Sequence[torch.Tensor]:
        """Do as `OuterStrategy.memory`."""

    @abstractmethod
    def restore_residual(self, coding: Coding, messages: Sequence[Buffer]) -> None:
        """Do as `OuterStrategy.restore_residual`."""


class DenseFormat(MessageFormat):
    """Dense messages with one codec up and one down, merged by a rule. `fragments`: the places of each."""

    def __init__(
        self,
        fragments: Sequence[Sequence[slice]],
        up: Codec,
        down: Codec,
        rule: MergeRule = MEAN,
        new_vector: NewVector = in_memory,
    ) -> None:
        self.fragments, self.rule = len(fragments), rule
        self._codings = [DenseCoding(places, up, down, rule) for places in fragments]
        self._feedback = Feedback(new_vector)

    def coding(self, fragment: int, momentum: torch.Tensor, check: Check = go_on, turn: int = 0) -> DenseCoding:
        return self._codings[fragment]

    def slices(self, fragment: int) -> int:
        return self._codings[fragment].count

    def encode(self, coding: Coding, vector: torch.Tensor, out: Sequence[torch.Tensor]) -> list[float]:
        assert isinstance(coding, DenseCoding)
        return self._feedback.encode(coding, vector, out)

    def memory(self, coding: Coding) -> Sequence[torch.Tensor]:
        assert isinstance(coding, DenseCoding)
        return self._feedback.memory(coding)

    def restore_residual(self, coding: Coding, messages: Sequence[Buffer]) -> None:
        assert isinstance(coding, DenseCoding)
        self._feedback.restore_residual(coding, messages)
