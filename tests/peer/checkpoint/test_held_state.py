"""A state that is read while it changes is read as it was."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from peer.checkpoint import held_state
from peer.checkpoint.hash_tree import MIN_CHUNK, StreamHasher, hash_state
from peer.checkpoint.held_state import HeldState

NUMEL = 1000
NAMES = ("theta", "momentum")
places = st.lists(st.integers(0, NUMEL), min_size=2, max_size=2, unique=True).map(lambda ends: slice(*sorted(ends)))
steps = st.lists(st.tuples(st.booleans(), places), max_size=12)


def some_tensors(numel: int = NUMEL) -> dict[str, torch.Tensor]:
    return {name: torch.randn(numel, generator=torch.Generator().manual_seed(len(name))) for name in NAMES}


@pytest.fixture(scope="module", autouse=True)
def _small_pieces() -> object:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(held_state, "PIECE", 64)
        yield


@given(steps)
def test_any_part_is_read_as_it_was(steps: list[tuple[bool, slice]]) -> None:
    tensors = some_tensors()
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    held, kept = HeldState(tensors), torch.zeros(NUMEL, dtype=torch.bool)
    for reads, place in steps:
        if reads:
            for name in NAMES:
                assert b"".join(held.pieces(name, place)) == before[name][place].numpy().tobytes()
        else:
            held.keep(place)
            kept[place.start // 64 * 64 : -(-place.stop // 64) * 64] = True
            for tensor in tensors.values():
                tensor[place] += 1.0
    assert held.tree == hash_state(list(before.values()))
    assert held.copied_bytes == 4 * len(NAMES) * int(kept.sum())


def test_what_does_not_change_is_not_copied() -> None:
    held = HeldState(some_tensors())
    for name in NAMES:
        assert sum(map(len, held.pieces(name, slice(0, NUMEL)))) == 4 * NUMEL
    assert not held.copied_bytes


@pytest.mark.parametrize("numel", [1, MIN_CHUNK // 8, MIN_CHUNK // 4, 3 * MIN_CHUNK // 4 + 5])
@pytest.mark.parametrize("piece", [1, 7, 1 << 20])
def test_a_stream_has_the_tree_of_the_whole(numel: int, piece: int) -> None:
    data = torch.arange(numel, dtype=torch.float32)
    raw, hasher, step = memoryview(data.numpy().tobytes()), StreamHasher(8 * numel), piece * 1009
    for start in range(0, 8 * numel, step):
        part = (bytes(raw) * 2)[start : start + step]
        assert hasher.passed(memoryview(part)) == part
    assert hasher.tree() == hash_state([data, data])
