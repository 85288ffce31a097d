"""Creation of a served model, and the type that it is served in."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from safetensors.torch import load_file, save_file

from peer.config import HiddenType
from peer.errors import CheckpointError, ConfigError
from peer.identity import Identity
from swarm.run.home import Home
from swarm.run.manifest import ServedModelManifest
from swarm.serving.create_model import CreatedModel, PreparedModel, prepare_model
from swarm.serving.peer import ServeConfig, _reopen_or_prepare
from tests.swarm.gateway.served_model import write_checkpoint
from tests.swarm.serving import both_readers

QUANTIZED: Final = ("gptq", "awq", "fp8", "compressed-tensors")
ROPES: Final = ("longrope", "su", "proportional")
FAMILIES: Final = ("gpt2", "mixtral", "gemma3", "phi3", "qwen3_moe", "deepseek_v3")
CONFIG: Final[dict[str, Any]] = {
    "model_type": "llama",
    "vocab_size": 300,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
}


def checkpoint(folder: Path, dtype: torch.dtype) -> Path:
    write_checkpoint(folder)
    path = folder / "model.safetensors"
    save_file({name: weight.to(dtype) for name, weight in load_file(path).items()}, path)
    return folder


def created(folder: Path, home: Path, dtype: HiddenType | None = None) -> ServedModelManifest:
    home.mkdir()
    prepared = prepare_model(folder, "m", is_open=True, dtype=dtype)
    return both_readers.created(prepared, home, Identity.generate()).manifest


def test_a_model_is_served_in_its_own_type_or_in_the_one_that_is_asked_for(tmp_path: Path) -> None:
    wide = checkpoint(tmp_path / "fp32", torch.float32)
    narrow = checkpoint(tmp_path / "bf16", torch.bfloat16)
    half = checkpoint(tmp_path / "fp16", torch.float16)
    own = [created(folder, tmp_path / f"own-{folder.name}") for folder in (wide, narrow, half)]
    assert [manifest.dtype for manifest in own] == ["fp32", "bf16", "fp32"]
    asked = created(wide, tmp_path / "asked-bf16", "bf16")
    assert asked.dtype == "bf16" and asked.checkpoint == own[1].checkpoint != own[0].checkpoint
    widened = created(narrow, tmp_path / "asked-fp32", "fp32")
    assert widened.dtype == "fp32" and widened.checkpoint not in (own[0].checkpoint, own[1].checkpoint)


def test_a_type_is_for_a_model_that_is_founded(tmp_path: Path) -> None:
    folder, home = checkpoint(tmp_path / "fp32", torch.float32), tmp_path / "home"
    identity = Identity.load_or_create(Home(home).path / "key")
    first = ServeConfig(home=home, folder=folder)
    prepared = _reopen_or_prepare(first, identity)
    assert isinstance(prepared, PreparedModel) and prepared.dtype == "fp32"
    made = both_readers.created(prepared, home, identity)
    again = _reopen_or_prepare(replace(first, dtype="fp32"), identity)
    assert isinstance(again, CreatedModel) and again.signed == made.signed
    with pytest.raises(ConfigError, match="serves its model in fp32: drop --dtype, or give another --home"):
        _reopen_or_prepare(replace(first, dtype="bf16"), identity)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        *(
            ({"quantization_config": {"quant_method": name, "bits": 4}}, rf"is quantized \({name}\)")
            for name in QUANTIZED
        ),
        ({"quantization_config": {"load_in_4bit": True}}, r"is quantized \(bitsandbytes, fp4\)"),
        *(
            ({"rope_parameters": {"rope_type": name, "factor": 4.0}}, f"asks for '{name}' rotary scaling")
            for name in ROPES
        ),
        ({"rope_parameters": None, "rope_scaling": {"type": "su", "factor": 2.0}}, "asks for 'su'"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor to 0.5"),
        *(({"model_type": name}, f"model_type is '{name}'") for name in FAMILIES),
    ],
    ids=str,
)
def test_what_the_engine_lacks_is_refused_by_name_before_anything_is_loaded(
    tmp_path: Path, changes: dict[str, object], words: str
) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**CONFIG, **changes}))  # and no weights at all
    with pytest.raises(ConfigError, match=words):
        created(folder, tmp_path / "home")


def test_parameters_of_another_type_are_refused_by_name_before_any_value_is_read(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "model", torch.float32)
    weights = load_file(folder / "model.safetensors")
    weights["model.embed_tokens.weight"][0] = torch.nan
    weights["model.layers.5.mlp.down_proj.weight"] = torch.zeros_like(
        weights["model.layers.5.mlp.down_proj.weight"]
    ).char()
    save_file(weights, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"has parameters of torch\.int8"):
        created(folder, tmp_path / "home")
