"""Sparse messages on the wire: sizes, round trips, and hostile bytes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from optim.algorithms.dct_tiles import pieces
from optim.algorithms.demo import DemoScheme
from optim.algorithms.packing import Sparse, SparsePacking
from optim.algorithms.sparseloco import SparseLocoScheme
from peer.errors import ProtocolViolation
from tests.optim.support.layouts import layout_of

TENSORS = {"matrix": torch.zeros(128, 192), "vector": torch.zeros(64), "odd": torch.zeros(3, 5), "one": torch.zeros(1)}


LAYOUT = layout_of(TENSORS)
PIECES = pieces(LAYOUT, 64, LAYOUT.numel)


def test_sparseloco_takes_fourteen_bits_a_value_and_its_levels() -> None:
    tiles = 6  # of 64 x 64 in the matrix; the others are one tile each, of 64, 15 and 1
    matrix = (tiles * 64 * 12 + tiles * 64 * 2) // 8
    vector, odd, one = 64 * 6 // 8 + 64 * 2 // 8, -(-14 * 4 // 8) + -(-14 * 2 // 8), 1 + 1
    assert SparseLocoScheme().packing(PIECES).size == matrix + vector + odd + one + 4 * (4 + 16)


def test_demo_takes_an_index_and_an_fp32_value() -> None:
    matrix = 6 * 32 * (12 + 32) // 8
    assert DemoScheme().packing(PIECES).size == matrix + 32 * (6 + 32) // 8 + -(-15 * 4 // 8) + 15 * 4 + 1 + 4


@pytest.mark.parametrize("bins", [None, 4])
def test_a_message_round_trips(bins: int | None) -> None:
    scheme, memory = SparseLocoScheme(bins=bins), torch.randn(LAYOUT.numel)
    taken = [scheme.take(memory[piece.span], piece.tiling) for piece in PIECES]
    quantized = tuple(q for _, q in taken if q is not None)
    message, packing = Sparse(tuple(part for part, _ in taken), quantized or None), scheme.packing(PIECES)
    data = packing.pack(message)
    assert data.shape == (packing.size,)
    got = packing.unpack(data.numpy().tobytes())
    for (index, value), (index_got, value_got) in zip(message.parts, got.parts, strict=True):
        assert torch.equal(index, index_got)
        assert torch.equal(value, value_got)
    assert torch.equal(packing.pack(got), data)


@settings(max_examples=100, deadline=None)
@given(st.data(), st.sampled_from([None, 2, 4]))
def test_any_bytes_are_a_message_or_refused(data: st.DataObject, bins: int | None) -> None:
    packing = SparsePacking([(2, 5), (1, 16)], [2, 4], bins)
    raw = data.draw(st.binary(min_size=packing.size, max_size=packing.size))
    try:
        message = packing.unpack(raw)
    except ProtocolViolation:
        return
    assert all(bool(torch.isfinite(value).all()) for _, value in message.parts)
    assert all(int(index.max()) < size for (index, _), (_, size) in zip(message.parts, packing.sizes, strict=True))


def test_wrong_lengths_and_repeated_indices_are_refused() -> None:
    packing = SparsePacking([(1, 16)], [2], None)
    with pytest.raises(ProtocolViolation, match="bytes instead of"):
        packing.unpack(bytes(packing.size + 1))
    with pytest.raises(ProtocolViolation, match="twice"):
        packing.unpack(bytes([0x33]) + bytes(8))
    assert packing.unpack(bytes([0x13]) + bytes(8)).parts[0][0].tolist() == [[3, 1]]
