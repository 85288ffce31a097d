"""The outer state: who reads one state has it as it is, whatever is built meanwhile."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from optim.config import CodecConfig, DilocoConfig, LionConfig, OuterConfig, StreamingConfig
from optim.strategies.interface import RoundInfo
from optim.strategies.registry import build_strategy
from peer.checkpoint.generation import FileRoom, StateGeneration
from peer.checkpoint.hash_tree import hash_state
from peer.config import InnerConfig, ModelConfig
from peer.model.layout import FlatLayout
from swarm.state.outer_state import OuterState

MODEL = ModelConfig(hidden_size=32, layers=2, heads=2, kv_heads=1, intermediate_size=64, max_seq_len=64)
LAYOUT = FlatLayout.of(MODEL)
METHODS: dict[str, OuterConfig] = {
    "diloco": DilocoConfig(steps=2),
    "streaming": StreamingConfig(steps=4, fragments=2),
    "lion": LionConfig(),
}


def state_of(method: OuterConfig, folder: Path | None = None) -> OuterState:
    inner = InnerConfig(lr=1e-3, batch_size=1, total_steps=1000)
    strategy = build_strategy(method, CodecConfig(), LAYOUT, inner)
    theta = torch.randn(LAYOUT.numel, generator=torch.Generator().manual_seed(1))
    tensors = [theta, *(torch.zeros_like(theta) for _ in strategy.shared)]
    if folder is None:
        return OuterState.in_memory(tensors, strategy)
    names = ("theta", *strategy.shared)
    first = StateGeneration(dict(zip(names, tensors, strict=True)))
    return OuterState(first, strategy, FileRoom(names, LAYOUT, folder / "states"))


def build(state: OuterState, number: int) -> None:
    """Build one round."""
    info = RoundInfo(number, number, 1e-3)
    coding = state.strategy.coding(info, state.tensors)
    state.begin(info, coding)
    size = sum(place.stop - place.start for place in coding.places)
    product = torch.randn(size, generator=torch.Generator().manual_seed(number)) * 1e-2
    message = [torch.empty(coding.message_bytes(index), dtype=torch.uint8) for index in range(coding.count)]
    state.strategy.encode(info, coding, product, message)
    for index, data in enumerate(message):
        state.build(index, memoryview(coding.merge(index, [memoryview(data.numpy().data)], [1.0]).numpy().data))


def go(state: OuterState, number: int, merges: bool = True) -> None:
    """Build and commit one round."""
    if merges:
        build(state, number)
    state.commit(state.hash_next() if merges else state.hash_unchanged())


def read(state: StateGeneration) -> list[torch.Tensor]:
    vectors = (b"".join(state.pieces(name, slice(0, state.numel))) for name in state.vectors)
    return [torch.frombuffer(bytearray(data), dtype=torch.float32) for data in vectors]


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("merges", [True, False])
@pytest.mark.parametrize("place", ["memory", "files"])
def test_a_state_is_read_as_it_was_through_later_rounds(tmp_path: Path, name: str, merges: bool, place: str) -> None:
    state = state_of(METHODS[name], tmp_path if place == "files" else None)
    go(state, 1)
    held, tensors = state.current, [tensor.clone() for tensor in state.tensors]
    for number in (2, 3, 4, 5):
        go(state, number, merges or number < 4)
    assert hash_state(read(held)) == held.tree != state.tree
    assert all(map(torch.equal, read(held), tensors))
    del held
    go(state, 6)
    assert state.tree.root == hash_state(state.tensors).root


@pytest.mark.parametrize("name", METHODS)
def test_where_states_lie_changes_no_bit_of_them(tmp_path: Path, name: str) -> None:
    """Rounds that are discarded, merge nothing or leave spans alone, with readers of some states and not of others."""
    states = [state_of(METHODS[name], folder) for folder in (None, tmp_path)]
    reader = None
    for number in range(1, 12):
        for state in states:
            if number % 3 == 0:
                build(state, 100 + number)  # of a round that is not committed
            go(state, number, number % 4 != 0)
        reader = states[0].current if number % 5 in (1, 2) else None
        assert len({state.tree.root for state in states}) == 1
        assert all(state.tree == hash_state(state.tensors) for state in states)
    assert reader is not None


def test_a_state_is_read_as_it_was_where_another_takes_its_place() -> None:
    state = state_of(METHODS["diloco"])
    held, before = state.current, [tensor.clone() for tensor in state.tensors]
    fetched = [torch.ones(LAYOUT.numel), torch.zeros(LAYOUT.numel)]
    state.replace(fetched, hash_state(fetched))
    assert all(map(torch.equal, read(held), before))
    assert all(map(torch.equal, state.tensors, fetched)) and state.tree.root == hash_state(fetched).root
    go(state, 1)
    assert all(map(torch.equal, fetched, (torch.ones(LAYOUT.numel), torch.zeros(LAYOUT.numel))))


def test_what_the_last_commit_changed_is_told() -> None:
    state = state_of(METHODS["streaming"])
    go(state, 1)
    assert 0 < sum(place.stop - place.start for place in state.changed) < LAYOUT.numel
    go(state, 2, merges=False)
    assert state.changed == ()
