"""Hugging Face checkpoints of the Llama family, in and out: config.json, safetensors, tokenizer.

Reads Llama, Mistral, Qwen2 and Qwen3, whole or sharded. Writes files that `transformers.AutoModelForCausalLM` loads.
Only safetensors are read: a pickled `pytorch_model.bin` is never opened.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Final

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from peer.config import ModelConfig, WeightType
from peer.data.tokenizer import Tokenizer
from peer.errors import CheckpointError, ConfigError, ResourceError
from peer.files import read_bounded, set_usual_mode
from peer.footprint.parameters import EMBEDDING, HEAD, parameter_shapes
from peer.model.hub_config import CONFIG_BYTES_MAX, hub_config, read_hub_config
from peer.model.layout import FlatLayout
from peer.model.parameter_files import check_finite
from peer.model.parameter_names import canonical_names, shown
from peer.model.rotary import rotary_frequencies
from peer.model.text.rules import TextRules, special_ids, write_text_rules
from peer.model.weight_files import (
    INDEX,
    WEIGHTS,
    check_count,
    check_header,
    held_twice,
    missing_parameter,
    unreadable,
    weight_files,
)

_DTYPES: Final = ("F32", "BF16", "F16", "F64")
_ROTARY: Final = "rotary_emb.inv_freq"
_ROTARY_TOLERANCE: Final = 0.02  # bf16 rounds by 0.004; another base is another model

WEIGHT_TYPES: Final[Mapping[WeightType, torch.dtype]] = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}
NO_RULES: Final = TextRules()


def load_pretrained(folder: Path) -> tuple[ModelConfig, dict[str, Tensor]]:
    """Return the model's shape and its parameters by canonical name, in the checkpoint's dtype; `flatten` packs them.

    The headers of all files are compared with config.json before any parameter is read. A head that config.json calls
    tied is one of its own where it differs from the embedding, as in transformers 5. Raises ConfigError for a model
    outside the family, CheckpointError for missing or unfit files and for values that are not finite.
    """
    config = read_hub_config(_read(folder, "config.json", CONFIG_BYTES_MAX))
    for name in (WEIGHTS, INDEX):
        _inside(folder, name)
    shards = [_inside(folder, path.name) for path in weight_files(folder)]
    held = _headers(folder, shards)
    _check_held(folder, config, held)
    tensors: dict[str, Tensor] = {}
    for path in shards:
        with _opened(path) as file:
            for name in (name for name in held if held[name].path == path):
                tensors[name] = file.get_tensor(held[name].name)
                check_finite(folder, name, tensors[name])
    for name in [name for name in tensors if name.endswith(_ROTARY)]:
        _check_rotary(folder, name, tensors.pop(name), config)
    if config.tie_embeddings and HEAD in tensors:
        if not torch.equal(tensors[HEAD], tensors[EMBEDDING]):
            return msgspec.structs.replace(config, tie_embeddings=False), tensors
        del tensors[HEAD]
    return config, tensors


def flatten(config: ModelConfig, tensors: Mapping[str, Tensor], out: Tensor | None = None) -> Tensor:
    """Pack parameters by canonical name into one flat fp32 vector."""
    layout = FlatLayout.of(config)
    flat = torch.empty(layout.numel) if out is None else out
    for name, view in layout.views(flat).items():
        view.copy_(tensors[name])
    return flat


def weight_type(tensors: Mapping[str, Tensor]) -> WeightType:
    """Return the type of a checkpoint's parameters, "fp32" if they are of several or of another."""
    kinds = {tensor.dtype for tensor in tensors.values()}
    return next((name for name, kind in WEIGHT_TYPES.items() if kinds == {kind}), "fp32")


def export_pretrained(
    folder: Path,
    config: ModelConfig,
    flat: Tensor,
    tokenizer: Tokenizer,
    text: TextRules = NO_RULES,
    dtype: WeightType = "fp32",
) -> None:
    """Write a model of `flat` (P,) as `export_weights` does."""
    weights = {name: view.detach().to(WEIGHT_TYPES[dtype]) for name, view in FlatLayout.of(config).views(flat).items()}
    export_weights(folder, config, weights, tokenizer, text, dtype)


def export_weights(
    folder: Path,
    config: ModelConfig,
    weights: dict[str, Tensor],
    tokenizer: Tokenizer,
    text: TextRules = NO_RULES,
    dtype: WeightType = "fp32",
) -> None:
    """Write config.json, model.safetensors, the tokenizer and what `text` says into `folder`, created if missing. The
    `weights` are parameters by name, in `dtype`.

    The weights are renamed into place when complete, and config.json comes last: an interrupted export is no
    checkpoint. Weights of another checkpoint in `folder` are removed before. Raises ResourceError if the disk is full
    or read-only, and ConfigError if a weight is beyond what `dtype` can hold.
    """
    if dtype == "fp16" and not all(bool(torch.isfinite(tensor).all()) for tensor in weights.values()):
        raise ConfigError("a weight is beyond what fp16 can hold: export with --dtype bf16")
    weights = _unshared(config, weights)
    partial = folder / (WEIGHTS + ".part")
    hub = hub_config(config) | special_ids(text) | {"torch_dtype": str(WEIGHT_TYPES[dtype]).removeprefix("torch.")}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        save_file(weights, partial, metadata={"format": "pt"})
        set_usual_mode(partial)  # the library makes its files private
        remove_weights(folder)
        tokenizer.save(folder)
        write_text_rules(folder, text)
        os.replace(partial, folder / WEIGHTS)
        (folder / "config.json").write_text(json.dumps(hub, indent=2) + "\n")
    except BaseException as error:  # Ctrl-C as well
        with suppress(OSError):
            partial.unlink()
        if not isinstance(error, OSError | SafetensorError):
            raise
        raise ResourceError(
            f"cannot write the checkpoint to {folder} ({error}): free space or choose another"
        ) from error


def remove_weights(folder: Path, but: str = "") -> None:
    """Remove the weights of a checkpoint in the folder, except the file `but`, and what describes them. Raises
    OSError."""
    for old in [*folder.glob("*.safetensors"), folder / INDEX, folder / "config.json"]:
        if old.name != but:
            old.unlink(missing_ok=True)


def _unshared(config: ModelConfig, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Copy shared parameters to every block: Hugging Face's families cannot express sharing."""
    for index in range(config.layers):
        at, own = (f"model.layers.{k}." for k in (index - index % config.shared_blocks, index))
        if at != own:
            shared = {name: value for name, value in weights.items() if name.startswith(at)}
            weights.update({own + name.removeprefix(at): value.clone() for name, value in shared.items()})
    return weights


@dataclass(frozen=True)
class _Held:
    """A parameter as a file's header describes it."""

    path: Path
    name: str
    shape: tuple[int, ...]
    dtype: str


def _headers(folder: Path, shards: Sequence[Path]) -> dict[str, _Held]:
    """Read what the files hold by canonical name, but none of their values."""
    held: dict[str, _Held] = {}
    for path in shards:
        with _opened(path) as file:
            for name in file.keys():  # noqa: SIM118  not a dict
                if name in held:
                    raise held_twice(path, name, held[name].path)
                tensor = file.get_slice(name)
                held[name] = _Held(path, name, tuple(tensor.get_shape()), tensor.get_dtype())
            check_count(path, len(held))
    return {canonical: held[name] for canonical, name in canonical_names(folder, held).items()}


def _check_held(folder: Path, config: ModelConfig, held: dict[str, _Held]) -> None:
    """Check that the files hold the model's parameters, and no others but what must agree with these: the rotary table
    of old exports, and a head beside a tied embedding."""
    surplus = set(held)
    more: dict[str, tuple[int, ...]] = {
        name: (config.head_size // 2,) for name in sorted(surplus) if name.endswith(_ROTARY)
    }
    if HEAD in held and config.tie_embeddings:
        more[HEAD] = (config.vocab_size, config.hidden_size)
    # ends at the first that is missing, however many are described
    for name, shape in chain(parameter_shapes(config), more.items()):
        if name not in held:
            raise missing_parameter(folder, name, held)
        if held[name].shape != shape:
            raise CheckpointError(
                f"{name} in {folder} has shape {held[name].shape}, not {shape}: use the matching config.json"
            )
        if held[name].dtype not in _DTYPES:
            raise CheckpointError(
                f"{name} in {folder} is of the type {held[name].dtype}: take a checkpoint of {', '.join(_DTYPES)}"
            )
        surplus.discard(name)
    if surplus:
        raise CheckpointError(
            f"{folder} holds {shown(min(surplus))}, which its config.json does not describe:"
            " use the config.json of these weights"
        )


def _check_rotary(folder: Path, name: str, table: Tensor, config: ModelConfig) -> None:
    """Check that a rotary table is that of config.json, with its scaling or without: its values are not used."""
    plain = msgspec.structs.replace(config, rope_scaling=None)
    if not any(
        torch.allclose(table.float(), rotary_frequencies(own), rtol=_ROTARY_TOLERANCE) for own in (config, plain)
    ):
        raise CheckpointError(
            f"{name} in {folder} has another base than its config.json: correct rope_theta, or drop this tensor"
        )


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    try:
        check_header(path)
        with safe_open(path, framework="pt") as file:
            yield file
    except (OSError, SafetensorError) as error:
        raise unreadable(path, error) from error


def _inside(folder: Path, name: str) -> Path:
    """Return the path of a file, which may be a link within `folder` or to the blobs of Hugging Face's cache."""
    path = folder / name
    try:
        real, home = path.resolve(), folder.resolve()
    except (OSError, RuntimeError) as error:
        raise CheckpointError(f"{path} is a link in a circle: put the file itself there") from error
    cached = home.parent.name == "snapshots" and real.parent == home.parent.parent / "blobs"
    if not (cached or real.is_relative_to(home)):
        raise CheckpointError(f"{path} is a link out of its folder: do not use this checkpoint")
    return path


def _read(folder: Path, name: str, max_bytes: int) -> bytes:
    path = _inside(folder, name)
    if path.exists() and not path.is_file():
        raise CheckpointError(f"{path} is not a file: give the folder of a checkpoint")
    try:
        return read_bounded(path, max_bytes)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error.strerror}): give the folder of a checkpoint") from error
