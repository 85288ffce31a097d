"""The states that rounds of each method lead to have the bits that they had before there were compiled kernels."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final, get_args

import numpy as np
import pytest
import torch
from blake3 import blake3

from benchmarks.training.rounds import encoded
from optim import config
from optim.strategies.interface import RoundInfo, Sent
from optim.strategies.registry import build_strategy
from peer.config import InnerConfig
from swarm.state.outer_state import OuterState
from tests.optim.kernels.torch_only import torch_only
from tests.optim.support.layouts import layout_of
from tests.optim.support.shared_half import RUNS

RECORDED: Final = Path(__file__).with_name("method_bits.json")
"""Written at commit 58159c0a: `python -m tests.swarm.state.test_method_bits > tests/swarm/state/method_bits.json`."""
LAYOUT: Final = layout_of(
    {
        "embed": torch.empty(96, 48),
        "blocks.0.gain": torch.empty(48),
        "blocks.0.w": torch.empty(48, 80),
        "blocks.1.w": torch.empty(48, 50),
    }
)
INNER: Final = InnerConfig(lr=1e-2, batch_size=4, total_steps=100)
PEERS, ROUNDS = 3, 3
OF_THIS_CPU: Final = ("low rank", "up powersgd")
"""A member codes matrix products, whose last bits are its CPU's. What is merged of them, `test_other_cpus` compares."""
UP: Final[tuple[config.UpCodec, ...]] = get_args(config.UpCodec)
DOWN: Final[tuple[config.DownCodec, ...]] = get_args(config.DownCodec)
CODECS: Final = {
    **{f"up {up}": (config.DilocoConfig(steps=5), config.CodecConfig(up=up)) for up in UP},
    **{f"down {down}": (config.DilocoConfig(steps=5), config.CodecConfig(down=down)) for down in DOWN},
}
METHODS: Final = {
    **RUNS,
    **CODECS,
    "eager": (config.EagerConfig(steps=5), config.CodecConfig()),
    "streaming": (config.StreamingConfig(steps=6, fragments=2), config.CodecConfig()),
}


def drawn(rng: np.random.Generator) -> torch.Tensor:
    """Return a vector of many sizes with the same bits everywhere: integers, and powers of two."""
    values = rng.integers(-(2**23), 2**23, LAYOUT.numel) * 2.0 ** rng.integers(-34, -22, LAYOUT.numel)
    return torch.from_numpy(values.astype(np.float32))


def state_after(name: str) -> str:
    """Return the hash of the state that `ROUNDS` rounds of the method lead to."""
    torch.manual_seed(60)  # for codecs that round by lot
    rng = np.random.default_rng(60)
    peers = [build_strategy(*METHODS[name], LAYOUT, INNER) for _ in range(PEERS)]
    strategy = peers[0]
    vectors = [drawn(rng) for _ in range(1 + len(strategy.shared))]
    state = OuterState.in_memory([vectors[0], *(vector.abs() for vector in vectors[1:])], strategy)
    for number in range(ROUNDS):
        round_info = RoundInfo(number + 1, number, 1e-2)
        coding = strategy.coding(round_info, state.tensors)
        sent = []
        for peer in peers:
            sent.append(encoded(peer, round_info, coding, drawn(rng)))
        norms = [sum(sqnorms) ** 0.5 for _, sqnorms in sent]
        weights = strategy.weights([10 + k for k in range(PEERS)], norms)
        state.begin(round_info, coding)
        for index in range(coding.count):
            messages = [messages[index] for messages, _ in sent]
            result = coding.merge(index, messages, weights)
            claims = [
                Sent(blake3(message.numpy().tobytes()).digest(), sqnorms[index], weight)
                for message, (_, sqnorms), weight in zip(messages, sent, weights, strict=True)
            ]
            coding.check_result([index], [result], claims)
            state.build(index, result)
        state.commit(state.hash_next())
    return state.tree.root.hex()


@pytest.mark.parametrize("name", METHODS)
def test_the_bits_of_a_methods_states_are_those_of_the_tree_without_kernels(name: str) -> None:
    found = state_after(name)
    with torch_only():
        assert state_after(name) == found
    if name not in OF_THIS_CPU:
        assert found == json.loads(RECORDED.read_text())[name]


if __name__ == "__main__":
    print(json.dumps({name: state_after(name) for name in METHODS}, indent=1))  # noqa: T201
