"""Creation of a served model: from a checkpoint on this machine's disk to a signed manifest."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final

import msgspec
from blake3 import blake3

from peer.config import ModelConfig
from peer.data.tokenizer import load_tokenizer
from peer.data.tokenizer_rules import TOKENIZER_BYTES_MAX
from peer.decoding import MALFORMED, told
from peer.errors import CheckpointError, ConfigError
from peer.files import read_bounded
from peer.identity import Identity, Signed
from peer.ipc.block_messages import HiddenType, TokenId
from peer.ipc.span import Span
from peer.model.hub_config import CONFIG_BYTES_MAX, read_served_config
from peer.model.layout import FlatLayout
from peer.model.parameter_files import ParameterFiles
from swarm.inference.parts import hash_parts
from swarm.run.manifest import PROTOCOL_VERSION, TEMPLATE_CHARS_MAX, ServedModelManifest, TextRules, sign_manifest
from swarm.run.manifest_transfer import save_run_files

_TOKENIZER: Final = "tokenizer.json"
_SMALL_BYTES_MAX: Final = 1 << 20
Template = Annotated[str, msgspec.Meta(max_length=TEMPLATE_CHARS_MAX)]
_TEMPLATE_FILE: Final = "chat_template.jinja"


@dataclass(frozen=True)
class CreatedModel:
    """A served model as its founder has it."""

    signed: Signed
    manifest: ServedModelManifest
    tokenizer: bytes
    """The tokenizer.json, empty for bytes."""


class _Tokens(msgspec.Struct):
    """What generation_config.json and config.json say of special tokens."""

    eos_token_id: TokenId | Annotated[list[TokenId], msgspec.Meta(max_length=32)] | None = None


class _Word(msgspec.Struct):
    content: Annotated[str, msgspec.Meta(max_length=64)] = ""


class _NamedTemplate(msgspec.Struct):
    name: Annotated[str, msgspec.Meta(max_length=64)] = ""
    template: Template = ""


class _TokenizerConfig(msgspec.Struct):
    """What tokenizer_config.json says of texts; files write a special token as text, or as an object with its
    content."""

    bos_token: Annotated[str, msgspec.Meta(max_length=64)] | _Word | None = None
    eos_token: Annotated[str, msgspec.Meta(max_length=64)] | _Word | None = None
    chat_template: Template | Annotated[list[_NamedTemplate], msgspec.Meta(max_length=16)] | None = None


def create_model(home: Path, folder: Path, identity: Identity, *, name: str, is_open: bool) -> CreatedModel:
    """Read and hash a checkpoint in the Hugging Face layout, sign its manifest and keep it under `home`. Blocks. Raises
    ConfigError for a model outside the family, CheckpointError for files that do not fit."""
    content = _read(folder / "config.json", CONFIG_BYTES_MAX)
    config, window = read_served_config(content)
    model = msgspec.structs.replace(config, tie_embeddings=False)  # the last server has a head of its own
    files = ParameterFiles([folder])
    dtype = _dtype(files, model)
    step = model.shared_blocks
    cuts = tuple((first, first + step) for first in range(0, model.layers, step))
    spans = [Span(first, end, model.layers) for first, end in cuts]
    tokenizer, tokenizer_name = _tokenizer(folder, model)
    manifest = ServedModelManifest(
        protocol=PROTOCOL_VERSION,
        authority=identity.peer_id,
        created_at=int(time.time()),
        model=model,
        tokenizer=tokenizer_name,
        name=name,
        open=is_open,
        cuts=cuts,
        checkpoint=tuple(tree.root for tree in hash_parts(files, model, dtype, spans)),
        dtype=dtype,
        window=window,
        text=_text_rules(folder, content, tokenizer),
    )
    signed = sign_manifest(identity, manifest)
    save_run_files(home, signed, tokenizer)
    return CreatedModel(signed, manifest, tokenizer)


def _dtype(files: ParameterFiles, model: ModelConfig) -> HiddenType:
    """Return the type to serve in: bf16 where all parameters are of it."""
    kinds = {str(files.tensor(name).dtype) for name in FlatLayout.of(model).slots}
    unfit = kinds - {"torch.float32", "torch.bfloat16", "torch.float16"}
    if unfit:
        raise CheckpointError(f"the checkpoint has parameters of {sorted(unfit)[0]}: take one in float32 or bfloat16")
    return "bf16" if kinds == {"torch.bfloat16"} else "fp32"


def _tokenizer(folder: Path, model: ModelConfig) -> tuple[bytes, str]:
    path = folder / _TOKENIZER
    if not path.is_file():
        raise CheckpointError(
            f"{folder} has no {_TOKENIZER}: convert its tokenizer (transformers:"
            f" AutoTokenizer.from_pretrained({str(folder)!r}).save_pretrained({str(folder)!r}))"
        )
    size = load_tokenizer(str(path)).vocab_size
    if size > model.vocab_size:
        raise CheckpointError(f"the tokenizer has {size} ids and the model only {model.vocab_size}: fetch both again")
    content = _read(path, TOKENIZER_BYTES_MAX)
    return content, blake3(content).hexdigest()


def _text_rules(folder: Path, config: bytes, tokenizer: bytes) -> TextRules:
    stops = _stops(config)
    generation = folder / "generation_config.json"
    if generation.is_file():
        stops = _stops(_read(generation, _SMALL_BYTES_MAX)) or stops
    names, template = _TokenizerConfig(), ""
    path = folder / "tokenizer_config.json"
    if tokenizer and path.is_file():
        try:
            names = msgspec.json.decode(_read(path, 8 * _SMALL_BYTES_MAX), type=_TokenizerConfig)
        except MALFORMED as error:
            raise CheckpointError(f"{path} is malformed ({told(error)}): fetch it again") from error
        template = _template(names.chat_template)
    if (folder / _TEMPLATE_FILE).is_file():
        template = _read(folder / _TEMPLATE_FILE, _SMALL_BYTES_MAX).decode(errors="replace")
    try:
        return msgspec.convert(
            {"stops": stops, "bos": _word(names.bos_token), "eos": _word(names.eos_token), "chat_template": template},
            type=TextRules,
        )
    except MALFORMED as error:
        raise ConfigError(
            f"the checkpoint's texts are out of bounds ({told(error)}): shorten its chat template"
        ) from error


def _stops(content: bytes) -> list[int]:
    try:
        found = msgspec.json.decode(content, type=_Tokens).eos_token_id
    except MALFORMED as error:
        raise CheckpointError(f"eos_token_id is no token id ({told(error)}): fetch config.json again") from error
    return [] if found is None else [found] if isinstance(found, int) else found


def _word(token: str | _Word | None) -> str:
    return token.content if isinstance(token, _Word) else token or ""


def _template(found: str | list[_NamedTemplate] | None) -> str:
    """Return the chat template; of several named ones the default."""
    if isinstance(found, list):
        return next((named.template for named in found if named.name == "default"), "")
    return found or ""


def _read(path: Path, bytes_max: int) -> bytes:
    try:
        return read_bounded(path, bytes_max)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error.strerror}): give the folder of a checkpoint") from error
