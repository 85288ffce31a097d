"""The outer state: who reads one state has it as it is, whatever is built meanwhile."""

from __future__ import annotations

import pytest
import torch

from optim.config import CodecConfig, DilocoConfig, LionConfig, OuterConfig, StreamingConfig
from optim.strategies.interface import RoundInfo
from optim.strategies.registry import build_strategy
from peer.checkpoint.hash_tree import hash_state
from peer.checkpoint.held_state import HeldState
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


def state_of(method: OuterConfig) -> OuterState:
    inner = InnerConfig(lr=1e-3, batch_size=1, total_steps=1000)
    strategy = build_strategy(method, CodecConfig(), LAYOUT, inner)
    theta = torch.randn(LAYOUT.numel, generator=torch.Generator().manual_seed(1))
    return OuterState([theta, *(torch.zeros_like(theta) for _ in strategy.shared)], strategy)


def go(state: OuterState, number: int, merges: bool = True) -> None:
    """Build and commit one round."""
    info = RoundInfo(number, number, 1e-3)
    coding = state.strategy.coding(info, state.tensors)
    state.begin(info, coding)
    if merges:
        size = sum(place.stop - place.start for place in coding.places)
        product = torch.randn(size, generator=torch.Generator().manual_seed(number)) * 1e-2
        message = [torch.empty(coding.message_bytes(index), dtype=torch.uint8) for index in range(coding.count)]
        state.strategy.encode(info, coding, product, message)
        for index, data in enumerate(message):
            state.build(index, memoryview(coding.merge(index, [memoryview(data.numpy().data)], [1.0]).numpy().data))
        state.commit(state.hash_next())
    else:
        state.commit(state.hash_unchanged())


def read(held: HeldState) -> list[torch.Tensor]:
    vectors = (b"".join(held.pieces(name, slice(0, held.numel))) for name in held.vectors)
    return [torch.frombuffer(bytearray(data), dtype=torch.float32) for data in vectors]


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("merges", [True, False])
def test_a_state_is_read_as_it_was_through_later_rounds(name: str, merges: bool) -> None:
    state = state_of(METHODS[name])
    go(state, 1)
    root, tensors = state.tree.root, [tensor.clone() for tensor in state.tensors]
    with state.held() as held:
        go(state, 2)
        assert not held.copied_bytes, "a round builds beside the state"
        for number in (3, 4, 5):
            go(state, number, merges)
        assert held.tree.root == root == hash_state(read(held)).root
        assert all(map(torch.equal, read(held), tensors))
    go(state, 6)
    assert state.tree.root == hash_state(state.tensors).root


def test_a_state_is_read_as_it_was_where_another_takes_its_place() -> None:
    state = state_of(METHODS["diloco"])
    before = [tensor.clone() for tensor in state.tensors]
    fetched = [torch.ones(LAYOUT.numel), torch.zeros(LAYOUT.numel)]
    with state.held() as held:
        state.replace(fetched, hash_state(fetched))
        assert all(map(torch.equal, read(held), before))
    assert all(map(torch.equal, state.tensors, fetched)) and state.tree.root == hash_state(fetched).root
