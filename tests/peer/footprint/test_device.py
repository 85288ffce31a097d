"""The device's bytes, against the tensors of a real trainer and what torch saves for the backward."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest
import torch

from optim.config import AllReduceConfig, CodecConfig, DilocoConfig, OuterConfig
from optim.wire_sizes import exchange_of
from peer.compute.build_optimizer import build_inner
from peer.compute.device import resolve_device
from peer.compute.held_weights import SplitMaster
from peer.compute.optimizer import InnerSpec
from peer.compute.train_loop import InnerTrainer
from peer.config import InnerConfig, ModelConfig
from peer.footprint.device import device_items, saved_bytes_a_token
from peer.footprint.layout import Layout
from peer.footprint.optimizer_state import saved_bytes, state_bytes
from peer.footprint.parameters import parameter_count
from peer.footprint.workload import Recompute, Workload
from peer.ipc.span import Span
from peer.model.decoder import Decoder
from peer.model.layout import FlatLayout, init_flat
from peer.model.mixed_precision import autocast
from tests.peer.footprint.held_memory import HeldMemory

MODEL = ModelConfig(hidden_size=64, layers=2, heads=4, kv_heads=2, intermediate_size=96, max_seq_len=32)
INNER = InnerConfig(lr=1e-3, batch_size=2, total_steps=10, dtype="fp32")
DILOCO = DilocoConfig(steps=10)
ONE = Layout()


def workload(
    model: ModelConfig = MODEL, outer: OuterConfig = DILOCO, narrow: bool = False, layout: Layout = ONE
) -> Workload:
    return Workload(
        model=model,
        inner=INNER,
        exchange=exchange_of(outer, CodecConfig(), FlatLayout.of(model).shapes, peers=4),
        blocks=range(model.layers),
        seq_len=32,
        sequences=INNER.batch_size,
        narrow=narrow,
        layout=layout,
    )


def bytes_of(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().nbytes()


def test_the_state_of_a_trainer_is_counted_to_the_byte() -> None:
    trainer = InnerTrainer(MODEL, INNER, resolve_device("cpu"))
    items = device_items(workload())
    assert items["weights"] == bytes_of(trainer.local)
    assert items["gradient"] == bytes_of(trainer.gradient)
    assert items["inner optimizer"] == bytes_of(trainer.optimizer.state)
    assert items["rotary table"] == bytes_of(trainer.model.cos) + bytes_of(trainer.model.sin)
    assert "sum of gradients" not in items
    trainer.begin_gradient()
    assert trainer._gradient_sum is not None
    summed = device_items(workload(outer=AllReduceConfig(batch=8)))["sum of gradients"]
    assert summed == bytes_of(trainer._gradient_sum)


def test_the_state_of_a_trainer_with_split_weights_is_counted_to_the_byte() -> None:
    trainer = InnerTrainer(MODEL, INNER, resolve_device("cpu"), weights="split")
    assert isinstance(trainer.held, SplitMaster)
    items, wide = device_items(replace(workload(), weights="split")), device_items(workload())
    assert items["weights"] == bytes_of(trainer.local) + bytes_of(trainer.held.vector.correction)
    assert items["gradient"] == wide["gradient"] == bytes_of(trainer.gradient)
    assert items["inner optimizer"] == wide["inner optimizer"] == bytes_of(trainer.optimizer.state)


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("narrow", [None, torch.bfloat16])
def test_what_torch_keeps_of_split_weights(narrow: torch.dtype | None, recompute: Recompute) -> None:
    """No copies of weights for products in bf16; for those in fp32 one of each matrix."""
    work = replace(workload(narrow=narrow is not None), recompute=recompute, weights="split")
    decoder = Decoder(MODEL, init_flat(MODEL, 0).bfloat16())
    decoder.recompute = recompute
    tokens = torch.zeros(work.sequences, work.seq_len, dtype=torch.int64)
    narrowed = autocast(torch.device("cpu"), narrow, keeps_casts=recompute == "none")
    with HeldMemory(decoder.flat, decoder.cos, decoder.sin) as held, narrowed:
        kept = decoder.hidden(tokens)
    items = device_items(work)
    casts = items.get("fp32 copies of weights", 0.0)
    assert ("fp32 copies of weights" in items) == (narrow is None) and "16-bit copies of weights" not in items
    kept_casts = casts if recompute == "none" else 0.0
    ids = 8 * work.tokens  # given, not made
    assert kept.requires_grad
    assert held.size_bytes - kept_casts == pytest.approx(work.tokens * saved_bytes_a_token(work) - ids, rel=0.02)


@pytest.mark.parametrize("optimizer", ["adamw", "lamb", "lion", "muon", "adamw8bit"])
def test_the_state_of_every_optimizer_is_counted_to_the_byte(optimizer: str) -> None:
    if optimizer == "adamw8bit":
        pytest.importorskip("bitsandbytes")
    layout = FlatLayout.of(MODEL)
    inner = msgspec.structs.replace(INNER, optimizer=optimizer)
    made = build_inner(InnerSpec.of(inner), layout, torch.zeros(layout.numel))
    assert state_bytes(optimizer, layout.shapes) == bytes_of(made.state)
    saved = torch.zeros(saved_bytes(optimizer, layout.shapes), dtype=torch.uint8)
    made.save(saved)
    made.load(saved)


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")  # qk_norm under autocast
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("narrow", [None, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"kv_heads": 4},
        {"qk_norm": True},
        {"attention_bias": True, "output_bias": True},
        {"head_dim": 32},
        {"tie_embeddings": False},
        {"layers": 4, "shared_blocks": 2},
    ],
    ids=str,
)
def test_activations_are_what_torch_keeps(
    changes: dict[str, object], narrow: torch.dtype | None, recompute: Recompute
) -> None:
    """What is allocated in a forward pass and not freed at its end."""
    model = msgspec.structs.replace(MODEL, **changes)
    work = replace(workload(model, narrow=narrow is not None), recompute=recompute)
    decoder = Decoder(model, init_flat(model, 0))
    decoder.recompute = recompute
    tokens = torch.zeros(work.sequences, work.seq_len, dtype=torch.int64)
    narrowed = autocast(torch.device("cpu"), narrow, keeps_casts=recompute == "none")
    with HeldMemory(decoder.flat, decoder.cos, decoder.sin) as held, narrowed:
        kept = decoder.hidden(tokens)
    casts = device_items(work).get("16-bit copies of weights", 0) if recompute == "none" else 0
    ids = 8 * work.tokens  # given, not made
    assert kept.requires_grad
    assert held.size_bytes - casts == pytest.approx(work.tokens * saved_bytes_a_token(work) - ids, rel=0.01)


def test_parts_of_a_model_have_the_parameters_of_their_layout() -> None:
    model = msgspec.structs.replace(MODEL, tie_embeddings=False)
    for span in (Span(0, 1, 2), Span(1, 2, 2), Span(0, 2, 2)):
        assert parameter_count(model, span.blocks) == FlatLayout.of(model, span).numel


def test_a_layout_cuts_the_state_and_gathers_blocks() -> None:
    one, four = device_items(workload()), device_items(workload(layout=Layout(shard=2, tensor=2)))
    for name in ("weights", "gradient", "inner optimizer"):
        assert four[name] == one[name] / 4
    assert four["activations"] == one["activations"] / 2
    assert "gathered blocks" in four and "gathered blocks" not in one
