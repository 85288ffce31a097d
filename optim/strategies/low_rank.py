"""PowerSGD's factors (arXiv 1905.13727) in one exchange, alternating as in ACP-SGD (arXiv 2306.08881, section 4).

The paper averages P = M Q, orthonormalizes it, then averages M^T P: two exchanges a step. Over the internet a round
trip costs more than bytes, so a round makes one half. In one round all project on a common basis Q of rows and send
P = M Q; the update is mean(P) Q^T. In the next they project on a common basis P of columns and send Q = M^T P. Error
feedback keeps what a peer's own factor leaves out. Factors are merged like dense values, so a result does not grow with
the group.

ACP-SGD's basis is the last average. Here it is that of the shared momentum (`optim.algorithms.shared_basis`), which
holds the last averages and is all that a late joiner has. Sides alternate, as an update never leaves the space of its
basis. Contributors' factors are int8, merged ones in `codec.down`; a parameter that the rank does not halve is sent
beside them, whole.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import torch

from optim.algorithms.shared_basis import BASIS_BITS, VALUE_BITS, integers, shared_basis
from optim.codecs import Buffer, Codec, get_codec
from optim.codecs.rows import absmax
from optim.strategies.dense import CHUNK, SLICE_VALUES_MAX, MergedCoding, MessageFormat, slice_length
from optim.strategies.interface import Check, Coding, NewVector, go_on, in_memory
from peer.errors import ProtocolViolation
from peer.model.layout import FlatLayout

SAVING_MIN: Final = 0.5  # hivemind's rule
UP: Final = get_codec("int8")  # as good as bf16 in training, at half the bytes
SEEDS: Final = 1 << 20  # rounds with a start of their own


@dataclass(frozen=True)
class MatrixBlock:
    """A parameter, or rows of one. `at`: its first value in the message; `start`: in the flat vector; rank 0: not
    factored."""

    at: int
    start: int
    rows: int
    columns: int
    rank: int

    @property
    def numel(self) -> int:
        return self.rows * self.columns

    @property
    def span(self) -> slice:
        """Its span of the message."""
        return slice(self.at, self.at + self.numel)

    def numbers(self, of_rows: bool) -> int:
        """Return how many numbers are sent of it, against a basis of its rows' space or its columns'."""
        return self.rank * (self.rows if of_rows else self.columns) if self.rank else self.numel

    def bands(self) -> Iterator[slice]:
        """Return spans of its rows that fit in the cache."""
        step = max(1, CHUNK // self.columns)
        return (slice(first, min(first + step, self.rows)) for first in range(0, self.rows, step))


class LowRankCoding(MergedCoding):
    """A coding of one factor of each block. `bases`: the other one, by a block's start; `of_rows`: whether they span
    rows, (columns, rank), or columns, (rows, rank)."""

    def __init__(
        self, slices: Sequence[Sequence[MatrixBlock]], bases: Mapping[int, torch.Tensor], of_rows: bool, down: Codec
    ) -> None:
        super().__init__(UP, down)
        self.slices, self.bases, self.of_rows = slices, bases, of_rows
        self.count = len(slices)
        blocks = [block for blocks in slices for block in blocks]
        self.places = tuple(slice(block.start, block.start + block.numel) for block in blocks)
        self.numel = sum(block.numel for block in blocks)

    def size(self, index: int) -> int:
        return sum(block.numbers(self.of_rows) for block in self.slices[index])

    def updates(self, index: int, data: Buffer) -> Iterator[tuple[slice, torch.Tensor]]:
        for block, place, values in self.decoded(self.down, index, data):
            yield slice(block.start + place.start, block.start + place.stop), values

    def decoded(self, codec: Codec, index: int, data: Buffer) -> Iterator[tuple[MatrixBlock, slice, torch.Tensor]]:
        """Yield the matrices of a slice in bands: the block, a span of its values, and those, with the same bits on
        every CPU."""
        numbers = codec.decode(data, self.size(index))
        first = 0
        for block in self.slices[index]:
            own = numbers[first : first + block.numbers(self.of_rows)]
            first += len(own)
            if not block.rank:
                yield block, slice(0, block.numel), own
                continue
            factor, scale = integers(own.view(-1, block.rank), VALUE_BITS)
            basis = self.bases[block.start]
            left, right = (factor, basis) if self.of_rows else (basis, factor)
            for band in block.bands():
                values = torch.mm(left[band], right.T).mul_(scale * 2.0**-BASIS_BITS).float().view(-1)
                if not math.isfinite(float(values.abs().max())):
                    raise ProtocolViolation("a low-rank message decodes to values that are not finite")
                yield block, slice(band.start * block.columns, band.stop * block.columns), values

    def factor(self, block: MatrixBlock, values: torch.Tensor) -> torch.Tensor:
        """Return what is sent of a block's values (numel,) fp32, flat."""
        if not block.rank:
            return values
        matrix = values.view(block.rows, block.columns)
        basis = self.bases[block.start].mul(2.0**-BASIS_BITS).float()
        return ((matrix if self.of_rows else matrix.T) @ basis).reshape(-1)


class LowRankFormat(MessageFormat):
    """Low-rank messages. `fragments`: the parameter names of each. The residual is this peer's own."""

    def __init__(
        self,
        layout: FlatLayout,
        fragments: Sequence[Sequence[str]],
        rank: int,
        down: Codec,
        new_vector: NewVector = in_memory,
    ) -> None:
        self.fragments = len(fragments)
        self._down, self._new_vector = down, new_vector
        self._slices = [_slices(layout, names, rank) for names in fragments]
        self._errors: dict[int, torch.Tensor] = {}  # by the fragment's first value

    def coding(self, fragment: int, momentum: torch.Tensor, check: Check = go_on, turn: int = 0) -> LowRankCoding:
        bases, of_rows = {}, turn % 2 == 0
        for block in (block for blocks in self._slices[fragment] for block in blocks if block.rank):
            check()
            matrix = momentum[block.start : block.start + block.numel].view(block.rows, block.columns)
            seed = block.start * SEEDS + turn % SEEDS
            bases[block.start] = shared_basis(matrix, block.rank, seed % (1 << 63), of_rows)
        return LowRankCoding(self._slices[fragment], bases, of_rows, self._down)

    def slices(self, fragment: int) -> int:
        return len(self._slices[fragment])

    def encode(self, coding: Coding, vector: torch.Tensor, out: Sequence[torch.Tensor]) -> list[float]:
        assert isinstance(coding, LowRankCoding)
        absmax(vector)  # finite: nothing else may enter the residual
        residual = self._residual(coding)
        residual.add_(vector)
        sqnorms = []
        for index, blocks in enumerate(coding.slices):
            numbers = torch.cat([coding.factor(block, residual[block.span]) for block in blocks])
            sqnorms.append(coding.up.encode_with_sqnorm(numbers, out[index])[1])
            self._add(coding, index, out[index], -1)
        return sqnorms

    def memory(self, coding: Coding) -> Sequence[torch.Tensor]:
        assert isinstance(coding, LowRankCoding)
        return (self._residual(coding),)

    def restore_residual(self, coding: Coding, messages: Sequence[Buffer]) -> None:
        assert isinstance(coding, LowRankCoding)
        for index, message in enumerate(messages):
            self._add(coding, index, message, 1)

    def _add(self, coding: LowRankCoding, index: int, message: Buffer, sign: int) -> None:
        residual = self._residual(coding)
        for block, place, values in coding.decoded(coding.up, index, message):
            residual[block.at + place.start : block.at + place.stop].add_(values, alpha=sign)

    def _residual(self, coding: LowRankCoding) -> torch.Tensor:
        key = coding.places[0].start
        if key not in self._errors:
            self._errors[key] = self._new_vector(coding.numel)
        return self._errors[key]


def _slices(layout: FlatLayout, names: Sequence[str], rank: int) -> list[list[MatrixBlock]]:
    """Runs of blocks of about one slice's length each."""
    length = slice_length(sum(layout.slots[name].numel for name in names))
    slices: list[list[MatrixBlock]] = []
    at, held = 0, length
    for name in names:
        slot = layout.slots[name]
        rows, columns = (math.prod(slot.shape[:-1]), slot.shape[-1]) if len(slot.shape) > 1 else (1, slot.numel)
        step = max(1, SLICE_VALUES_MAX // columns)
        for first in range(0, rows, step):
            height = min(step, rows - first)
            saves = 1 - rank * (height + columns) / (height * columns) >= SAVING_MIN
            block = MatrixBlock(at, slot.offset + first * columns, height, columns, rank if saves else 0)
            if held + block.numel > length:
                slices.append([])
                held = 0
            slices[-1].append(block)
            held, at = held + block.numel, at + block.numel
    return slices
