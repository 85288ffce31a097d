"""PowerSGD's compressor (arXiv 1905.13727) in one exchange: each peer sends the two factors of its own matrices.

The paper averages P, orthonormalizes the average, then averages Q: two exchanges a step. Over the internet a round trip
costs more than bytes, so here each peer makes one step of the power iteration alone: P = orthonormal(M Q), Q <- M^T P,
kept for the next message; error feedback keeps M - P Q^T. The merge is the mean of all peers' P Q^T, whose rank is up
to n times as large. Factors are gathered, not merged: they take 16 bits for each of rank * (rows + columns) numbers and
sender, a merged matrix a down codec's bits for each of rows * columns numbers. With a hundred peers gathering is no
longer smaller. `codec.down` is not used.

Factors are 16-bit integers under one scale. P Q^T is then a sum of integers below 2^40, which float64 holds without
rounding: every CPU gets the same bits in any order of a BLAS. A parameter that the rank does not halve is sent in bf16.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
import torch

from optim.codecs import Buffer
from optim.codecs.interface import as_bytes
from optim.codecs.rows import absmax
from optim.deterministic import square_sum
from optim.strategies.dense import CHUNK, SLICE_VALUES_MAX, MessageFormat, slice_length
from optim.strategies.gathered import GatheredCoding
from optim.strategies.interface import Check, Coding, NewVector, go_on, in_memory
from peer.errors import ProtocolViolation
from peer.model.layout import FlatLayout

SAVING_MIN: Final = 0.5  # hivemind's rule
LEVELS: Final = 32_767
Drawn = tuple[slice, torch.Tensor]


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
    def message_bytes(self) -> int:
        return 4 + 2 * self.rank * (self.rows + self.columns) if self.rank else 2 * self.numel

    @property
    def span(self) -> slice:
        """Its span of the message."""
        return slice(self.at, self.at + self.numel)

    def bands(self) -> Iterator[slice]:
        """Return spans of its rows that fit in the cache."""
        step = max(1, CHUNK // self.columns)
        return (slice(first, min(first + step, self.rows)) for first in range(0, self.rows, step))


class Factors(NamedTuple):
    """A block's decoded message: `scale` * p q^T with p (rows, rank) and q (columns, rank), integers in float64; or
    plain values, (numel,) bf16."""

    scale: float
    p: torch.Tensor
    q: torch.Tensor
    plain: torch.Tensor

    def rows(self, block: MatrixBlock, band: slice, weight: float) -> torch.Tensor:
        """Return weight times those rows of the matrix, flat float64, rounded once."""
        if not block.rank:
            return self.plain[band.start * block.columns : band.stop * block.columns].double().mul_(weight)
        return torch.mm(self.p[band], self.q.T).mul_(self.scale * weight).view(-1)

    def square_sum(self) -> float:
        """Return the squared norm: |p q^T|^2 is the sum of (p^T p) * (q^T q), without the matrix itself."""
        if not self.plain.numel():
            gram = (self.p.T @ self.p).flatten().tolist(), (self.q.T @ self.q).flatten().tolist()
            return self.scale * self.scale * math.fsum(a * b for a, b in zip(*gram, strict=True))
        return square_sum(self.plain.float())

    def add_to(self, values: torch.Tensor, block: MatrixBlock, sign: int) -> None:
        """Add sign * the block to values (numel,) fp32; the last bits may differ between CPUs."""
        if not block.rank:
            values.add_(self.plain, alpha=sign)
            return
        matrix = values.view(block.rows, block.columns)
        matrix.addmm_(self.p.float(), self.q.T.float(), alpha=sign * self.scale)


class LowRankCoding(GatheredCoding[list[Factors]]):
    """A coding of factors. `names`: the round's parameters, in the layout's order."""

    def __init__(self, layout: FlatLayout, names: Sequence[str], rank: int) -> None:
        self.slices = _slices(layout, names, rank)
        self.count = len(self.slices)
        slots = [layout.slots[name] for name in names]
        self.places = tuple(slice(slot.offset, slot.offset + slot.numel) for slot in slots)
        self.numel = sum(slot.numel for slot in slots)

    def message_bytes(self, index: int) -> int:
        return sum(block.message_bytes for block in self.slices[index])

    def unpack(self, index: int, message: Buffer) -> list[Factors]:
        raw, first, found = as_bytes(message, self.message_bytes(index)).numpy(), 0, []
        for block in self.slices[index]:
            found.append(_unpacked(block, raw[first : first + block.message_bytes]))
            first += block.message_bytes
        return found

    def sqnorm(self, index: int, message: list[Factors]) -> float:
        total = sum(factors.square_sum() for factors in message)
        if not math.isfinite(total):
            raise ProtocolViolation("a low-rank message decodes to values that are not finite")
        return total

    def mean(self, index: int, messages: Sequence[list[Factors]], weights: Sequence[float]) -> Iterator[Drawn]:
        for b, block in enumerate(self.slices[index]):
            for band in block.bands():
                shares = [m[b].rows(block, band, weight) for m, weight in zip(messages, weights, strict=True)]
                total = shares[0]
                for share in shares[1:]:
                    total.add_(share)
                total = total.float()
                if not math.isfinite(float(total.sum())):
                    raise ProtocolViolation("the mean of the messages is infinite")
                yield slice(block.start + band.start * block.columns, block.start + band.stop * block.columns), total


class LowRankFormat(MessageFormat):
    """Low-rank messages. `fragments`: the parameter names of each. Residual and warm start are this peer's own."""

    def __init__(
        self, layout: FlatLayout, fragments: Sequence[Sequence[str]], rank: int, new_vector: NewVector = in_memory
    ) -> None:
        self.fragments = len(fragments)
        self._new_vector = new_vector
        self._codings = [LowRankCoding(layout, names, rank) for names in fragments]
        self._errors: dict[LowRankCoding, torch.Tensor] = {}
        self._warm: dict[int, torch.Tensor] = {}  # by a block's start

    def coding(self, fragment: int, momentum: torch.Tensor, check: Check = go_on) -> LowRankCoding:
        return self._codings[fragment]

    def slices(self, fragment: int) -> int:
        return self._codings[fragment].count

    def encode(self, coding: Coding, vector: torch.Tensor, out: Sequence[torch.Tensor]) -> list[float]:
        assert isinstance(coding, LowRankCoding)
        absmax(vector)  # finite: nothing else may enter the residual
        residual = self._residual(coding)
        residual.add_(vector)
        sqnorms = []
        for index, blocks in enumerate(coding.slices):
            packed = [self._packed(block, residual[block.span]) for block in blocks]
            out[index].copy_(torch.from_numpy(np.concatenate(packed)))
            message = coding.unpack(index, out[index])
            sqnorms.append(coding.sqnorm(index, message))
            _add(residual, blocks, message, -1)
        return sqnorms

    def memory(self, coding: Coding) -> Sequence[torch.Tensor]:
        assert isinstance(coding, LowRankCoding)
        return (self._residual(coding),)

    def restore_residual(self, coding: Coding, messages: Sequence[Buffer]) -> None:
        assert isinstance(coding, LowRankCoding)
        for index, data in enumerate(messages):
            _add(self._residual(coding), coding.slices[index], coding.unpack(index, data), 1)

    def _packed(self, block: MatrixBlock, values: torch.Tensor) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
        if not block.rank:
            return values.to(torch.bfloat16).view(torch.uint8).numpy()
        matrix = values.view(block.rows, block.columns)
        q = self._warm.get(block.start)
        if q is None:
            generator = torch.Generator().manual_seed(block.start)
            q = torch.randn(block.columns, block.rank, generator=generator, dtype=torch.float32)
        p = torch.linalg.qr(matrix @ q).Q
        q = self._warm[block.start] = matrix.T @ p
        widths = [max(float(absmax(x.reshape(-1))), 2.0**-100) / LEVELS for x in (p, q)]
        integers = [(x / width).round_().to(torch.int16) for x, width in zip((p, q), widths, strict=True)]
        scale = np.array([widths[0] * widths[1]], "<f4")
        return np.concatenate([x.reshape(-1).view(np.uint8) for x in (scale, *(i.numpy() for i in integers))])

    def _residual(self, coding: LowRankCoding) -> torch.Tensor:
        if coding not in self._errors:
            self._errors[coding] = self._new_vector(coding.numel)
        return self._errors[coding]


def _unpacked(block: MatrixBlock, raw: np.ndarray[tuple[int], np.dtype[np.uint8]]) -> Factors:
    nothing = torch.empty(0, dtype=torch.float32)
    if not block.rank:
        plain = torch.from_numpy(raw.copy()).view(torch.bfloat16)
        if not bool(torch.isfinite(plain).all()):
            raise ProtocolViolation("a low-rank message holds a value that is infinite or not a number")
        return Factors(0.0, nothing, nothing, plain)
    scale = float(raw[:4].view("<f4")[0])
    if not 0 <= scale < math.inf:
        raise ProtocolViolation("a low-rank message holds a scale that is negative, infinite or not a number")
    numbers = torch.from_numpy(raw[4:].view("<i2").astype(np.float64)).view(-1, block.rank)
    return Factors(scale, numbers[: block.rows], numbers[block.rows :], nothing)


def _add(residual: torch.Tensor, blocks: Sequence[MatrixBlock], message: Sequence[Factors], sign: int) -> None:
    for block, factors in zip(blocks, message, strict=True):
        factors.add_to(residual[block.span], block, sign)


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
