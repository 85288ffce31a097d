"""Text rules of a Hugging Face checkpoint, beside its tokenizer.json: special tokens, chat template, sampling.

It is typed and bounded, travels with a run, and is written back by an export.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec
from msgspec import UNSET, UnsetType

from peer.config import VOCABULARY_MAX
from peer.decoding import MALFORMED
from peer.errors import CheckpointError, ConfigError
from peer.model.text.chat_templates import (
    FILE,
    FOLDER,
    LEGACY,
    OTHERS,
    ChatChoice,
    NamedTemplate,
    Source,
    Templates,
    choice_of,
    chosen_by_rule,
    founded_with,
    read_templates,
    without_one,
)
from peer.model.text.special_tokens import (
    TOKEN_CHARS_MAX,
    TOKEN_MAP,
    TOKENIZER_CONFIG,
    is_id,
    read_checkpoint_json,
    read_special_tokens,
)
from peer.plain_text import plain

_CONFIG: Final = "config.json"
_GENERATION: Final = "generation_config.json"
STOPS_MAX: Final = 32

_TokenId = Annotated[int, msgspec.Meta(ge=0, lt=VOCABULARY_MAX)]
_Token = Annotated[str, msgspec.Meta(max_length=TOKEN_CHARS_MAX)]
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
    """A checkpoint's rules for texts: where an answer ends, and how a conversation is written."""

    stops: Annotated[tuple[_TokenId, ...], msgspec.Meta(max_length=STOPS_MAX)] = ()
    """Tokens that end an answer."""
    bos_id: _TokenId | None = None
    pad_id: _TokenId | None = None
    bos: _Token = ""
    """The token before a text, as chat templates name it."""
    eos: _Token = ""
    pad: _Token = ""
    unk: _Token = ""
    chat_template: Source = ""
    """Jinja2, run in a sandboxed process of its own; "" for none."""
    generation: Generation = Generation()
    templates: Templates | UnsetType = UNSET
    """Where the checkpoint has several templates, or the founder chose; else it is left out of the encoding, so that
    manifests keep the bytes that they had before there was this field."""

    def choice(self, word: str | None = None, others: str = OTHERS) -> ChatChoice:
        """Return the template of a user whose --template is `word`; `others`: how another one is chosen. Raises
        ConfigError."""
        return choice_of(self.chat_template, self._said, word, others)

    def founded_with(self, word: str) -> TextRules:
        """Return the same with the template that the founder names. Raises ConfigError."""
        source, said = founded_with(self.chat_template, self._said, word)
        return msgspec.structs.replace(self, chat_template=source, templates=said)

    def without_a_template(self) -> TextRules | None:
        """Return the same without the last of its templates, None if there is none."""
        fewer = without_one(self.chat_template, self._said)
        return None if fewer is None else msgspec.structs.replace(self, chat_template=fewer[0], templates=fewer[1])

    @property
    def _said(self) -> Templates | None:
        return None if self.templates is UNSET else self.templates


class _Ids(msgspec.Struct):
    """The special tokens of config.json."""

    eos_token_id: Any = None
    bos_token_id: Any = None
    pad_token_id: Any = None
    vocab_size: Any = None


def read_text_rules(folder: Path) -> TextRules:
    """Return the rules of the checkpoint in `folder`. Mere advice that is out of bounds is left out, as are ids that
    the model does not have. Raises CheckpointError for files that are malformed, ConfigError for too many stops."""
    ids: _Ids = read_checkpoint_json(folder / _CONFIG, _Ids)
    generation: dict[str, Any] = read_checkpoint_json(folder / _GENERATION, dict[str, Any])
    tokens = read_special_tokens(folder)
    vocabulary = ids.vocab_size if is_id(ids.vocab_size) else VOCABULARY_MAX
    named = [
        *_stops(folder / _GENERATION, generation.get("eos_token_id")),
        *_stops(folder / _CONFIG, ids.eos_token_id),
        *tokens.eos_ids,
    ]
    stops = tuple(dict.fromkeys(id for id in named if is_id(id, vocabulary)))
    if len(stops) > STOPS_MAX:
        raise ConfigError(
            f"the files in {folder} name {len(stops)} tokens that end an answer, more than {STOPS_MAX}: shorten"
            f" eos_token_id in {_GENERATION} and {_CONFIG}"
        )
    bos_ids = generation.get("bos_token_id"), ids.bos_token_id
    pad_ids = generation.get("pad_token_id"), ids.pad_token_id
    source, said = chosen_by_rule(read_templates(folder, tokens.chat_template))
    return TextRules(
        stops=stops,
        bos_id=next((id for id in bos_ids if is_id(id, vocabulary)), None),
        pad_id=next((id for id in pad_ids if is_id(id, vocabulary)), None),
        bos=tokens.bos,
        eos=tokens.eos,
        pad=tokens.pad,
        unk=tokens.unk,
        chat_template=source,
        generation=_advice(generation),
        templates=UNSET if said is None else said,
    )


def _stops(path: Path, named: Any) -> list[int]:
    """Return the ids of an eos_token_id."""
    ids = named if isinstance(named, list) else [] if named is None else [named]
    wrong = [id for id in ids if not isinstance(id, int) or isinstance(id, bool)]
    if wrong:
        raise CheckpointError(
            f"{path} names eos_token_id by {plain(repr(wrong[0]), 40)}: write the token's id there, a whole number"
        )
    return ids


def _advice(found: dict[str, Any]) -> Generation:
    """Return how to draw tokens, without the values that are out of bounds."""
    sound: dict[str, Any] = {}
    for name in Generation.__struct_fields__:
        try:
            sound[name] = getattr(msgspec.convert({name: found.get(name)}, type=Generation), name)
        except MALFORMED:
            continue
    return Generation(**sound)


def special_ids(text: TextRules) -> dict[str, Any]:
    """Return the special tokens as config.json and generation_config.json name them."""
    eos: Any = text.stops[0] if len(text.stops) == 1 else list(text.stops) or None
    return {"bos_token_id": text.bos_id, "eos_token_id": eos, "pad_token_id": text.pad_id}


def write_text_rules(folder: Path, text: TextRules) -> None:
    """Write generation_config.json and the chat template, and add the special tokens to tokenizer_config.json. Another
    checkpoint's leftovers of these are removed. Raises OSError."""
    drawn = {name: getattr(text.generation, name) for name in Generation.__struct_fields__}
    said = {name: value for name, value in (special_ids(text) | drawn).items() if value is not None}
    _write_or_remove(folder / _GENERATION, json.dumps(said, indent=2) + "\n" if said else "")
    stale = [folder / TOKEN_MAP, folder / LEGACY, *(folder / FOLDER).glob("*.jinja")]
    for path in stale:
        path.unlink(missing_ok=True)
    tokens: dict[str, Any] = {
        f"{name}_token": token for name in ("bos", "eos", "pad", "unk") if (token := getattr(text, name))
    }
    several = _named_templates(text)
    _write_or_remove(folder / FILE, "" if several else text.chat_template)
    if several:  # a list keeps their order
        tokens["chat_template"] = [{"name": one.name, "template": one.source} for one in several]
    path = folder / TOKENIZER_CONFIG
    path.write_text(json.dumps(json.loads(path.read_text()) | tokens, indent=2) + "\n")


def _named_templates(text: TextRules) -> list[NamedTemplate]:
    """Return the templates that have names to be written, first that in use."""
    if text.templates is UNSET or not text.templates.names:
        return []
    first = [NamedTemplate(text.templates.name, text.chat_template)] if text.templates.name else []
    return [*first, *text.templates.others]


def _write_or_remove(path: Path, content: str) -> None:
    if content:
        path.write_text(content)
    else:
        path.unlink(missing_ok=True)
