"""Sparse messages on the wire: sizes, round trips, and hostile bytes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from optim.algorithms.packing import SparsePacking
from optim.algorithms.sparseloco import SparseLocoScheme
from peer.errors import ProtocolViolation
from tests.optim.reference.group import Group
from tests.optim.reference.sparse import SparseLoco
from tests.optim.support.layouts import layout_of

TENSORS = {"matrix": torch.zeros(128, 192), "vector": torch.zeros(64), "odd": torch.zeros(3, 5), "one": torch.zeros(1)}


def method(bins: int | None) -> SparseLoco:
    layout = layout_of(TENSORS)
    return SparseLoco(layout, torch.zeros(layout.numel), 1, SparseLocoScheme(bins=bins))


def local() -> torch.Tensor:
    return torch.randn(layout_of(TENSORS).numel, generator=torch.Generator().manual_seed(5))


def test_sparseloco_takes_fourteen_bits_a_value_and_its_levels() -> None:
    packing = method(4).packing
    tiles = 6  # of 64 x 64 in the matrix; the others are one tile each, of 64, 15 and 1
    matrix = (tiles * 64 * 12 + tiles * 64 * 2) // 8
    vector, odd, one = 64 * 6 // 8 + 64 * 2 // 8, -(-14 * 4 // 8) + -(-14 * 2 // 8), 1 + 1
    assert packing.size == matrix + vector + odd + one + 4 * (4 + 16)


@pytest.mark.parametrize("bins", [None, 4])
def test_a_message_round_trips(bins: int | None) -> None:
    sender = method(bins)
    message = sender.outgoing(local(), local())
    data = sender.packing.pack(message)
    assert data.shape == (sender.packing.size,)
    got = sender.packing.unpack(data.numpy().tobytes())
    for (index, value), (index_got, value_got) in zip(message.parts, got.parts, strict=True):
        assert torch.equal(index, index_got)
        assert torch.equal(value, value_got)
    assert torch.equal(sender.packing.pack(got), data)
    assert torch.equal(sender.merge([got], [1.0]), sender.merge([message], [1.0]))


def test_the_group_counts_what_the_packing_takes() -> None:
    group = Group("demo", TENSORS, 2, lr=1e-3, topk=32)
    for _ in range(3):
        group.step([{n: torch.randn_like(t) for n, t in TENSORS.items()}] * 2)
    matrix = 6 * 32 * (12 + 32) // 8
    assert group.bytes_up == 3 * (matrix + 32 * (6 + 32) // 8 + -(-15 * 4 // 8) + 15 * 4 + 1 + 4)


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
