"""Checkpoints go in and out of transformers, the independent reference, with equal logits."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from peer.config import ModelConfig, RopeScaling
from peer.data.tokenizer import ByteTokenizer, load_tokenizer
from peer.errors import CheckpointError, ConfigError, ResourceError
from peer.model.decoder import Decoder, init_flat
from peer.model.huggingface import export_pretrained, flatten, load_pretrained
from peer.model.rotary import rotary_frequencies

TOLERANCE = 1e-4
SMALL = {
    "vocab_size": 300,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 16}
ROPES = [
    LLAMA3,
    {"rope_type": "linear", "rope_theta": 10000.0, "factor": 3.0},
    {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0},
    YARN,
    {**YARN, "beta_fast": 4.0, "beta_slow": 0.5, "attention_factor": 1.3, "truncate": False},
    {**YARN, "factor": 40.0, "mscale": 1.5, "mscale_all_dim": 0.7},
    {"rope_type": "yarn", "rope_theta": 50000.0, "factor": 2.0},
]


@pytest.fixture(scope="session")
def transformers() -> ModuleType:
    return pytest.importorskip("transformers")


def _tokens(vocab_size: int) -> torch.Tensor:
    return torch.randint(0, vocab_size, (2, 40), generator=torch.Generator().manual_seed(7))


def _ours(folder: Path) -> Decoder:
    config, tensors = load_pretrained(folder)
    return Decoder(config, flatten(config, tensors))


@pytest.mark.parametrize(
    ("family", "extra"),
    [
        ("Llama", {}),
        ("Llama", {"tie_word_embeddings": True, "head_dim": 16}),
        *(("Llama", {"rope_parameters": rope}) for rope in ROPES),
        ("Llama", {"attention_bias": True}),
        ("Mistral", {"attention_bias": True}),
        ("Mistral", {"sliding_window": 50}),
        ("Qwen2", {}),
        ("Qwen3", {"head_dim": 20}),
        ("Qwen3", {"attention_bias": True}),
    ],
)
def test_a_random_checkpoint_of_transformers_computes_the_same_here(
    transformers: ModuleType, tmp_path: Path, family: str, extra: dict[str, Any]
) -> None:
    torch.manual_seed(1)
    config = getattr(transformers, f"{family}Config")(**{**SMALL, **extra})
    theirs = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    with torch.no_grad():
        for parameter in theirs.parameters():  # gains of one and biases of zero would hide a mistake
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    theirs.save_pretrained(tmp_path, max_shard_size="40KB" if family == "Llama" else "1GB")
    assert (tmp_path / "model.safetensors.index.json").exists() == (family == "Llama")

    ours, tokens = _ours(tmp_path), _tokens(SMALL["vocab_size"])
    with torch.no_grad():
        difference = (ours(tokens) - theirs(tokens).logits).abs().max()
    assert difference < TOLERANCE
    assert ours.config.max_seq_len == (50 if "sliding_window" in extra else 64)


@pytest.mark.parametrize(
    "extra",
    [
        {},
        {"tie_embeddings": False, "norm_eps": 1e-3, "rope_theta": 5000.0},
        {"qk_norm": True, "head_dim": 16},
        {"attention_bias": True},
        {"attention_bias": True, "output_bias": True},
        {"attention_bias": True, "output_bias": True, "qk_norm": True},
        {"rope_scaling": RopeScaling(factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_seq_len=16)},
        {"rope_scaling": RopeScaling(kind="linear", factor=3.0)},
        {"rope_scaling": RopeScaling(kind="dynamic", factor=2.0, original_max_seq_len=80)},
        {"rope_scaling": RopeScaling(kind="yarn", factor=4.0, original_max_seq_len=16)},
        {"rope_scaling": RopeScaling(kind="yarn", factor=4.0, original_max_seq_len=16, beta_fast=9.0, truncate=False)},
        {"rope_scaling": RopeScaling(kind="yarn", factor=4.0, original_max_seq_len=16, attention_factor=0.8)},
    ],
    ids=lambda extra: "-".join(extra) or "plain",
)
def test_an_export_computes_the_same_in_transformers(
    transformers: ModuleType, tmp_path: Path, extra: dict[str, Any]
) -> None:
    config = ModelConfig(hidden_size=48, layers=2, heads=4, kv_heads=2, intermediate_size=80, max_seq_len=64, **extra)
    flat = init_flat(config, seed=3)
    flat += 0.05 * torch.randn(flat.shape, generator=torch.Generator().manual_seed(0))
    export_pretrained(tmp_path, config, flat, ByteTokenizer())

    theirs, info = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    tokens = _tokens(256)
    with torch.no_grad():
        difference = (Decoder(config, flat)(tokens) - theirs.eval()(tokens).logits).abs().max()
    assert difference < TOLERANCE
    again, tensors = load_pretrained(tmp_path)
    assert torch.equal(flatten(again, tensors), flat)


@pytest.mark.parametrize("own_head", [False, True], ids=["a copy", "a head of its own"])
def test_a_head_beside_a_tied_embedding_counts_by_its_values(
    transformers: ModuleType, tmp_path: Path, own_head: bool
) -> None:
    """As in transformers 5: config.json says tied, and the file holds a head."""
    theirs = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL, tie_word_embeddings=True)).eval()
    theirs.save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    embedding = weights["model.embed_tokens.weight"]
    weights["lm_head.weight"] = (torch.randn_like(embedding) if own_head else embedding).clone()
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})

    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    ours, tokens = _ours(tmp_path), _tokens(SMALL["vocab_size"])
    assert ours.config.tie_embeddings is not own_head
    with torch.no_grad():
        assert (ours(tokens) - theirs(tokens).logits).abs().max() < TOLERANCE


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("model.layers.0.mlp.up_proj.weight", lambda x: x.index_fill(0, torch.tensor([3]), torch.nan), "NaN"),
        ("model.norm.weight", lambda x: x * torch.inf, "infinity"),
        ("model.norm.weight", lambda x: x.double() * 1e300, "infinity"),
        ("lm_head.weight", lambda x: torch.zeros(3, 3), "has shape"),
        ("model.layers.0.self_attn.rotary_emb.inv_freq", lambda x: 5000.0 ** -(torch.arange(4) / 4), "another base"),
        ("model.layers.0.self_attn.rotary_emb.inv_freq", lambda x: torch.ones(3), "has shape"),
    ],
)
def test_values_that_cannot_be_right_are_refused_by_name(
    tmp_path: Path, name: str, change: Callable[[torch.Tensor], torch.Tensor], words: str
) -> None:
    weights = load_file(_exported(tmp_path) / "model.safetensors")
    weights[name] = change(weights.get(name, torch.ones(1)))
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=f"{name} .*{words}"):
        load_pretrained(tmp_path)


def test_the_rotary_table_of_old_exports_is_accepted(tmp_path: Path) -> None:
    weights = load_file(_exported(tmp_path) / "model.safetensors")
    config, tensors = load_pretrained(tmp_path)
    weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = rotary_frequencies(config).bfloat16()
    save_file(weights, tmp_path / "model.safetensors")
    again, same = load_pretrained(tmp_path)
    assert again == config and same.keys() == tensors.keys()


def test_the_byte_tokenizer_is_exported_with_equal_ids(transformers: ModuleType, tmp_path: Path) -> None:
    ByteTokenizer().save(tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    text = "def f(x):\n\treturn 'naïve \N{SNOWMAN}' \x00 \x7f  # €"
    ids = theirs(text, add_special_tokens=False)["input_ids"]
    assert ids == list(text.encode()) == load_tokenizer(str(tmp_path)).encode(text)
    assert theirs.decode(ids, clean_up_tokenization_spaces=False) == text


def _exported(folder: Path) -> Path:
    config = ModelConfig(hidden_size=16, layers=1, heads=2, kv_heads=2, intermediate_size=32, max_seq_len=16)
    export_pretrained(folder, config, init_flat(config, seed=0), ByteTokenizer())
    return folder


def _edit(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"model_type": "gpt2"}, ConfigError, "model_type"),
        ({"mlp_bias": True}, ConfigError, "mlp_bias"),
        ({"rope_parameters": {"rope_type": "longrope"}}, ConfigError, "longrope.*llama3, linear, dynamic, yarn"),
        ({"rope_parameters": {"rope_type": "linear"}}, ConfigError, "lacks the factor of linear"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 0.5}}, ConfigError, "factor is 0.5"),
        ({"rope_parameters": {"rope_type": "yarn", "original_max_position_embeddings": 0}}, ConfigError, "at least 1"),
        ({"rope_parameters": {**YARN, "rope_theta": 1.0}}, ConfigError, "rope_theta is 1.0"),
        ({"rope_parameters": {**YARN, "mscale": -25.0, "mscale_all_dim": -7.2}}, ConfigError, "mscale is -25"),
        ({"rope_parameters": {**YARN, "attention_factor": 1e9}}, ConfigError, "attention_factor is"),
        ({"rope_parameters": {**YARN, "beta_fast": 0.5}}, ConfigError, "beta_fast is 0.5"),
        ({"hidden_size": 15}, ConfigError, "divide"),
        ({"hidden_size": 32}, CheckpointError, "shape"),
        ({"num_hidden_layers": 2}, CheckpointError, "lacks"),
        ({"tie_word_embeddings": False}, CheckpointError, "lacks lm_head"),
    ],
)
def test_an_unsupported_config_is_refused(
    tmp_path: Path, changes: dict[str, Any], error: type[Exception], words: str
) -> None:
    _exported(tmp_path)
    if "hidden_size" in changes:
        changes["head_dim"] = None
    _edit(tmp_path, **changes)
    with pytest.raises(error, match=words):
        load_pretrained(tmp_path)


def test_pickled_torn_and_escaping_checkpoints_are_refused(tmp_path: Path) -> None:
    weights = _exported(tmp_path) / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-10])
    with pytest.raises(CheckpointError, match="download it again"):
        load_pretrained(tmp_path)
    weights.rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="convert them to safetensors"):
        load_pretrained(tmp_path)
    index = {"weight_map": {"model.norm.weight": "../../etc/passwd"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="outside its folder"):
        load_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match=r"config\.json"):
        load_pretrained(tmp_path / "missing")


def test_an_unwritable_export_folder_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ResourceError, match="choose another"):
        _exported(tmp_path / "file" / "folder")
