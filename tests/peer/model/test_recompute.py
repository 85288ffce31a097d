"""Recomputation changes what is kept for the backward pass, and no gradient."""

from __future__ import annotations

import msgspec
import pytest
import torch

from peer.config import ModelConfig
from peer.footprint.workload import Recompute
from peer.model.decoder import Decoder
from peer.model.layout import init_flat
from tests.peer.devices import DEVICES

MODEL = ModelConfig(
    vocab_size=32, hidden_size=64, layers=4, heads=4, kv_heads=2, intermediate_size=160, max_seq_len=64, qk_norm=True
)
TOKENS = torch.randint(0, 32, (4, 65), generator=torch.Generator().manual_seed(0))


def gradient(
    model: ModelConfig, recompute: Recompute, bf16: bool = False, device: str = "cpu"
) -> tuple[float, torch.Tensor]:
    decoder = Decoder(model, init_flat(model, seed=0).to(device))
    tokens = TOKENS.to(device)
    decoder.bind_gradients(out := torch.zeros_like(decoder.flat))
    decoder.recompute = recompute
    with torch.autocast(device, torch.bfloat16, enabled=bf16, cache_enabled=recompute == "none"):
        total, _ = decoder.losses(decoder.hidden(tokens[:, :-1]), tokens[:, 1:])
    total.backward()
    return float(total.detach()), out


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")  # qk_norm under autocast
@pytest.mark.parametrize("recompute", ["selective", "full"])
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("changes", [{}, {"shared_blocks": 2}, {"attention_bias": True, "qk_norm": False}], ids=str)
def test_gradients_are_those_without(recompute: Recompute, bf16: bool, device: str, changes: dict[str, object]) -> None:
    model = msgspec.structs.replace(MODEL, **changes)
    loss, exact = gradient(model, "none", bf16, device)
    again, out = gradient(model, recompute, bf16, device)
    assert again == pytest.approx(loss, rel=1e-6)
    assert float((out - exact).norm() / exact.norm()) < (1e-2 if bf16 else 1e-6)
