"""DeMo and SparseLoCo on the network: chosen coefficients, packed and gathered.

A slice is a run of whole parameters. A parameter of more than `SLICE_VALUES_MAX` values is cut into bands of whole rows
of tiles. For DeMo that changes nothing. SparseLoCo's quantizer and norm clip then work on a band instead of the whole
parameter of its source: finer statistics, 20 bytes more a band.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import ClassVar

import torch

from optim.algorithms.dct_tiles import TileRange, pieces
from optim.algorithms.demo import DemoScheme
from optim.algorithms.packing import Sparse
from optim.algorithms.sparse import Scheme
from optim.algorithms.sparseloco import SparseLocoScheme
from optim.codecs import Buffer
from optim.codecs.rows import absmax
from optim.deterministic import square_sum
from optim.merge import gradient_weights
from optim.strategies.dense import CHUNK, SLICE_VALUES_MAX, slice_length
from optim.strategies.gathered import GatheredCoding
from optim.strategies.interface import (
    Check,
    Coding,
    NewVector,
    OuterStrategy,
    Product,
    RoundInfo,
    go_on,
    in_memory,
)
from peer.errors import ProtocolViolation
from peer.model.layout import FlatLayout


class SparseCoding(GatheredCoding[Sparse]):
    """A coding of sparse messages. `slices`: the pieces of each slice."""

    def __init__(self, layout: FlatLayout, scheme: Scheme, chunk: int) -> None:
        self.scheme = scheme
        self.slices = cut_into_slices(pieces(layout, chunk, SLICE_VALUES_MAX))
        self.packings = [scheme.packing(cut) for cut in self.slices]
        self.places = (slice(0, layout.numel),)
        self.count = len(self.slices)

    def message_bytes(self, index: int) -> int:
        return self.packings[index].size

    def unpack(self, index: int, message: Buffer) -> Sparse:
        return self.packings[index].unpack(message)

    def sqnorm(self, index: int, message: Sparse) -> float:
        """Return the squared norm of the coefficients, which an orthonormal transform does not change."""
        return math.fsum(square_sum(value) for _, value in message.parts)

    def mean(
        self, index: int, messages: Sequence[Sparse], weights: Sequence[float]
    ) -> Iterator[tuple[slice, torch.Tensor]]:
        for p, piece in enumerate(self.slices[index]):
            update = self.scheme.mean([message.parts[p] for message in messages], weights, piece.tiling)
            if not bool(torch.isfinite(update).all()):
                raise ProtocolViolation("the mean of the messages is infinite")
            for first in range(0, len(update), CHUNK):
                part = update[first : first + CHUNK]
                yield slice(piece.span.start + first, piece.span.start + first + len(part)), part


class SparseStrategy(OuterStrategy):
    """A scheme as a strategy. Members share only theta; the memory is each peer's own."""

    def __init__(self, layout: FlatLayout, scheme: Scheme, chunk: int, new_vector: NewVector = in_memory) -> None:
        self.scheme = scheme
        self._coding = SparseCoding(layout, scheme, chunk)
        self._numel, self._new_vector = layout.numel, new_vector

    @cached_property
    def _memory(self) -> torch.Tensor:
        return self._new_vector(self._numel)

    def coding(self, round_info: RoundInfo, state: Sequence[torch.Tensor], check: Check = go_on) -> SparseCoding:
        return self._coding

    def slices(self, round_info: RoundInfo) -> int:
        return self._coding.count

    def step_into(
        self, round_info: RoundInfo, after: Sequence[torch.Tensor], before: Sequence[torch.Tensor], update: torch.Tensor
    ) -> None:
        self.scheme.step_into(after[0], before[0], update, round_info.lr)

    def encode(
        self, round_info: RoundInfo, coding: Coding, product: torch.Tensor, out: Sequence[torch.Tensor]
    ) -> list[float]:
        assert isinstance(coding, SparseCoding)
        absmax(product)  # finite: nothing else may enter the memory
        self.scheme.remember(self._memory, product, round_info.lr)
        sqnorms = []
        for index, cut in enumerate(coding.slices):
            taken = [self.scheme.take(self._memory[piece.span], piece.tiling) for piece in cut]
            quantized = tuple(q for _, q in taken if q is not None)
            message = Sparse(tuple(part for part, _ in taken), quantized or None)
            out[index].copy_(coding.packings[index].pack(message))
            sqnorms.append(coding.sqnorm(index, message))
        return sqnorms

    def memory(self, coding: Coding) -> Sequence[torch.Tensor]:
        return (self._memory,)

    def restore_residual(self, round_info: RoundInfo, coding: Coding, messages: Sequence[Buffer]) -> None:
        assert isinstance(coding, SparseCoding)
        for index, data in enumerate(messages):
            message = coding.unpack(index, data)
            for piece, part in zip(coding.slices[index], message.parts, strict=True):
                self.scheme.put_back(self._memory[piece.span], piece.tiling, part)


class DemoStrategy(SparseStrategy):
    """DeMo (arXiv 2411.19870): one step a round, by the inner learning rate."""

    product: ClassVar[Product] = "gradient"

    def __init__(self, layout: FlatLayout, scheme: DemoScheme, chunk: int, new_vector: NewVector = in_memory) -> None:
        super().__init__(layout, scheme, chunk, new_vector)

    def weights(self, tokens: Sequence[int], norms: Sequence[float]) -> tuple[float, ...]:
        return gradient_weights(tokens, norms)


class SparseLocoStrategy(SparseStrategy):
    """SparseLoCo (arXiv 2508.15706)."""

    product: ClassVar[Product] = "delta"

    def __init__(
        self, layout: FlatLayout, scheme: SparseLocoScheme, chunk: int, new_vector: NewVector = in_memory
    ) -> None:
        super().__init__(layout, scheme, chunk, new_vector)


def cut_into_slices(whole: Sequence[TileRange]) -> list[list[TileRange]]:
    """Group pieces into runs of about one slice's length."""
    length = slice_length(sum(piece.tiling.numel for piece in whole))
    slices: list[list[TileRange]] = []
    held = length  # values in the last slice
    for piece in whole:
        size = piece.tiling.numel
        if not slices or held + size > length:
            slices.append([])
            held = 0
        slices[-1].append(piece)
        held += size
    return slices
