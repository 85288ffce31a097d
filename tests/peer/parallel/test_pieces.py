"""The pieces of all ranks against the whole vector."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from peer.footprint.layout import Layout
from peer.model.layout import FlatLayout, TensorSlot
from peer.parallel.pieces import LocalPieces

LAYOUTS = st.builds(Layout, st.integers(1, 4), st.integers(1, 3), st.integers(1, 3))


@st.composite
def models(draw: st.DrawFn) -> tuple[FlatLayout, dict[str, int | None]]:
    """Some vectors and matrices, and the dimension along which TP cuts each."""
    slots: dict[str, TensorSlot] = {}
    dims: dict[str, int | None] = {}
    offset = 0
    for name in "abcd":
        shape = tuple(draw(st.lists(st.integers(1, 9), min_size=1, max_size=2)))
        slots[name] = TensorSlot(offset, shape, math.prod(shape))
        dims[name] = draw(st.sampled_from([None, *range(len(shape))]))
        offset += slots[name].numel
    return FlatLayout(slots, offset), dims


@st.composite
def ranges(draw: st.DrawFn, numel: int) -> list[tuple[int, int]]:
    ends = sorted(draw(st.lists(st.integers(0, numel), min_size=2, max_size=6)))
    return list(zip(ends[::2], ends[1::2], strict=False))


@given(st.data(), models(), LAYOUTS)
def test_the_ranks_own_each_element_of_a_range_once(
    data: st.DataObject, model: tuple[FlatLayout, dict[str, int | None]], layout: Layout
) -> None:
    whole, dims = model
    chosen = data.draw(ranges(whole.numel))
    counts = torch.zeros(whole.numel)
    wanted = torch.zeros(whole.numel)
    for start, stop in chosen:
        wanted[start:stop] += 1
    for rank in range(layout.size):
        for strip in LocalPieces.of(whole, dims, layout, rank).strips(chosen, owned=True):
            strip.of_flat(counts).add_(1)
    assert torch.equal(counts, wanted)


@given(models(), LAYOUTS)
def test_each_replica_holds_what_torch_cuts(model: tuple[FlatLayout, dict[str, int | None]], layout: Layout) -> None:
    """TP by torch.chunk, then FSDP by torch.chunk; behind a shorter chunk, zeros."""
    whole, dims = model
    flat = torch.arange(1.0, whole.numel + 1)
    for rank in range(layout.size):
        pieces = LocalPieces.of(whole, dims, layout, rank)
        local = torch.zeros(pieces.layout.numel)
        pieces.read(flat, local)
        views = pieces.layout.views(local)
        shard = rank // layout.tensor % layout.shard
        for name, value in whole.views(flat).items():
            if (dim := dims[name]) is not None:
                value = _chunk(value, layout.tensor, dim, rank % layout.tensor)
            value = _chunk(value, layout.shard, 0, shard)
            assert torch.equal(views[name][: len(value)], value)
            assert not views[name][len(value) :].any()


@given(models(), LAYOUTS)
def test_what_is_read_is_written_back(model: tuple[FlatLayout, dict[str, int | None]], layout: Layout) -> None:
    whole, dims = model
    flat = torch.arange(1.0, whole.numel + 1)
    out = torch.zeros_like(flat)
    for rank in range(layout.size):
        pieces = LocalPieces.of(whole, dims, layout, rank)
        local = torch.zeros(pieces.layout.numel)
        pieces.read(flat, local)
        pieces.write(local, out)
    assert torch.equal(out, flat)


def test_a_range_can_be_written_where_it_begins() -> None:
    """A product of some ranges lies one after the other, not where the elements are in the flat vector."""
    whole = FlatLayout({"a": TensorSlot(0, (4, 3), 12)}, 12)
    flat, out = torch.arange(12.0), torch.zeros(7)
    for rank in range(2):
        pieces = LocalPieces.of(whole, {"a": 1}, Layout(tensor=2), rank)
        local = torch.zeros(pieces.layout.numel)
        pieces.read(flat, local)
        for strip in pieces.strips([(2, 9)], owned=True):
            strip.of_flat(out, begins_at=2).copy_(strip.of_local(local))
    assert torch.equal(out, flat[2:9])


def test_another_vector_is_refused() -> None:
    pieces = LocalPieces.of(FlatLayout({"a": TensorSlot(0, (4, 3), 12)}, 12), {}, Layout(), 0)
    with pytest.raises(ValueError, match=r"shape \(11,\)"):
        pieces.read(torch.zeros(11), torch.zeros(12))


def _chunk(value: torch.Tensor, parts: int, dim: int, index: int) -> torch.Tensor:
    chunks = value.chunk(parts, dim)
    return chunks[index] if index < len(chunks) else value.narrow(dim, 0, 0)
