"""An adapter as PEFT's two files, adapter_config.json and adapter_model.safetensors, and merged into its base."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from peer.config import TARGETS, AdapterConfig, ModelConfig
from peer.decoding import MALFORMED, decode_json, malformed
from peer.errors import CheckpointError, ResourceError
from peer.files import read_bounded, set_usual_mode
from peer.footprint.parameters import base_of, parameter_shapes
from peer.model.frozen_weights import FrozenWeights
from peer.model.layout import FlatLayout
from peer.model.parameter_names import shown
from peer.model.weight_files import check_header, unreadable

CONFIG: Final = "adapter_config.json"
WEIGHTS: Final = "adapter_model.safetensors"
_CONFIG_BYTES_MAX: Final = 1 << 20
_PREFIX: Final = "base_model.model."
_PLAIN: Final[dict[str, Any]] = {"peft_type": "LORA", "bias": "none"}
_UNSET: Final = (
    "use_dora", "use_rslora", "fan_in_fan_out", "modules_to_save", "rank_pattern", "alpha_pattern",
    "layers_to_transform", "layer_replication", "trainable_token_indices", "lora_bias", "exclude_modules",
    "target_parameters",
)  # fmt: skip
"""Settings of PEFT that change what is computed, and are not read here."""


class _Saved(msgspec.Struct):
    """The settings of an adapter_config.json that count here."""

    r: int
    lora_alpha: float
    target_modules: list[str] | str


def export_adapter(folder: Path, model: ModelConfig, flat: Tensor, base: str) -> None:
    """Write the adapter `flat` (P,) of a model, whose base has the name or path `base`, into `folder`, created if
    missing. The weights come first and whole: an interrupted export is no adapter. Raises ResourceError."""
    adapter = model.adapter
    assert adapter is not None
    settings = {
        **_PLAIN,
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": adapter.rank,
        "lora_alpha": adapter.alpha,
        "lora_dropout": adapter.dropout,
        "target_modules": list(adapter.targets),
        "inference_mode": True,
        "init_lora_weights": True,
    }
    weights = {_PREFIX + name: view.detach().clone() for name, view in FlatLayout.of(model).views(flat).items()}
    unfinished = folder / f"{WEIGHTS}.part"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / CONFIG).unlink(missing_ok=True)
        save_file(weights, unfinished, metadata={"format": "pt"})
        set_usual_mode(unfinished)
        os.replace(unfinished, folder / WEIGHTS)
        (folder / CONFIG).write_text(json.dumps(settings, indent=2) + "\n")
    except (OSError, SafetensorError) as error:
        raise ResourceError(f"cannot write the adapter to {folder} ({error}): free space or choose another") from error
    finally:
        with suppress(OSError):
            unfinished.unlink()


def remove_adapter(folder: Path) -> None:
    """Remove the files of an adapter, which a reader would take for a part of the model in the folder."""
    for name in (CONFIG, WEIGHTS):
        with suppress(OSError):
            (folder / name).unlink()


def load_adapter(folder: Path, base: ModelConfig) -> tuple[ModelConfig, Tensor]:
    """Return the base with the adapter of `folder` as its model, and the adapter as one flat fp32 vector (P,). Raises
    CheckpointError for files that do not fit the base or have what is not computed here."""
    model = msgspec.structs.replace(base, adapter=_read_config(folder / CONFIG))
    flat = torch.empty(FlatLayout.of(model).numel)
    views, path = FlatLayout.of(model).views(flat), folder / WEIGHTS
    try:
        check_header(path)
        with safe_open(path, framework="pt") as file:
            held = {name.removeprefix(_PREFIX): name for name in file.keys()}  # noqa: SIM118  not a dict
            for name, shape in parameter_shapes(model):
                if name not in held:
                    raise CheckpointError(f"{path} lacks {name}: it is an adapter of another base, or damaged")
                if tuple(file.get_slice(held[name]).get_shape()) != shape:
                    raise CheckpointError(f"{name} in {path} is not of shape {shape}: use the adapter's own base")
                views[name].copy_(file.get_tensor(held.pop(name)))
    except (OSError, SafetensorError) as error:
        raise unreadable(path, error) from error
    if held:
        raise CheckpointError(f"{path} holds {shown(min(held))}, which its {CONFIG} does not describe: export it again")
    if not bool(torch.isfinite(flat).all()):
        raise CheckpointError(f"{path} holds NaN or infinity: take an earlier adapter")
    return model, flat


def merged(model: ModelConfig, flat: Tensor, base: FrozenWeights, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return the parameters of a whole model by name, in `dtype`: the base's, each matrix with an adapter as
    W + alpha / rank B A, computed in fp32."""
    assert model.adapter is not None
    views, whole = FlatLayout.of(model).views(flat), dict[str, Tensor]()
    for name, _ in parameter_shapes(base_of(model)):
        layer, value = name.removesuffix(".weight"), base[name]
        matrix = value if isinstance(value, Tensor) else value.dense(torch.float32)
        if f"{layer}.lora_A.weight" in views:
            product = views[f"{layer}.lora_B.weight"] @ views[f"{layer}.lora_A.weight"]
            matrix = matrix.float() + product * model.adapter.scaling
        whole[name] = matrix.to(dtype)
    return whole


def _read_config(path: Path) -> AdapterConfig:
    content = b""
    try:
        content = read_bounded(path, _CONFIG_BYTES_MAX)
        raw, saved = decode_json(content, dict[str, Any]), decode_json(content, _Saved)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error.strerror}): give the folder of an adapter") from error
    except MALFORMED as error:
        raise CheckpointError(f"{path} {malformed(content, error)}") from error
    for name, value in _PLAIN.items():
        if raw.get(name, value) != value:
            raise CheckpointError(f"{path} sets {name} to {str(raw[name])[:40]!r}: take an adapter with {value!r}")
    for name in _UNSET:
        if raw.get(name):
            raise CheckpointError(f"{path} sets {name}, which is not computed here: take an adapter without")
    wanted = TARGETS if saved.target_modules == "all-linear" else tuple(saved.target_modules)
    unknown = sorted(set(wanted) - set(TARGETS))
    if unknown:
        raise CheckpointError(
            f"{path} has target_modules {shown(', '.join(unknown))}: take an adapter of {', '.join(TARGETS)}"
        )
    targets = tuple(name for name in TARGETS if name in wanted)
    try:
        return AdapterConfig(rank=saved.r, alpha=saved.lora_alpha, targets=targets)
    except ValueError as error:
        raise CheckpointError(f"{path}: {error}") from error
