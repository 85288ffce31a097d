"""Quantized matrices against bitsandbytes' own linear layers, and checkpoints that it has saved."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from peer.config import ModelConfig, Quantization
from peer.errors import CheckpointError, ConfigError
from peer.footprint.stored import stored_bytes, stored_tensors
from peer.inference.blocks import SpanBlocks
from peer.inference.engine import Engine
from peer.ipc.sampling_options import Sampling
from peer.ipc.span import Span
from peer.model.hub_config import read_served_config, saved_quantization
from peer.model.matrices import Int8Matrix, Matrix, load_matrix
from peer.model.parameter_files import ParameterFiles
from peer.model.quantize import quantized, stored_values
from tests.peer.devices import DEVICES
from tests.peer.inference.quantized_reference import quantized_copy, save_quantized
from tests.swarm.serving.serving_swarm import LAYERS, reference_model

BOTH: list[Quantization] = ["int8", "nf4"]
ALL = range(LAYERS)
NF4 = [
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
]  # fmt: skip


def saved(folder: Path, model: Any = None) -> tuple[Path, ModelConfig]:
    """Write the reference model, or another, and return its shape too."""
    (model or reference_model()).save_pretrained(folder)
    config, _ = read_served_config((folder / "config.json").read_bytes())
    return folder, config


def tensors(folder: Path, config: ModelConfig, quantization: Quantization) -> dict[str, torch.Tensor]:
    files = ParameterFiles([folder])
    return {stored.name: value for stored, value in stored_values(files, config, ALL, "fp32", quantization)}


def logits(config: ModelConfig, stored: dict[str, torch.Tensor], quantization: Quantization) -> torch.Tensor:
    """Return those behind a prompt and behind a further token, as the engine computes them."""
    cpu = torch.device("cpu")
    blocks = SpanBlocks(config, Span.whole(LAYERS), stored.__getitem__, cpu, quantization=quantization)
    engine, found = Engine(blocks, 64, 64, 64), []
    engine.keeps_logits = True
    engine.open(1, Sampling())
    for position, ids in ((0, list(range(5, 45))), (40, [7])):
        engine.submit(1, position, ids, None, samples=True)
        (said,) = engine.step()
        assert said.logits is not None
        found.append(said.logits)
    return torch.stack(found)


def expected(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.tensor([[*range(5, 45), 7]])).logits[0, -2:]


@pytest.mark.parametrize("quantization", BOTH)
def test_logits_are_those_of_bitsandbytes_and_near_those_in_fp32(tmp_path: Path, quantization: Quantization) -> None:
    folder, config = saved(tmp_path)
    said = logits(config, tensors(folder, config, quantization), quantization)
    theirs = expected(quantized_copy(reference_model(), quantization))
    plain = expected(reference_model())
    limit = {"int8": 0.02, "nf4": 1e-5}[quantization]  # an input to int8 may be rounded up here and down there
    assert float((said - theirs).norm() / theirs.norm()) < limit
    assert 1e-3 < float((said - plain).norm() / plain.norm()) < {"int8": 0.03, "nf4": 0.2}[quantization]


@pytest.mark.parametrize(("quantization", "nested"), [("int8", False), ("nf4", False), ("nf4", True)])
def test_a_checkpoint_that_bitsandbytes_saved_is_read_as_it_is(
    tmp_path: Path, quantization: Quantization, nested: bool
) -> None:
    folder, config = saved(tmp_path)
    theirs = quantized_copy(reference_model(), quantization, nested)
    own = tensors(folder, config, quantization)
    save_quantized(theirs, folder, quantization)
    assert saved_quantization((folder / "config.json").read_bytes()) == quantization
    found = tensors(folder, config, quantization)
    codes = [name for name in found if found[name].dtype != torch.float32]
    assert codes and all(torch.equal(found[name], own[name]) for name in codes)
    said, wanted = logits(config, found, quantization), expected(theirs)
    assert float((said - wanted).norm() / wanted.norm()) < {"int8": 0.02, "nf4": 1e-5}[quantization]
    assert nested == any(not torch.equal(found[name], own[name]) for name in found)


@pytest.mark.parametrize("quantization", BOTH)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_does_not_depend_on_the_others_of_a_step(quantization: Quantization, dtype: torch.dtype) -> None:
    """LLM.int8() with outliers would: a column with one is computed in fp16 for all rows."""
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(8, 128, generator=draw).to(dtype)
    x[3, 5] = 60.0
    matrix = matrix_of(torch.randn(96, 128, generator=draw), quantization)
    together = matrix.times(x, torch.ones(8, 96, dtype=dtype))
    alone = torch.cat([matrix.times(x[i : i + 1], torch.ones(1, 96, dtype=dtype)) for i in range(8)])
    assert together.dtype == dtype
    if quantization == "int8":
        assert torch.equal(together, alone)
    else:
        torch.testing.assert_close(together, alone)


def matrix_of(weight: torch.Tensor, quantization: Quantization) -> Matrix:
    codes, scales = quantized(weight, quantization)
    names = {"int8": "a.SCB", "nf4": "a.weight.absmax"}
    return load_matrix({"a.weight": codes, names[quantization]: scales}.__getitem__, ["a.weight"], 128, quantization)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("quantization", BOTH)
def test_codes_and_what_they_decode_to_have_the_same_bits_on_each_device(
    device: str, quantization: Quantization
) -> None:
    """nf4 against the table of QLoRA's appendix; int8 by an input of one value, whose product is the code itself."""
    weight = torch.randn(64, 128, generator=torch.Generator().manual_seed(2)).bfloat16().float()
    codes, scales = quantized(weight, quantization)
    there, scales_there = quantized(weight.to(device), quantization)
    assert torch.equal(there.cpu(), codes) and torch.equal(scales_there.cpu(), scales)
    if quantization == "nf4":
        bitsandbytes = importlib.import_module("bitsandbytes").functional
        state = bitsandbytes.QuantState(
            absmax=scales_there, shape=weight.shape, dtype=torch.float32, blocksize=64, quant_type="nf4"
        )
        decoded = bitsandbytes.dequantize_4bit(there, state).cpu()
        pairs = torch.stack([codes.flatten() >> 4, codes.flatten() & 15], dim=1).flatten().long()
        table = torch.tensor(NF4, dtype=torch.float32)
        assert torch.equal(decoded, (table[pairs].view(-1, 64) * scales[:, None]).view(weight.shape))
    else:
        one = torch.zeros(1, 128, dtype=torch.bfloat16, device=device)
        one[0, 3] = 1.0
        said = Int8Matrix(there, scales_there).times(one)[0].cpu()
        wanted = (127 * codes[:, 3].float() * scales * 6.200124e-05).bfloat16()
        torch.testing.assert_close(said, wanted, atol=0, rtol=2**-8)


@pytest.mark.parametrize("quantization", BOTH)
def test_rows_and_inputs_of_zeros_give_zeros(quantization: Quantization) -> None:
    weight = torch.randn(64, 128, generator=torch.Generator().manual_seed(1))
    weight[7] = 0
    matrix, x = matrix_of(weight, quantization), torch.ones(2, 128)
    x[1] = 0
    said = matrix.times(x)
    assert bool(said[0, 7] == 0) and bool((said[1] == 0).all()) and bool((said[0, :7] != 0).all())


def test_sizes_are_those_of_what_is_stored(tmp_path: Path) -> None:
    folder, config = saved(tmp_path)
    plain = stored_bytes(config, None, "bf16", None)
    for quantization in BOTH:
        found = tensors(folder, config, quantization)
        described = {stored.name: stored for stored in stored_tensors(config, ALL, "fp32", quantization)}
        assert {name: stored.size_bytes for name, stored in described.items()} == {
            name: value.nbytes for name, value in found.items()
        }
        assert stored_bytes(config, None, "bf16", quantization) < plain
    large = ModelConfig(
        vocab_size=128256, hidden_size=4096, layers=32, heads=32, kv_heads=8, intermediate_size=14336,
        max_seq_len=8192, tie_embeddings=False,
    )  # fmt: skip
    whole, ends = stored_bytes(large, None, "bf16", "nf4"), 2 * 2 * 128256 * 4096
    assert 3.8e9 < whole - ends < 4.0e9  # Llama 3.1 8B in nf4, beside embedding and head


def test_what_does_not_fit_is_refused_by_name(tmp_path: Path) -> None:
    folder, config = saved(tmp_path)
    odd = ModelConfig(
        vocab_size=8, hidden_size=36, layers=1, heads=2, kv_heads=2, intermediate_size=37, max_seq_len=8
    )  # fmt: skip
    with pytest.raises(ConfigError, match=r"nf4 has blocks of 64 values, and .*q_proj.*: serve this model in int8"):
        stored_bytes(odd, None, "fp32", "nf4")
    save_quantized(quantized_copy(reference_model(), "nf4"), folder, "nf4")
    path = folder / "model.safetensors"
    whole = load_file(path)
    name = "model.layers.3.mlp.up_proj.weight"
    damages: list[tuple[str, torch.Tensor, str]] = [
        (f"{name}.absmax", torch.ones(3), r"up_proj\.weight\.absmax has shape \(3,\)"),
        (f"{name}.absmax", whole[f"{name}.absmax"] * torch.nan, r"absmax holds NaN"),
        (name, whole[name][:-1], r"up_proj\.weight has shape"),
        (name, torch.zeros(4, dtype=torch.int8), r"is of the type int8, which is not nf4"),
        (f"{name}.quant_state.bitsandbytes__nf4", torch.zeros(9, dtype=torch.uint8), "quant_state.* is malformed"),
        (
            f"{name}.quant_state.bitsandbytes__nf4",
            torch.tensor(list(b'{"quant_type":"fp4","blocksize":64,"shape":[96,64]}'), dtype=torch.uint8),
            "quantized as fp4 in blocks of 64",
        ),
        ("model.norm.weight", torch.ones(64, dtype=torch.int8), "only matrices inside of blocks may be quantized"),
    ]
    for changed, value, words in damages:
        save_file({**whole, changed: value}, path)
        with pytest.raises(CheckpointError, match=words):
            tensors(folder, config, "nf4")
    save_file({held: value for held, value in whole.items() if ".quant_state." not in held}, path)
    with pytest.raises(CheckpointError, match="has no quant_state"):
        tensors(folder, config, "nf4")
