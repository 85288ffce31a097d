"""The part of the flat vector that one rank holds.

A parameter is cut by TP along its rows or columns, and what remains by FSDP along its rows, each as torch.chunk cuts.
So a rank's piece of a matrix is a box of rows and columns, and import and export are strided copies between the shared
vector and the rank's own: no rank ever gathers a parameter for them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from peer.footprint.layout import Layout
from peer.model.layout import FlatLayout, TensorSlot


class Strip(NamedTuple):
    """Rows of equal length that lie in the flat vector, `flat_width` apart, and in the local one, `local_width`
    apart."""

    rows: int
    columns: int
    flat_at: int
    flat_width: int
    local_at: int
    local_width: int

    def of_blocks(self, flat_at: int, local_at: int, block: int) -> Strip:
        """Return the strip in vectors of one parameter, which begins at these elements, that have one value for each
        `block` elements. The strip lies on their borders."""
        at, local = (self.flat_at - flat_at) // block, (self.local_at - local_at) // block
        if self.flat_width == 1:  # a vector is a column of rows
            return Strip(1, self.rows // block, at, 0, local, 0)
        return Strip(self.rows, self.columns // block, at, self.flat_width // block, local, self.local_width // block)

    def of_flat(self, vector: Tensor, begins_at: int = 0) -> Tensor:
        """Return a view (rows, columns) into `vector`, which begins at the element `begins_at` of the flat vector."""
        size, stride = (self.rows, self.columns), (self.flat_width, 1)
        return vector.as_strided(size, stride, vector.storage_offset() + self.flat_at - begins_at)

    def of_local(self, vector: Tensor) -> Tensor:
        """Return a view (rows, columns) into the rank's vector."""
        size, stride = (self.rows, self.columns), (self.local_width, 1)
        return vector.as_strided(size, stride, vector.storage_offset() + self.local_at)


@dataclass(frozen=True)
class Piece:
    """A rank's piece of one parameter, which is taken as a matrix (a vector: of one column)."""

    offset: int
    """Of the parameter in the flat vector."""
    width: int
    """Columns of the whole parameter."""
    rows: range
    columns: range
    owned: range
    """The rows that this rank exports; those that other ranks hold as well are dealt out among them."""
    at: int
    """Of the piece in the local vector, where its rows lie one after the other."""
    is_doubled: bool
    """Whether all ranks of a tensor group hold it."""

    def strips(self, start: int, stop: int, owned: bool) -> Iterator[Strip]:
        """Yield what the piece has of the elements [start, stop) of the flat vector."""
        rows = self.owned if owned else self.rows
        for top, bottom, left, right in _bands(max(0, start - self.offset), stop - self.offset, self.width):
            first, last = max(top, rows.start), min(bottom, rows.stop)
            begin, end = max(left, self.columns.start), min(right, self.columns.stop)
            if first < last and begin < end:
                width = len(self.columns)
                local = (first - self.rows.start) * width + begin - self.columns.start
                flat = self.offset + first * self.width + begin
                yield Strip(last - first, end - begin, flat, self.width, self.at + local, width)


@dataclass(frozen=True)
class LocalPieces:
    """The pieces of one rank, by canonical name, and the layout of its own flat vectors: all ranks have equally long
    ones, with zeros at the end of a piece whose parameter does not divide."""

    pieces: Mapping[str, Piece]
    layout: FlatLayout
    numel: int
    """Of the whole flat vector."""

    @classmethod
    def of(cls, whole: FlatLayout, tensor_dims: Mapping[str, int | None], layout: Layout, rank: int) -> LocalPieces:
        """Build those of `rank`. `tensor_dims`: the dimension that TP cuts, None for a parameter that it does not."""
        rest, tensor_rank = divmod(rank, layout.tensor)
        replica, shard_rank = divmod(rest, layout.shard)
        pieces: dict[str, Piece] = {}
        slots: dict[str, TensorSlot] = {}
        at = 0
        for name, slot in whole.slots.items():
            dim = tensor_dims.get(name)
            rows, columns = range(slot.shape[0]), range(math.prod(slot.shape[1:]))
            width = len(columns)
            if dim == 0:
                rows = _chunk(rows, layout.tensor, tensor_rank)
            elif dim == 1:
                columns = _chunk(columns, layout.tensor, tensor_rank)
            padded = -(-len(rows) // layout.shard)
            rows = _chunk(rows, layout.shard, shard_rank)
            doubled = dim is None and layout.tensor > 1
            copies, copy = (layout.size // layout.shard, replica * layout.tensor + tensor_rank)
            if not doubled:
                copies, copy = layout.replicate, replica
            pieces[name] = Piece(slot.offset, width, rows, columns, _chunk(rows, copies, copy), at, doubled)
            shape = (padded, *slot.shape[1:]) if dim != 1 else (padded, len(columns))
            slots[name] = TensorSlot(at, shape, math.prod(shape))
            at += slots[name].numel
        return cls(pieces, FlatLayout(slots, at), whole.numel)

    @property
    def is_whole(self) -> bool:
        """Whether this rank holds every value."""
        return sum(len(piece.rows) * len(piece.columns) for piece in self.pieces.values()) == self.numel

    def strips(self, ranges: Iterable[tuple[int, int]] | None = None, owned: bool = False) -> Iterator[Strip]:
        """Yield this rank's elements (with `owned`, those that it exports) of the flat vector in `ranges` (None: all).
        The elements owned by all ranks cover the vector exactly once."""
        for start, stop in ((0, self.numel),) if ranges is None else ranges:
            for piece in self.pieces.values():
                yield from piece.strips(start, stop, owned)

    def read(self, flat: Tensor, local: Tensor) -> None:
        """Copy this rank's pieces of a flat vector (P,) to its own one (n,)."""
        self._check(flat)
        for strip in self.strips():
            strip.of_local(local).copy_(strip.of_flat(flat))

    def write(self, local: Tensor, flat: Tensor) -> None:
        """Copy the pieces that this rank owns to a flat vector (P,)."""
        self._check(flat)
        for strip in self.strips(owned=True):
            strip.of_flat(flat).copy_(strip.of_local(local))

    def _check(self, flat: Tensor) -> None:
        if flat.shape != (self.numel,) or not flat.is_contiguous():
            raise ValueError(f"the flat vector has shape {tuple(flat.shape)}, these pieces are of ({self.numel},)")


def _bands(start: int, stop: int, width: int) -> Iterator[tuple[int, int, int, int]]:
    """Yield the elements [start, stop) of a matrix as boxes (top, bottom, left, right): a torn row, whole rows, a torn
    row."""
    if start >= stop:
        return
    top, left = divmod(start, width)
    bottom, right = divmod(stop, width)
    if top == bottom:
        yield top, top + 1, left, right
        return
    if left:
        yield top, top + 1, left, width
        top += 1
    yield top, bottom, 0, width
    if right:
        yield bottom, bottom + 1, 0, right


def _chunk(whole: range, parts: int, index: int) -> range:
    """Return the part `index` as torch.chunk cuts; the last ones may be shorter, or empty."""
    size = -(-len(whole) // parts)
    return whole[index * size : (index + 1) * size]
