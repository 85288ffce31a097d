"""Hugging Face checkpoints of the Llama family, in and out: config.json, safetensors, tokenizer.

Reads Llama, Mistral, Qwen2 and Qwen3, whole or sharded. Writes files that `transformers.AutoModelForCausalLM` loads.
Only safetensors are read: a pickled `pytorch_model.bin` is never opened.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from peer.config import ModelConfig, RopeScaling
from peer.data.tokenizer import Tokenizer
from peer.errors import CheckpointError, ConfigError, ResourceError
from peer.model.layout import FlatLayout

_FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
_WEIGHTS = "model.safetensors"
_INDEX = "model.safetensors.index.json"


def load_pretrained(folder: Path) -> tuple[ModelConfig, dict[str, Tensor]]:
    """Return the model's shape and its parameters by canonical name, in the checkpoint's dtype; `flatten` packs them.

    Raises ConfigError for a model outside the family, CheckpointError for missing or unfit files.
    """
    config = model_config(_read_json(folder / "config.json"))
    tensors: dict[str, Tensor] = {}
    for path in _shards(folder):
        try:
            with safe_open(path, framework="pt") as file:
                tensors.update({name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118  not a dict
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{path} cannot be read ({error}): download it again") from error
    wanted = FlatLayout.of(config).slots
    # Old exports carry the rotary table, and some a copy of a tied head: both follow from the rest.
    surplus = [name for name in tensors if name not in wanted]
    for name in surplus:
        if not (name.endswith("rotary_emb.inv_freq") or (name == "lm_head.weight" and config.tie_embeddings)):
            raise CheckpointError(
                f"{folder} holds {name}, which its config.json does not describe: use the config.json of these weights"
            )
        del tensors[name]
    for name, slot in wanted.items():
        if name not in tensors:
            raise CheckpointError(f"{folder} lacks {name}: download it again, all shards included")
        if tuple(tensors[name].shape) != slot.shape:
            shape = tuple(tensors[name].shape)
            raise CheckpointError(
                f"{name} in {folder} has shape {shape}, not {slot.shape}: use the matching config.json"
            )
    return config, tensors


def flatten(config: ModelConfig, tensors: Mapping[str, Tensor], out: Tensor | None = None) -> Tensor:
    """Pack parameters by canonical name into one flat fp32 vector."""
    layout = FlatLayout.of(config)
    flat = torch.empty(layout.numel) if out is None else out
    for name, view in layout.views(flat).items():
        view.copy_(tensors[name])
    return flat


def export_pretrained(folder: Path, config: ModelConfig, flat: Tensor, tokenizer: Tokenizer) -> None:
    """Write config.json, model.safetensors (fp32) and the tokenizer into `folder`, which is created if it is missing.

    The weights are renamed into place when complete, and config.json comes last: an interrupted export is no
    checkpoint. Raises ResourceError if the disk is full or read-only.
    """
    weights = _unshared(config, {name: view.detach() for name, view in FlatLayout.of(config).views(flat).items()})
    partial = folder / (_WEIGHTS + ".part")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tokenizer.save(folder)
        save_file(weights, partial, metadata={"format": "pt"})
        os.replace(partial, folder / _WEIGHTS)
        (folder / "config.json").write_text(json.dumps(hub_config(config), indent=2) + "\n")
    except BaseException as error:  # Ctrl-C as well
        with suppress(OSError):
            partial.unlink()
        if not isinstance(error, OSError | SafetensorError):
            raise
        raise ResourceError(
            f"cannot write the checkpoint to {folder} ({error}): free space or choose another"
        ) from error


def _unshared(config: ModelConfig, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Copy shared parameters to every block: Hugging Face's families cannot express sharing."""
    for index in range(config.layers):
        at, own = (f"model.layers.{k}." for k in (index - index % config.shared_blocks, index))
        if at != own:
            shared = {name: value for name, value in weights.items() if name.startswith(at)}
            weights.update({own + name.removeprefix(at): value.clone() for name, value in shared.items()})
    return weights


def model_config(raw: Mapping[str, Any]) -> ModelConfig:
    """Return the ModelConfig of a Hugging Face config.json, of transformers 4 or 5. Raises ConfigError for a setting
    that this decoder would compute differently."""
    family = raw.get("model_type")
    if family not in _FAMILIES:
        raise ConfigError(f"model_type is {family!r}: choose a model of {', '.join(_FAMILIES)}")
    for key, plain in (
        ("attention_bias", False),
        ("mlp_bias", False),
        ("hidden_act", "silu"),
        ("quantization_config", None),
    ):
        if raw.get(key, plain) != plain:
            raise ConfigError(f"config.json sets {key} to {raw[key]!r}: choose a model with {plain!r}")
    rope = {**(raw.get("rope_scaling") or {}), **(raw.get("rope_parameters") or {})}
    try:
        max_seq_len = raw["max_position_embeddings"]
        window = raw.get("sliding_window")
        if window is not None and (family == "mistral" or raw.get("use_sliding_window")):
            max_seq_len = min(max_seq_len, window)  # within the window, sliding and full attention are equal
        return ModelConfig(
            vocab_size=raw["vocab_size"],
            hidden_size=raw["hidden_size"],
            layers=raw["num_hidden_layers"],
            heads=raw["num_attention_heads"],
            kv_heads=raw.get("num_key_value_heads") or raw["num_attention_heads"],
            intermediate_size=raw["intermediate_size"],
            max_seq_len=max_seq_len,
            head_dim=raw.get("head_dim"),
            rope_theta=float(rope.get("rope_theta") or raw.get("rope_theta") or 10000.0),
            rope_scaling=_rope_scaling(rope),
            norm_eps=raw["rms_norm_eps"],
            qk_norm=family == "qwen3",
            attention_bias=family == "qwen2",
            tie_embeddings=raw.get("tie_word_embeddings", False),
        )
    except KeyError as error:
        raise ConfigError(f"config.json lacks {error.args[0]!r}: download it again") from error
    except (TypeError, ValueError) as error:
        raise ConfigError(f"config.json does not describe a supported model ({error}): choose another model") from error


def hub_config(config: ModelConfig) -> dict[str, Any]:
    """Return a config.json for transformers 4 and 5: the rotary settings stand under both versions' names."""
    family = "qwen3" if config.qk_norm else "qwen2" if config.attention_bias else "llama"
    rope: dict[str, Any] = {"rope_type": "default"}
    if config.rope_scaling is not None:
        scaling = config.rope_scaling
        rope = {
            "rope_type": "llama3",
            "factor": scaling.factor,
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
            "original_max_position_embeddings": scaling.original_max_seq_len,
        }
    return {
        "architectures": [{"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3"}[family] + "ForCausalLM"],
        "model_type": family,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_size,
        "max_position_embeddings": config.max_seq_len,
        "rope_theta": config.rope_theta,
        "rope_scaling": None if config.rope_scaling is None else rope,
        "rope_parameters": {"rope_theta": config.rope_theta, **rope},
        "rms_norm_eps": config.norm_eps,
        "hidden_act": "silu",
        "tie_word_embeddings": config.tie_embeddings,
        "bos_token_id": None,
        "eos_token_id": None,
        "torch_dtype": "float32",
    }


def _rope_scaling(rope: Mapping[str, Any]) -> RopeScaling | None:
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "default":
        return None
    if kind != "llama3":
        raise ConfigError(f"config.json asks for {kind!r} rotary scaling: choose a model with llama3's, or without")
    return RopeScaling(
        factor=rope["factor"],
        low_freq_factor=rope["low_freq_factor"],
        high_freq_factor=rope["high_freq_factor"],
        original_max_seq_len=rope["original_max_position_embeddings"],
    )


def _shards(folder: Path) -> list[Path]:
    """Return the checkpoint's safetensors files: the single one, or those in the index."""
    if (folder / _WEIGHTS).is_file():
        return [folder / _WEIGHTS]
    if not (folder / _INDEX).is_file():
        raise CheckpointError(f"{folder} has no {_WEIGHTS}: convert the checkpoint to safetensors first")
    names = sorted(set(_read_json(folder / _INDEX).get("weight_map", {}).values()))
    if any(Path(name).name != name for name in names):
        raise CheckpointError(f"{folder / _INDEX} names files outside its folder: do not use this checkpoint")
    return [folder / name for name in names]


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text())
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error.strerror}): give the folder of a checkpoint") from error
    except ValueError as error:
        raise CheckpointError(f"{path} is not JSON ({error}): download it again") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} is not a JSON object: download it again")
    return content
