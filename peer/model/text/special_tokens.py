"""Special tokens of a checkpoint: their texts, and the ids that the tokenizer has for them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import msgspec

from peer.config import VOCABULARY_MAX
from peer.data.tokenizer_rules import TOKENIZER_BYTES_MAX, token_id
from peer.decoding import MALFORMED, decode_json, malformed
from peer.errors import CheckpointError
from peer.files import read_bounded

TOKEN_CHARS_MAX: Final = 64
TOKENIZER_CONFIG: Final = "tokenizer_config.json"
TOKEN_MAP: Final = "special_tokens_map.json"
_BYTES_MAX: Final = 8 << 20  # old ones list thousands of added tokens
_NAMES: Final = ("bos", "eos", "pad", "unk")
_SHAPING: Final = ("bos", "eos")  # these are part of texts and end answers, the others are advice


class _TokenizerConfig(msgspec.Struct):
    """The fields read from tokenizer_config.json and special_tokens_map.json."""

    bos_token: Any = None
    eos_token: Any = None
    pad_token: Any = None
    unk_token: Any = None
    chat_template: Any = None
    added_tokens_decoder: Any = None


@dataclass(frozen=True)
class SpecialTokens:
    """The content of the files beside tokenizer.json."""

    bos: str = ""
    eos: str = ""
    pad: str = ""
    unk: str = ""
    eos_ids: list[int] = field(default_factory=list)
    chat_template: object = None


def read_special_tokens(folder: Path) -> SpecialTokens:
    """Return the special tokens of a checkpoint. Raises CheckpointError."""
    config, older = (_read(folder / name) for name in (TOKENIZER_CONFIG, TOKEN_MAP))
    # as in transformers: the older file wins unless the newer one lists the added tokens
    files = [(TOKENIZER_CONFIG, config), (TOKEN_MAP, older)]
    order = files if config.added_tokens_decoder is not None else files[::-1]
    tokens = dict.fromkeys(_NAMES, "")
    for name in _NAMES:
        for file, held in order:
            tokens[name] = tokens[name] or _text(folder / file, name, getattr(held, f"{name}_token"))
    eos_ids = _ids(folder, tokens["eos"], config.added_tokens_decoder) if tokens["eos"] else []
    return SpecialTokens(**tokens, eos_ids=eos_ids, chat_template=config.chat_template)


def read_checkpoint_json(path: Path, kind: Any) -> Any:
    """Return the content of a JSON file of a checkpoint; the kind's defaults if there is none. Raises
    CheckpointError."""
    if not path.is_file():
        return kind()
    content = b""
    try:
        content = read_bounded(path, _BYTES_MAX)
        return decode_json(content, kind)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error.strerror}): give the folder of a checkpoint") from error
    except MALFORMED as error:
        raise CheckpointError(f"{path} {malformed(content, error)}") from error


def _read(path: Path) -> _TokenizerConfig:
    found: _TokenizerConfig = read_checkpoint_json(path, _TokenizerConfig)
    return found


def _text(path: Path, name: str, token: object) -> str:
    """Return a token, which files write as text or as an object with its content."""
    text = token.get("content") if isinstance(token, Mapping) else token
    if text is None:
        return ""
    fits = isinstance(text, str) and len(text) <= TOKEN_CHARS_MAX
    if not fits and name in _SHAPING:
        raise CheckpointError(
            f"{path} names {name}_token by something other than a text of at most {TOKEN_CHARS_MAX} characters: correct"
            f" it there, or remove it and name its id as {name}_token_id in generation_config.json"
        )
    return str(text) if fits else ""


def _ids(folder: Path, token: str, listed: object) -> list[int]:
    """Return the id of a token: that of tokenizer.json, else that of the tokens which tokenizer_config.json lists."""
    try:
        found = token_id(read_bounded(folder / "tokenizer.json", TOKENIZER_BYTES_MAX), token)
    except (OSError, *MALFORMED):
        found = None  # the reader of the tokenizer says what is wrong with it
    if found is not None:
        return [found]
    entries = listed.items() if isinstance(listed, Mapping) else ()
    return [
        int(id)
        for id, entry in entries
        if isinstance(entry, Mapping) and entry.get("content") == token and id.isdecimal() and len(id) < 9
    ][:1]


def is_id(value: object, vocabulary: int = VOCABULARY_MAX) -> bool:
    """Return whether a value is a token's id; checkpoints write -1 for none."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < vocabulary
