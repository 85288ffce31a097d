"""The engine against the decoder of training, where no golden of `transformers` is kept."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from peer.config import ModelConfig, RopeScaling
from peer.inference.blocks import SpanBlocks
from peer.inference.engine import Engine
from peer.ipc.sampling_options import Sampling
from peer.ipc.span import Span
from peer.model.decoder import Decoder, FlatLayout, init_flat


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_scaling": RopeScaling(kind="yarn", factor=4.0, original_max_seq_len=16)},
        {"rope_scaling": RopeScaling(kind="linear", factor=3.0)},
        {"attention_bias": True, "output_bias": True},
    ],
    ids=str,
)
def test_the_engine_computes_what_training_does(changes: dict[str, Any]) -> None:
    config = ModelConfig(hidden_size=32, layers=2, heads=4, kv_heads=2, intermediate_size=48, max_seq_len=64, **changes)
    flat = init_flat(config, seed=1)
    flat += 0.05 * torch.randn(flat.shape, generator=torch.Generator().manual_seed(0))
    blocks = SpanBlocks(config, Span.whole(2), FlatLayout.of(config).views(flat).__getitem__, torch.device("cpu"))
    engine, tokens = Engine(blocks, 64, 64, 64), torch.arange(1, 200, 5)
    engine.keeps_logits = True
    engine.open(1, Sampling())
    with torch.no_grad():
        expected = Decoder(config, flat)(tokens.unsqueeze(0))[0]
    for position, ids in ((0, tokens[:-1]), (len(tokens) - 1, tokens[-1:])):  # a prompt, then one token
        engine.submit(1, position, ids.tolist(), None, samples=True)
        (said,) = engine.step()
        assert said.logits is not None
        torch.testing.assert_close(said.logits, expected[position + len(ids) - 1], atol=1e-4, rtol=1e-4)
