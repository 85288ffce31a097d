"""Chat templates of a checkpoint: where it keeps them, which one is used, and how that is said.

The places and their order are those of `transformers`: the files chat_template.jinja and
additional_chat_templates/NAME.jinja, else what tokenizer_config.json has, else chat_template.json of older processors.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec

from peer.decoding import MALFORMED, decode_json, malformed
from peer.errors import CheckpointError, ConfigError
from peer.files import read_bounded
from peer.plain_text import plain

PLAIN: Final = "plain"
TEMPLATE_CHARS_MAX: Final = 32 << 10
DEFAULT: Final = "default"
FILE: Final = "chat_template.jinja"
FOLDER: Final = "additional_chat_templates"
LEGACY: Final = "chat_template.json"
_FILE_BYTES_MAX: Final = 1 << 20
_NAME_CHARS_MAX: Final = 64
_NAMED_MAX: Final = 16
_FILES_MAX: Final = 64  # of which the folder's names are read
_SHOWN_MAX: Final = 8
_SPECIAL: Final = re.compile(r"tool|func|rag(?![a-z])|retriev|search|document|grounded", re.IGNORECASE)
OTHERS: Final = "--template NAME chooses another"

_Name = Annotated[str, msgspec.Meta(max_length=_NAME_CHARS_MAX)]
Source = Annotated[str, msgspec.Meta(max_length=TEMPLATE_CHARS_MAX)]


class NamedTemplate(msgspec.Struct, frozen=True):
    """One of several templates of a checkpoint."""

    name: _Name
    source: Source


class Templates(msgspec.Struct, frozen=True, kw_only=True):
    """What is to be said of a chat template that is not simply the checkpoint's only one."""

    name: _Name = ""
    """Of the template in use; "" for none of the checkpoint's."""
    others: Annotated[tuple[NamedTemplate, ...], msgspec.Meta(max_length=_NAMED_MAX)] = ()
    """The checkpoint's other templates, in its order."""
    left_out: Annotated[tuple[_Name, ...], msgspec.Meta(max_length=_NAMED_MAX)] = ()
    """Names of templates that are too long to travel with the model."""
    by_founder: bool = False
    """Whether the founder chose the template in use."""

    @property
    def names(self) -> list[str]:
        """The names of the templates that can be chosen, first that in use."""
        return [*([self.name] if self.name else []), *(other.name for other in self.others)]


@dataclass(frozen=True)
class ChatChoice:
    """The template that conversations are written with, and the sentence that says which it is."""

    source: str
    sentence: str


def read_templates(folder: Path, configured: object) -> list[NamedTemplate]:
    """Return all templates of a checkpoint in its order, of any length; a single one is called default. `configured`:
    what tokenizer_config.json has. Raises CheckpointError."""
    found: dict[str, str] = {}
    if (folder / FILE).is_file():
        found[DEFAULT] = _text(folder / FILE)
    if (folder / FOLDER).is_dir():
        for path in sorted((folder / FOLDER).glob("*.jinja"))[:_FILES_MAX]:
            found[path.name.removesuffix(".jinja")] = _text(path)
    if not found:
        found = _named(configured, f"{folder / 'tokenizer_config.json'} has a chat_template")
    if not found and (folder / LEGACY).is_file():
        content = _content(folder / LEGACY)
        try:
            legacy = decode_json(content, dict[str, Any])
        except MALFORMED as error:
            raise CheckpointError(f"{folder / LEGACY} {malformed(content, error)}") from error
        found = _named(legacy.get("chat_template"), f"{folder / LEGACY} has a chat_template")
    return [NamedTemplate(name.replace("/", "_"), source) for name, source in found.items() if source.strip()]


def chosen_by_rule(found: Sequence[NamedTemplate]) -> tuple[str, Templates | None]:
    """Return the template that a checkpoint's conversations are written with, "" for none, and what is to be said of
    it: the one called default, else the first that is not for tools or retrieval."""
    fit = [one for one in found if len(one.source) <= TEMPLATE_CHARS_MAX and len(one.name) <= _NAME_CHARS_MAX]
    fit = fit[:_NAMED_MAX]
    left_out = tuple(one.name[:_NAME_CHARS_MAX] for one in found if one not in fit)[:_NAMED_MAX]
    default = [one for one in found if one.name == DEFAULT]
    ordinary = [one for one in fit if not _SPECIAL.search(one.name)]
    first = next((one for one in default or ordinary or fit if one in fit), None)
    if [one.name for one in found] in ([], [DEFAULT]) and not left_out:
        return ("" if first is None else first.source), None
    others = tuple(one for one in fit if one is not first)
    if first is None:
        return "", Templates(others=others, left_out=left_out)
    return first.source, Templates(name=first.name, others=others, left_out=left_out)


def founded_with(source: str, said: Templates | None, word: str) -> tuple[str, Templates]:
    """Return the template that the founder of a model names, in place of the one by rule. Raises ConfigError."""
    known = said or Templates(name=DEFAULT if source else "")
    chosen, name = _resolved(source, known, word)
    kept = known.others
    if known.name and known.name != name:
        kept = (NamedTemplate(known.name, source), *kept)
    others = tuple(other for other in kept if other.name != name)[:_NAMED_MAX]
    return chosen, Templates(name=name, others=others, left_out=known.left_out, by_founder=True)


def without_one(source: str, said: Templates | None) -> tuple[str, Templates] | None:
    """Return the templates of a model without the last of them, None if there is none."""
    known = said or Templates(name=DEFAULT if source else "")
    if not known.others:
        left_out = (*known.left_out, known.name or PLAIN)[:_NAMED_MAX]
        return ("", msgspec.structs.replace(known, name="", left_out=left_out)) if source else None
    left_out = (*known.left_out, known.others[-1].name)[:_NAMED_MAX]
    return source, msgspec.structs.replace(known, others=known.others[:-1], left_out=left_out)


def choice_of(source: str, said: Templates | None, word: str | None = None, others: str = OTHERS) -> ChatChoice:
    """Return the template that a user has, whose --template is `word`. `others`: how another one is chosen. Raises
    ConfigError for a word that names neither a template nor a file."""
    known = said or Templates(name=DEFAULT if source else "")
    if word is None:
        return ChatChoice(source, f"Chat template: {_said(source, said, others)}.{_left_out(known)}")
    chosen, name = _resolved(source, known, word)
    if name:
        which = f"{_quoted(name)} of {_listed(known)}, as --template names it"
    else:
        which = f"the file {plain(word)}" if chosen else 'none, as --template plain asks for "user: ..." lines'
    return ChatChoice(chosen, f"Chat template: {which}.")


def read_template_file(path: Path) -> str:
    """Return the chat template in a file. Raises ConfigError."""
    remedy = f"give a chat template of at most {TEMPLATE_CHARS_MAX} bytes in UTF-8, or --template {PLAIN}"
    try:
        source = read_bounded(path, TEMPLATE_CHARS_MAX).decode()
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror}): {remedy}") from error
    except ValueError as error:  # also a path with a zero byte
        raise ConfigError(f"{path} is no text ({getattr(error, 'reason', error)}): {remedy}") from error
    if not source.strip():
        raise ConfigError(f"{path} is empty: {remedy}")
    return source


def _resolved(source: str, known: Templates, word: str) -> tuple[str, str]:
    """Return the template that a word names, and its name if it is one of the checkpoint's."""
    if word == PLAIN:
        return "", ""
    if known.name and word == known.name:
        return source, word
    for other in known.others:
        if other.name == word:
            return other.source, word
    path = Path(word)
    if not _is_there(path):
        names = f"it has {_listed(known)}" if known.names else "it has none"
        left = ", which is too long to travel with the model" if word in known.left_out else ""
        raise ConfigError(
            f"--template {plain(word, 100)} names no chat template of this model ({names}){left}, and no file: give"
            f" {'one of these names, ' if known.names else ''}the path of a file, or {PLAIN}"
        )
    return read_template_file(path), ""


def _is_there(path: Path) -> bool:
    """Return whether something is at a path that may be a file; a word can also be too long for a path."""
    try:
        return path.exists() and not path.is_dir()
    except (OSError, ValueError):
        return False


def _said(source: str, said: Templates | None, others: str) -> str:
    if said is None:
        return "the checkpoint's own" if source else 'none in the checkpoint, so "user: ..." lines'
    rest = f"; {others}" if said.others else ""
    if said.by_founder:
        if said.name:
            return f"{_quoted(said.name)} of {_listed(said)}, as the founder of the model chose{rest}"
        which = "one of the founder's own" if source else '"user: ..." lines, as the founder of the model chose'
        return f"{which}, in place of the checkpoint's {_listed(said)}{rest}" if said.others else which
    if not source:
        return f'"user: ..." lines, as the checkpoint\'s is too long{rest or "; --template FILE takes another"}'
    if not said.others:
        return f"the checkpoint's {_quoted(said.name)}"
    if said.name == DEFAULT:
        return f"{_quoted(said.name)} of {_listed(said)}{rest}"
    return f"{_quoted(said.name)} of {_listed(said)}, as none is called {DEFAULT}{rest}"


def _left_out(said: Templates) -> str:
    if not said.left_out:
        return ""
    names = _shortened(said.left_out)
    return f" Left out: {names}, longer than {TEMPLATE_CHARS_MAX} characters or too much for the model's manifest."


def _listed(said: Templates) -> str:
    return f"{len(said.names)} ({_shortened(said.names)})"


def _shortened(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN_MAX} more" if len(names) > _SHOWN_MAX else ""
    return ", ".join(plain(name, _NAME_CHARS_MAX) for name in names[:_SHOWN_MAX]) + more


def _quoted(name: str) -> str:
    return f'"{plain(name, _NAME_CHARS_MAX)}"'


def _named(found: object, what: str) -> dict[str, str]:
    """Return the templates that a JSON file has: one text, an object of named ones, or a list of them."""
    if found is None or isinstance(found, str):
        return {DEFAULT: found} if found else {}
    if isinstance(found, list):
        pairs = [(one.get("name"), one.get("template")) if isinstance(one, Mapping) else (None, None) for one in found]
    else:
        pairs = list(found.items()) if isinstance(found, Mapping) else [(None, None)]
    if not all(isinstance(name, str) and isinstance(source, str) for name, source in pairs):
        raise CheckpointError(f"{what} that is no text and no list of named ones: correct it there, or remove it")
    return {str(name): str(source) for name, source in pairs}


def _text(path: Path) -> str:
    return _content(path).decode(errors="replace")


def _content(path: Path) -> bytes:
    try:
        return read_bounded(path, _FILE_BYTES_MAX)
    except OSError as error:
        raise CheckpointError(
            f"{path} cannot be read ({error.strerror}): remove it from the folder, or correct it"
        ) from error
