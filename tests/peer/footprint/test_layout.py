"""Layouts as users write them, and the models that they do not fit."""

from __future__ import annotations

import msgspec
import pytest

from peer.config import AdapterConfig, ComputeType, InnerConfig, ModelConfig, StorageConfig
from peer.errors import ConfigError
from peer.footprint.layout import Compute, Layout, parse_devices

MODEL = ModelConfig(
    vocab_size=64, hidden_size=15, head_dim=4, layers=1, heads=4, kv_heads=2, intermediate_size=24, max_seq_len=8
)


@pytest.mark.parametrize(
    ("text", "devices", "layout"),
    [
        ("auto", 1, Layout()),
        ("auto", 4, Layout(replicate=4)),
        ("ddp", 4, Layout(replicate=4)),
        ("fsdp", 4, Layout(shard=4)),
        ("tp", 2, Layout(tensor=2)),
        ("fsdp:2,tp:2", 4, Layout(shard=2, tensor=2)),
        ("tp:2, fsdp", 8, Layout(shard=4, tensor=2)),
        ("ddp:2,fsdp:2,tp:2", 8, Layout(shard=2, tensor=2, replicate=2)),
    ],
)
def test_a_layout_is_read(text: str, devices: int, layout: Layout) -> None:
    assert Layout.parse(text, devices, fits=lambda layout: True) == layout


def test_auto_cuts_a_model_that_is_too_large_for_one_device() -> None:
    assert Layout.parse("auto", 4, fits=lambda layout: layout.parts > 1) == Layout(shard=4)


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("zero", "not understood at 'zero'"),
        ("fsdp:0", "not understood at 'fsdp:0'"),
        ("fsdp:", "not understood at 'fsdp:'"),
        ("fsdp:2,fsdp:2", "not understood at 'fsdp:2'"),
        ("fsdp,tp", "leaves the sizes of fsdp and tp open"),
        ("fsdp:2", "is for 2 ranks and there are 4 devices"),
        ("fsdp:3,tp", "is for 3 ranks and there are 4 devices"),
        ("auto,tp:2", "not understood at 'auto'"),
    ],
)
def test_a_layout_that_cannot_be_read_is_refused(text: str, error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        Layout.parse(text, 4, fits=lambda layout: True)


def test_what_is_written_can_be_read() -> None:
    layout = Layout(shard=3, tensor=2, replicate=2)
    assert Layout.parse(str(layout), 12, fits=lambda layout: True) == layout


@pytest.mark.parametrize(
    ("field", "changes", "seq_len"),
    [
        ("model.heads", {"heads": 3, "kv_heads": 1}, 8),
        ("model.kv_heads", {"kv_heads": 1}, 8),
        ("model.intermediate_size", {"intermediate_size": 25}, 8),
        ("model.vocab_size", {"vocab_size": 63}, 8),
        ("data.seq_len", {}, 7),
    ],
)
def test_tp_names_the_field_that_it_does_not_divide(field: str, changes: dict[str, int], seq_len: int) -> None:
    model = msgspec.structs.replace(MODEL, **changes)
    Layout(shard=2).check(model, "adamw", seq_len)
    with pytest.raises(ConfigError, match=f"{field} is .* tp:2 does not divide"):
        Layout(tensor=2).check(model, "adamw", seq_len)


@pytest.mark.parametrize("own", ["auto", "fp32", "bf16", "fp16", None])
@pytest.mark.parametrize("runs", ["auto", "fp32", "fp16"])
def test_a_peers_own_type_replaces_that_of_the_run_alone(own: ComputeType | None, runs: ComputeType) -> None:
    inner = InnerConfig(lr=1e-3, batch_size=4, total_steps=10, dtype=runs)
    applied = Compute(dtype=own).applied_to(inner)
    assert applied.dtype == (own or runs) and msgspec.structs.replace(applied, dtype=runs) == inner


@pytest.mark.parametrize("optimizer", ["lamb", "muon"])
@pytest.mark.parametrize("layout", [Layout(shard=2), Layout(tensor=2)])
def test_optimizers_that_cannot_be_cut_name_those_that_can(optimizer: str, layout: Layout) -> None:
    Layout(replicate=2).check(MODEL, optimizer, 8)
    with pytest.raises(ConfigError, match="use adamw, or the layout ddp"):
        layout.check(MODEL, optimizer, 8)


def test_beside_an_adapter_a_plain_base_alone_is_cut() -> None:
    """The adapter is whole at each rank, so its optimizer may be any."""
    adapted = msgspec.structs.replace(MODEL, adapter=AdapterConfig())
    plain, packed = StorageConfig(dtype="bf16"), StorageConfig(dtype="bf16", quantization="nf4")
    for optimizer in ("adamw", "adamw8bit", "muon"):
        Layout(shard=2, replicate=2).check(adapted, optimizer, 8, plain)
        Layout(replicate=2).check(adapted, optimizer, 8, packed)
    with pytest.raises(ConfigError, match=r"a base in nf4 is not cut, and fsdp:2 cuts it: use the layout ddp"):
        Layout(shard=2).check(adapted, "adamw", 8, packed)
    with pytest.raises(ConfigError, match="tp does not cut the base of an adapter: use fsdp or ddp"):
        Layout(tensor=2).check(adapted, "adamw", 8, plain)
    Layout(shard=2).check_stage()
    Layout(replicate=2).check_stage(is_adapted=True)
    with pytest.raises(ConfigError, match="fsdp does not cut the base of an adapter in a pipeline: use ddp"):
        Layout(shard=2).check_stage(is_adapted=True)


@pytest.mark.parametrize(
    ("text", "devices"),
    [
        ("0", ("cuda:0",)),
        ("0,1", ("cuda:0", "cuda:1")),
        ("cuda:1, cuda:0", ("cuda:1", "cuda:0")),
        ("cpu", ("cpu",)),
        ("cpu:3", ("cpu",) * 3),
    ],
)
def test_devices_are_read(text: str, devices: tuple[str, ...]) -> None:
    assert parse_devices(text) == devices


@pytest.mark.parametrize(
    "text", ["", "0,0", "0,cuda:0", "0,", "cpu:0", "cpu:", "cpu:65", "cpu:2,0", "-1", "mps", "9999"]
)
def test_devices_that_cannot_be_read_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="are not understood: name GPUs by their numbers"):
        parse_devices(text)
