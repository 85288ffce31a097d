"""Creation of a served model: from a checkpoint on this machine's disk to a signed manifest."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec
import trio
from blake3 import blake3

from peer.checkpoint.hash_tree import StateTree
from peer.config import HiddenType, ModelConfig, Quantization
from peer.data.tokenizer import load_tokenizer
from peer.data.tokenizer_rules import TOKENIZER_BYTES_MAX
from peer.errors import CheckpointError
from peer.events import EventLog
from peer.files import read_bounded
from peer.footprint.stored import stored_bytes
from peer.identity import Identity, Signed
from peer.model.hub_config import CONFIG_BYTES_MAX, chosen_quantization, read_served_config, saved_quantization
from peer.model.parameter_files import ParameterFiles
from peer.model.text.rules import TextRules, read_text_rules
from peer.model.weight_files import conversion, refuse_gguf, weight_files
from swarm.parts.checkpoint import check_names, own_dtype
from swarm.parts.hashing import hash_parts
from swarm.parts.weights import EvenWeights
from swarm.run.features import adapter_features, model_features, weight_features
from swarm.run.home import Home
from swarm.run.manifest import PROTOCOL_VERSION, BlockRange, ServedModelManifest, fit_templates, sign_manifest
from swarm.run.manifest_transfer import save_run_files
from swarm.serving.adapters import found_adapters

_TOKENIZER: Final = "tokenizer.json"
_OTHER_TOKENIZERS: Final = ("tokenizer.model", "vocab.json", "tekken.json", "tiktoken.model", "spiece.model")


@dataclass(frozen=True)
class CreatedModel:
    """A served model as its founder has it."""

    signed: Signed
    manifest: ServedModelManifest
    tokenizer: bytes
    """The tokenizer.json, empty for bytes."""
    trees: tuple[StateTree, ...] = ()
    """Of each part, if it has just been hashed."""


@dataclass(frozen=True)
class PreparedModel:
    """A checkpoint whose small files and headers do: all but its values. It is a `swarm.parts.weights.Weights`."""

    name: str
    is_open: bool
    folder: Path
    files: ParameterFiles
    model: ModelConfig
    window: int | None
    dtype: HiddenType
    quantization: Quantization | None
    cuts: tuple[BlockRange, ...]
    text: TextRules
    tokenizer: bytes
    tokenizer_name: str


def prepare_model(
    folder: Path,
    name: str,
    is_open: bool,
    dtype: HiddenType | None = None,
    template: str | None = None,
    quantization: Quantization | None = None,
) -> PreparedModel:
    """Read the small files of a checkpoint in the Hugging Face layout and the headers of its weights. Blocks. Raises
    ConfigError for a model outside the family or a quantization that it cannot have, CheckpointError for files that do
    not fit."""
    refuse_gguf(folder)
    content = _read(folder / "config.json", CONFIG_BYTES_MAX)
    config, window = read_served_config(content)
    quantization = chosen_quantization(saved_quantization(content), quantization)
    model = msgspec.structs.replace(config, tie_embeddings=False)  # the last server has a head of its own
    text = read_text_rules(folder)
    if template is not None:
        text = text.founded_with(template)
    tokenizer, tokenizer_name = _tokenizer(folder, model)
    weight_files(folder)
    files = ParameterFiles([folder])
    check_names(folder, files, config)
    own = own_dtype(files, model, quantization)
    stored_bytes(model, None, own, quantization)
    return PreparedModel(
        name=name,
        is_open=is_open,
        folder=folder,
        files=files,
        model=model,
        window=window,
        dtype=dtype or own,
        quantization=quantization,
        cuts=EvenWeights(model, own, quantization).cuts,
        text=text,
        tokenizer=tokenizer,
        tokenizer_name=tokenizer_name,
    )


async def create_model(
    home: Path,
    prepared: PreparedModel,
    identity: Identity,
    events: EventLog,
    adapters: Mapping[str, Path] | None = None,
) -> CreatedModel:
    """Read and hash all values of a checkpoint, and of `adapters` of it by name, sign its manifest and keep it under
    `home`. Raises CheckpointError, ConfigError, ResourceError."""
    served = await trio.to_thread.run_sync(found_adapters, Home(home), prepared.model, adapters or {})
    trees = await hash_parts(prepared.folder, prepared.files, prepared, home / "weights", events)
    model = prepared.model
    manifest = ServedModelManifest(
        protocol=PROTOCOL_VERSION,
        authority=identity.peer_id,
        created_at=int(time.time()),
        model=model,
        tokenizer=prepared.tokenizer_name,
        requires=(*model_features(model), *weight_features(prepared.quantization), *adapter_features(served)),
        name=prepared.name,
        open=prepared.is_open,
        cuts=prepared.cuts,
        checkpoint=tuple(tree.root for tree in trees),
        dtype=prepared.dtype,
        quantization=prepared.quantization,
        window=prepared.window,
        text=prepared.text,
        adapters=served,
    )
    manifest = fit_templates(manifest)
    signed = sign_manifest(identity, manifest)
    await trio.to_thread.run_sync(save_run_files, home, signed, prepared.tokenizer)
    return CreatedModel(signed, manifest, prepared.tokenizer, trees)


def _tokenizer(folder: Path, model: ModelConfig) -> tuple[bytes, str]:
    path = folder / _TOKENIZER
    if not path.is_file():
        raise CheckpointError(f"{folder} has no {_TOKENIZER}: {_tokenizer_remedy(folder)}")
    size = load_tokenizer(str(path)).vocab_size
    if size > model.vocab_size:
        raise CheckpointError(
            f"the tokenizer has {size} ids and the model only {model.vocab_size}: take the tokenizer.json of the"
            f" model, or give the model rows for the others (transformers: model.resize_token_embeddings({size})) and"
            " save it again"
        )
    content = _read(path, TOKENIZER_BYTES_MAX)
    return content, blake3(content).hexdigest()


def _tokenizer_remedy(folder: Path) -> str:
    if any((folder / name).is_file() for name in _OTHER_TOKENIZERS):
        return f"convert its tokenizer ({conversion(folder, 'AutoTokenizer')})"
    return "copy it from the model that this one was made from, or save the tokenizer there (transformers)"


def _read(path: Path, bytes_max: int) -> bytes:
    try:
        return read_bounded(path, bytes_max)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error.strerror}): give the folder of a checkpoint") from error
