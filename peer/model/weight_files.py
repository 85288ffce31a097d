"""The safetensors files of a checkpoint in the Hugging Face layout, and what to do where there are none.

A pickled `pytorch_model.bin` is never opened.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Collection
from pathlib import Path
from typing import Final

import msgspec

from peer.decoding import MALFORMED, decode_json, is_pointer, malformed, told
from peer.errors import CheckpointError
from peer.files import read_bounded
from peer.footprint.parameters import HEAD
from peer.model.parameter_names import shown

WEIGHTS: Final = "model.safetensors"
INDEX: Final = "model.safetensors.index.json"
CHECKPOINT_TENSORS_MAX: Final = 1 << 17
_HEADER_BYTES_MAX: Final = 128 * CHECKPOINT_TENSORS_MAX
_LENGTH_BYTES: Final = 8
_FEWER: Final = "take the model with one tensor a parameter"
_INDEX_BYTES_MAX: Final = 16 << 20
_PLAIN: Final = re.compile(r"[\w.-]+\.safetensors", re.ASCII)
_SHARD: Final = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.safetensors", re.ASCII)
_LAYER: Final = re.compile(r"model\.layers\.(\d{1,6})\.")
_QUANTIZED: Final = (
    "qweight", "qzeros", "scales", "g_idx", "weight_packed", "weight_scale", "weight_scale_inv", "SCB", "absmax",
    "quant_map",
)  # fmt: skip
_POINTER_BYTES: Final = 64


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


def listed_files(folder: Path) -> list[Path]:
    """Return the files that a checkpoint's weights are in: the single file, those of the index, whether each exists or
    not, or the numbered shards found without one. Empty if it has none of these. Raises CheckpointError."""
    if (folder / WEIGHTS).is_file():
        return [folder / WEIGHTS]  # then shards beside it are those of another download
    if (folder / INDEX).is_file():
        return [folder / name for name in _indexed(folder / INDEX)]
    rows: dict[str, list[Path]] = {}
    for path in sorted(folder.glob("*.safetensors")):
        if match := _SHARD.fullmatch(path.name):
            rows.setdefault(f"{match[1]}-...-of-{match[3]}", []).append(path)
    if len(rows) > 1:
        raise CheckpointError(
            f"{folder} has shards of several checkpoints ({' and '.join(map(shown, sorted(rows)[:2]))}) and no {INDEX}:"
            " keep those of one in a folder"
        )
    return next(iter(rows.values()), [])


def weight_files(folder: Path) -> list[Path]:
    """Return the files that a whole checkpoint's weights are in. Raises CheckpointError, whose remedy is for what is in
    the folder instead."""
    files = listed_files(folder)
    for path in files:
        if not path.is_file():
            raise CheckpointError(f"{folder} lacks {path.name}, which its {INDEX} names: download that file")
    if not files:
        raise CheckpointError(_without_weights(folder))
    match = _SHARD.fullmatch(files[0].name)
    if match and not (folder / INDEX).is_file():
        _check_row(folder, match[1], match[3], {path.name for path in files})
    return files


def refuse_gguf(folder: Path) -> None:
    """Raise CheckpointError for a folder of GGUF files alone, which have config.json inside of them."""
    if not (folder / "config.json").is_file() and any(folder.glob("*.gguf")):
        raise CheckpointError(_without_weights(folder))


def _check_row(folder: Path, stem: str, count: str, names: set[str]) -> None:
    """Check that no shard of a row without an index is missing."""
    for number in range(1, int(count) + 1):
        name = f"{stem}-{number:05}-of-{count}.safetensors"
        if name not in names:
            raise CheckpointError(
                f"{folder} has {len(names)} of {int(count)} shards and lacks {name}: download those that are missing"
            )


def unreadable(path: Path, error: Exception) -> CheckpointError:
    """Return the error of a safetensors file that cannot be read."""
    try:
        with path.open("rb") as file:
            begin = file.read(_POINTER_BYTES)
    except OSError as failed:
        return CheckpointError(f"{path} cannot be read ({failed.strerror}): put it there, where you can read it")
    if is_pointer(begin):
        return CheckpointError(f"{path} {malformed(begin, error)}")
    return CheckpointError(
        f"{path} cannot be read ({told(error)}): download it again if it was cut short, else save the model again"
    )


def check_header(path: Path) -> None:
    """Raise CheckpointError for a safetensors file that names more tensors than any model here has: only to read the
    names would take minutes. Raises OSError if it cannot be read."""
    with path.open("rb") as file:
        header_bytes = int.from_bytes(file.read(_LENGTH_BYTES), "little")
    if _HEADER_BYTES_MAX < header_bytes < path.stat().st_size:
        raise CheckpointError(
            f"{path} names its tensors in {header_bytes} bytes, where {_HEADER_BYTES_MAX} are read at most: {_FEWER}"
        )


def check_count(path: Path, tensors: int) -> None:
    """Raise CheckpointError where the files of a checkpoint up to this one name more tensors than a model here has."""
    if tensors > CHECKPOINT_TENSORS_MAX:
        raise CheckpointError(
            f"{path} and the files before it name {tensors} tensors, where {CHECKPOINT_TENSORS_MAX} are read at most:"
            f" {_FEWER}"
        )


def held_twice(path: Path, name: str, other: Path) -> CheckpointError:
    """Return the error of a parameter that two files of a checkpoint hold."""
    return CheckpointError(
        f"{path} holds {shown(name)} a second time, beside {other.name}: keep the shards of one checkpoint in a folder,"
        f" with their {INDEX}"
    )


def missing_parameter(folder: Path, name: str, names: Collection[str]) -> CheckpointError:
    """Return the error of a checkpoint without a parameter. `names`: what its files hold, by canonical names."""
    lacks = f"{folder} lacks {name}"
    if any(held.rpartition(".")[2] in _QUANTIZED for held in names):
        return CheckpointError(
            f"{lacks}, as its weights are quantized: take the checkpoint in bfloat16 or float16, or one of bitsandbytes"
            " with the config.json that was saved with it"
        )
    if any(".lora_" in held for held in names):
        return CheckpointError(
            f"{lacks}, as an adapter is not merged into its weights: merge it (peft: model.merge_and_unload()), and"
            " save what that returns"
        )
    if name == HEAD:
        return CheckpointError(
            f"{lacks}, and config.json does not tie the head to the embedding: take the model for text generation"
            " (...ForCausalLM), or set tie_word_embeddings to true in config.json if its head is the embedding"
        )
    match = _LAYER.match(name)
    layers = {int(found[1]) for held in names if (found := _LAYER.match(held))}
    if match and layers and int(match[1]) not in layers:
        return CheckpointError(
            f"{lacks} and has {len(layers)} layers, fewer than its config.json describes: set num_hidden_layers to"
            f" {len(layers)} there, or take the config.json and the weights of one checkpoint"
        )
    example = f", and holds {shown(min(names))}" if names else ""
    return CheckpointError(f"{lacks}{example}: take the config.json and the weights of one checkpoint")


def conversion(folder: Path, kind: str) -> str:
    """Return the command by which a class of `transformers` writes what it has read from a folder in today's form."""
    place = json.dumps(str(folder))
    code = f"from transformers import {kind} as A; A.from_pretrained({place}).save_pretrained({place})"
    return f"python -c {shlex.quote(code)}"


def _indexed(path: Path) -> list[str]:
    content = b""
    try:
        content = read_bounded(path, _INDEX_BYTES_MAX)
        index = decode_json(content, _Index)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error.strerror}): give the folder of a checkpoint") from error
    except MALFORMED as error:
        raise CheckpointError(f"{path}, the index of safetensors, {malformed(content, error)}") from error
    names = sorted(set(index.weight_map.values()))
    if not names or any(not _PLAIN.fullmatch(name) for name in names):
        raise CheckpointError(f"{path} names files outside its folder, or no safetensors: do not use this checkpoint")
    return names


def _without_weights(folder: Path) -> str:
    """Return why a folder has no weights to read, with the remedy for its content."""
    names = {path.name for path in folder.iterdir()} if folder.is_dir() else set[str]()
    here = json.dumps(str(folder))
    if "adapter_config.json" in names:
        return (
            f"{folder} is an adapter of another model, not a model: merge it (peft:"
            f" AutoPeftModelForCausalLM.from_pretrained({here}).merge_and_unload().save_pretrained(OUT)), and name OUT"
        )
    if any(name.startswith("consolidated") for name in names):
        return (
            f"{folder} has its weights in the format of their authors (consolidated...): download the files in the"
            f" Hugging Face format too ({WEIGHTS}, or shards with {INDEX})"
        )
    if any(name.startswith("pytorch_model") and name.endswith(".bin") for name in names):
        return (
            f"{folder} has pickled weights (.bin) and no {WEIGHTS}: convert them to safetensors, if you trust their"
            f" author ({conversion(folder, 'AutoModelForCausalLM')})"
        )
    packed = sorted(name for name in names if name.endswith(".gguf"))
    if packed:
        code = (  # transformers saves no model whose weights are still packed
            "from transformers import AutoModelForCausalLM as A, AutoTokenizer as T, GgufConfig as G;"
            f" p, f = {here}, {json.dumps(packed[0])};"
            " A.from_pretrained(p, gguf_file=f, quantization_config=G(dequantize=True)).save_pretrained(p);"
            " T.from_pretrained(p, gguf_file=f).save_pretrained(p)"
        )
        return (
            f"{folder} has weights in GGUF and no {WEIGHTS}: take the checkpoint in safetensors, or convert it"
            f" (pip install 'transformers>=5.23' gguf; python -c {shlex.quote(code)})"
        )
    if any(name.endswith((".pt", ".pth", ".ckpt")) for name in names):
        return f"{folder} has weights in another format: take the checkpoint in safetensors ({WEIGHTS})"
    others = sorted(name for name in names if name.endswith(".safetensors"))
    if others:
        return f"{folder} has {shown(others[0])} and no {WEIGHTS} or {INDEX}: rename it to {WEIGHTS} if it is the model"
    return f"{folder} has no {WEIGHTS} and no {INDEX}: download the weights in safetensors into it"
