"""What a Hugging Face checkpoint says of texts, beside its tokenizer.json: special tokens, chat template, sampling.

It is typed and bounded, travels with a run, and is written back by an export.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec

from peer.config import VOCABULARY_MAX
from peer.decoding import MALFORMED, told
from peer.errors import CheckpointError, ConfigError
from peer.files import read_bounded

TEMPLATE_CHARS_MAX: Final = 32 << 10
STOPS_MAX: Final = 32
_FILE_BYTES_MAX: Final = 1 << 20
_TOKENIZER_CONFIG_BYTES_MAX: Final = 8 << 20  # old ones list thousands of added tokens
_CONFIG: Final = "config.json"
_GENERATION: Final = "generation_config.json"
_TOKENIZER_CONFIG: Final = "tokenizer_config.json"
_TEMPLATE: Final = "chat_template.jinja"

_TokenId = Annotated[int, msgspec.Meta(ge=0, lt=VOCABULARY_MAX)]
_Token = Annotated[str, msgspec.Meta(max_length=64)]
_Template = Annotated[str, msgspec.Meta(max_length=TEMPLATE_CHARS_MAX)]
_Share = Annotated[float, msgspec.Meta(ge=0, le=1)]


class Generation(msgspec.Struct, frozen=True, kw_only=True):
    """How a checkpoint's authors advise to draw tokens; None where they say nothing."""

    do_sample: bool | None = None
    temperature: Annotated[float, msgspec.Meta(ge=0, le=100)] | None = None
    top_k: Annotated[int, msgspec.Meta(ge=0, lt=VOCABULARY_MAX)] | None = None
    top_p: _Share | None = None
    min_p: _Share | None = None
    repetition_penalty: Annotated[float, msgspec.Meta(gt=0, le=1000)] | None = None

    def __post_init__(self) -> None:
        for name in ("temperature", "top_p", "min_p", "repetition_penalty"):
            value = getattr(self, name)
            if value is not None and not math.isfinite(value):  # NaN passes any bound
                raise ValueError(f"{name} is {value}: give a number")


class TextRules(msgspec.Struct, frozen=True, kw_only=True):
    """What a checkpoint says of texts: where an answer ends, and how a conversation is written."""

    stops: Annotated[tuple[_TokenId, ...], msgspec.Meta(max_length=STOPS_MAX)] = ()
    """Tokens that end an answer."""
    bos_id: _TokenId | None = None
    pad_id: _TokenId | None = None
    bos: _Token = ""
    """The token before a text, as chat templates name it."""
    eos: _Token = ""
    pad: _Token = ""
    unk: _Token = ""
    chat_template: _Template = ""
    """Jinja2, run in a sandboxed process of its own; "" for none."""
    generation: Generation = Generation()


class _Ids(msgspec.Struct):
    """What config.json and generation_config.json say of special tokens."""

    eos_token_id: _TokenId | Annotated[list[_TokenId], msgspec.Meta(max_length=32)] | None = None
    bos_token_id: _TokenId | None = None
    pad_token_id: _TokenId | None = None

    @property
    def stops(self) -> list[int]:
        found = self.eos_token_id
        return [] if found is None else [found] if isinstance(found, int) else found


class _GenerationFile(_Ids):
    do_sample: bool | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None


class _Word(msgspec.Struct):
    content: _Token = ""


class _NamedTemplate(msgspec.Struct):
    name: _Token = ""
    template: _Template = ""


class _TokenizerConfig(msgspec.Struct):
    """What tokenizer_config.json says of texts; files write a special token as text, or as an object with its
    content."""

    bos_token: _Token | _Word | None = None
    eos_token: _Token | _Word | None = None
    pad_token: _Token | _Word | None = None
    unk_token: _Token | _Word | None = None
    chat_template: _Template | Annotated[list[_NamedTemplate], msgspec.Meta(max_length=16)] | None = None


def read_text_rules(folder: Path) -> TextRules:
    """Return what the checkpoint in `folder` says. Raises CheckpointError for files that are malformed, ConfigError for
    values out of bounds."""
    ids = _decoded(folder / _CONFIG, _Ids)
    generation = _decoded(folder / _GENERATION, _GenerationFile)
    names = _decoded(folder / _TOKENIZER_CONFIG, _TokenizerConfig)
    template = _default(names.chat_template)
    if (folder / _TEMPLATE).is_file():
        template = _read(folder / _TEMPLATE, _FILE_BYTES_MAX).decode(errors="replace")
    fields: dict[str, Any] = {
        "stops": generation.stops or ids.stops,
        "bos_id": ids.bos_token_id if generation.bos_token_id is None else generation.bos_token_id,
        "pad_id": ids.pad_token_id if generation.pad_token_id is None else generation.pad_token_id,
        **{name: _text(getattr(names, f"{name}_token")) for name in ("bos", "eos", "pad", "unk")},
        "chat_template": template,
        "generation": {name: getattr(generation, name) for name in Generation.__struct_fields__},
    }
    try:
        return msgspec.convert(fields, type=TextRules)
    except MALFORMED as error:
        raise ConfigError(
            f"what {folder} says of texts is out of bounds ({told(error)}): correct its {_GENERATION}, or shorten its"
            " chat template"
        ) from error


def special_ids(text: TextRules) -> dict[str, Any]:
    """Return the special tokens as config.json and generation_config.json name them."""
    eos: Any = text.stops[0] if len(text.stops) == 1 else list(text.stops) or None
    return {"bos_token_id": text.bos_id, "eos_token_id": eos, "pad_token_id": text.pad_id}


def write_text_rules(folder: Path, text: TextRules) -> None:
    """Write generation_config.json and the chat template, and add the special tokens to tokenizer_config.json. Raises
    OSError."""
    drawn = {name: getattr(text.generation, name) for name in Generation.__struct_fields__}
    said = {name: value for name, value in (special_ids(text) | drawn).items() if value is not None}
    _write_or_remove(folder / _GENERATION, json.dumps(said, indent=2) + "\n" if said else "")
    _write_or_remove(folder / _TEMPLATE, text.chat_template)
    tokens = {f"{name}_token": token for name in ("bos", "eos", "pad", "unk") if (token := getattr(text, name))}
    path = folder / _TOKENIZER_CONFIG
    path.write_text(json.dumps(json.loads(path.read_text()) | tokens, indent=2) + "\n")


def _write_or_remove(path: Path, content: str) -> None:
    if content:
        path.write_text(content)
    else:
        path.unlink(missing_ok=True)


def _decoded(path: Path, kind: Any) -> Any:
    """Return the content of a JSON file; the defaults if there is none."""
    if not path.is_file():
        return kind()
    try:
        return msgspec.json.decode(_read(path, _TOKENIZER_CONFIG_BYTES_MAX), type=kind)
    except MALFORMED as error:
        raise CheckpointError(f"{path} is malformed or out of bounds ({told(error)}): fetch it again") from error


def _read(path: Path, bytes_max: int) -> bytes:
    try:
        return read_bounded(path, bytes_max)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error.strerror}): give the folder of a checkpoint") from error


def _text(token: str | _Word | None) -> str:
    return token.content if isinstance(token, _Word) else token or ""


def _default(found: str | list[_NamedTemplate] | None) -> str:
    """Return the chat template; of several named ones the default."""
    if isinstance(found, list):
        return next((named.template for named in found if named.name == "default"), "")
    return found or ""
