"""The hash tree that names a state."""

from __future__ import annotations

import pytest
import torch
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from peer.checkpoint.hash_tree import (
    MAX_CHUNK,
    MIN_CHUNK,
    StateBytes,
    StateTree,
    StreamHasher,
    chunk_size_for,
    hash_list_bytes,
    hash_list_bytes_max,
    hash_state,
)

numels = st.tuples(st.integers(1, 60_000), st.integers(1, 60_000))


@given(numels, st.integers(0, 2**31))
def test_tree_describes_the_concatenated_bytes(sizes: tuple[int, int], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    buffers = [torch.randn(size, generator=generator) for size in sizes]
    joined = b"".join(buffer.numpy().tobytes() for buffer in buffers)
    tree = hash_state(buffers)
    assert tree.size_bytes == len(joined)
    chunks = [joined[slice(*tree.span(index))] for index in range(len(tree.hashes))]
    assert b"".join(chunks) == joined
    assert all(tree.matches(index, chunk) for index, chunk in enumerate(chunks))
    assert tree.hashes[0] == blake3(chunks[0]).digest()  # plain blake3: any tool can check a chunk
    assert StateBytes(buffers).copy(*tree.span(0)) == chunks[0]


@given(numels, st.data())
def test_any_flipped_bit_changes_the_root(sizes: tuple[int, int], data: st.DataObject) -> None:
    buffers = [torch.zeros(size) for size in sizes]
    before = hash_state(buffers).root
    which = data.draw(st.integers(0, 1))
    raw = buffers[which].view(torch.uint8)
    position = data.draw(st.integers(0, raw.numel() - 1))
    raw[position] ^= 1 << data.draw(st.integers(0, 7))
    assert hash_state(buffers).root != before


def test_states_of_zeros_with_different_sizes_have_different_roots() -> None:
    roots = {hash_state([torch.zeros(size)]).root for size in (1, 2, MIN_CHUNK // 4, MIN_CHUNK // 4 + 1)}
    assert len(roots) == 4


@given(st.integers(0, 1 << 40))
def test_chunk_size_is_a_bounded_power_of_two(size: int) -> None:
    chunk = chunk_size_for(size)
    assert MIN_CHUNK <= chunk <= MAX_CHUNK and chunk & (chunk - 1) == 0
    assert chunk == MAX_CHUNK or -(-size // chunk) <= 64


@given(st.integers(1, 50_000))
def test_a_tree_is_restored_from_its_hashes(numel: int) -> None:
    tree = hash_state([torch.arange(numel, dtype=torch.float32)])
    joined = b"".join(tree.hashes)
    assert len(joined) == hash_list_bytes(tree.size_bytes)
    copy = StateTree.of_hashes(tree.size_bytes, memoryview(joined))
    assert copy == tree and copy is not None and copy.root == tree.root
    for wrong in (joined[:-1], joined + b"\0" * 32, b""):
        assert StateTree.of_hashes(tree.size_bytes, wrong) is None


@given(st.integers(1, 1 << 34), st.data())
def test_the_list_of_a_smaller_state_fits_where_that_of_the_largest_does(largest: int, data: st.DataObject) -> None:
    """Its chunks may be smaller, so that there are more of them: 3.1 MB have 49, 11 MB have 44."""
    assert hash_list_bytes(3_100_000) > hash_list_bytes(11_000_000)
    assert hash_list_bytes(data.draw(st.integers(1, largest))) <= hash_list_bytes_max(largest)


def test_a_chunk_of_another_length_never_matches() -> None:
    tree = hash_state([torch.zeros(10)])
    assert tree.matches(0, bytes(40))
    assert not tree.matches(0, bytes(39)) and not tree.matches(0, bytes(41)) and not tree.matches(0, b"")


def test_a_strided_tensor_is_refused() -> None:
    with pytest.raises(ValueError, match="contiguous"):
        hash_state([torch.zeros(4, 4).t()])


@pytest.mark.parametrize("numel", [1, MIN_CHUNK // 8, MIN_CHUNK // 4, 3 * MIN_CHUNK // 4 + 5])
@pytest.mark.parametrize("piece", [1, 7, 1 << 20])
def test_a_stream_has_the_tree_of_the_whole(numel: int, piece: int) -> None:
    data = torch.arange(numel, dtype=torch.float32)
    raw, hasher, step = memoryview(data.numpy().tobytes()), StreamHasher(8 * numel), piece * 1009
    for start in range(0, 8 * numel, step):
        part = (bytes(raw) * 2)[start : start + step]
        assert hasher.passed(memoryview(part)) == part
    assert hasher.tree() == hash_state([data, data])
