"""What methods send and keep by arithmetic, against their messages and vectors."""

from __future__ import annotations

from typing import get_args

import pytest
import torch

from optim import config
from optim.codecs import CODECS
from optim.strategies.interface import RoundInfo
from optim.strategies.registry import build_strategy, shared_vectors
from optim.wire_sizes import BITS, exchange_of, slices_of
from peer.config import InnerConfig, ModelConfig
from peer.model.layout import FlatLayout

LAYOUT = FlatLayout.of(
    ModelConfig(hidden_size=256, layers=2, heads=4, kv_heads=4, intermediate_size=512, max_seq_len=64, vocab_size=1024)
)
INNER = InnerConfig(lr=1e-3, batch_size=4, total_steps=100)
PEERS = 6
PLAIN = config.CodecConfig()
CASES = [
    *((config.DilocoConfig(steps=10), config.CodecConfig(up=up)) for up in get_args(config.UpCodec)),
    (config.DilocoConfig(steps=10), config.CodecConfig(down="int4")),
    (config.DilocoConfig(steps=10), config.CodecConfig(up="lgreco", bits=1.25)),
    (config.DilocoConfig(steps=10, check_by_loss=0.1), PLAIN),
    (config.StreamingConfig(steps=10), PLAIN),
    (config.EagerConfig(steps=10), PLAIN),
    (config.AllReduceConfig(batch=8), PLAIN),
    (config.DemoConfig(), PLAIN),
    (config.SparseLocoConfig(steps=10), PLAIN),
    (config.SparseLocoConfig(steps=10, bins=0), PLAIN),
    (config.LionConfig(), PLAIN),
    (config.LionConfig(vote="average"), PLAIN),
]


@pytest.mark.parametrize(("method", "codec"), CASES, ids=str)
def test_messages_and_results_have_the_size_foretold(method: config.OuterConfig, codec: config.CodecConfig) -> None:
    foretold = exchange_of(method, codec, LAYOUT.shapes, PEERS)
    strategy = build_strategy(method, codec, LAYOUT, INNER)
    assert foretold.state_vectors == 1 + len(shared_vectors(method, codec, LAYOUT, INNER))
    assert foretold.product == strategy.product and foretold.is_merged_whole != strategy.elementwise
    state = [torch.zeros(LAYOUT.numel) for _ in range(foretold.state_vectors)]
    codings = [strategy.coding(RoundInfo(number, 0, 1e-3), state) for number in (1, 1 + foretold.fragments)]
    coding, count = codings[0], codings[0].count
    up = sum(c.message_bytes(index) for c in codings for index in range(count)) / 2  # low-rank ones alternate
    result = sum(c.result_bytes(index, PEERS) for c in codings for index in range(count)) / 2
    message = LAYOUT.numel / foretold.fragments
    assert coding.count == pytest.approx(slices_of(message), rel=0.35), "equal slices, or whole parameters"
    tolerance = 0.15 if foretold.fragments > 1 else 0.03  # fragments are whole blocks, not equal parts
    assert up == pytest.approx(foretold.up * message, rel=tolerance)
    assert result == pytest.approx(foretold.result * message, rel=tolerance)
    assert bool(strategy.memory(coding)) <= (foretold.private_vectors >= 1)


@pytest.mark.parametrize(("method", "codec"), CASES, ids=str)
def test_what_a_method_remembers_is_foretold_and_made_where_it_is_told_to(
    method: config.OuterConfig, codec: config.CodecConfig
) -> None:
    made: list[int] = []

    def new_vector(numel: int) -> torch.Tensor:
        made.append(numel)
        return torch.zeros(numel)

    foretold = exchange_of(method, codec, LAYOUT.shapes, PEERS)
    strategy = build_strategy(method, codec, LAYOUT, INNER, new_vector)
    state = [torch.zeros(LAYOUT.numel) for _ in range(foretold.state_vectors)]
    for number in range(1, 2 * foretold.fragments + 1):
        round_info = RoundInfo(number, 0, 1e-3)
        coding = strategy.coding(round_info, state)
        product = torch.randn(sum(place.stop - place.start for place in coding.places))
        out = [torch.empty(coding.message_bytes(index), dtype=torch.uint8) for index in range(coding.count)]
        strategy.encode(round_info, coding, product, out)
    assert sum(made) == foretold.memory_vectors * LAYOUT.numel
    assert foretold.memory_vectors <= foretold.private_vectors


def test_the_bits_of_every_codec_are_known() -> None:
    for name, codec in CODECS.items():
        assert BITS[name] == pytest.approx(codec.bits_per_value, rel=0.01)
