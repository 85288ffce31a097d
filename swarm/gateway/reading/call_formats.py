"""Forms in which models write calls of functions: one table, chosen by the chat template or by --tool-parser.

A form says at which marks a call may begin, when its arguments have begun, where the text of a call ends, and what it
calls. Servers and models are not trusted: each step takes a time linear in the text, and depth is bounded.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Final, Protocol

import msgspec

from peer.decoding import MALFORMED
from peer.errors import ConfigError
from peer.plain_text import plain
from swarm.gateway.json_depth import is_deep
from swarm.gateway.reading.json_text import Brackets, Opened, opened_json
from swarm.gateway.reading.python_values import read_python_calls

AUTO: Final = "auto"
Schemas = Mapping[str, Mapping[str, Any]]
"""The schema of each function's parameters, by the function's name."""
Call = tuple[str, str]
"""The name of a function, and its arguments as a JSON object."""

_FUNCTION_ENDS: Final = "</function>"
_PARAMETER_BEGINS: Final = "<parameter="
_PARAMETER_ENDS: Final = "</parameter>"


class Extent(Protocol):
    """The text of a call, of which more may come."""

    def end(self, text: str) -> int | None:
        """Return where the text of the call ends, None if more is needed. `text`: the same as last time, or longer.
        Raises ValueError if this is no call."""


class Tags:
    """A text in tags, up to the </function> behind its last parameter."""

    def __init__(self, begin: int) -> None:
        self._begin = self._since = self._at = begin

    def end(self, text: str) -> int | None:
        while (found := text.find(_FUNCTION_ENDS, self._at)) >= 0:
            before = text[self._since : found].rstrip()
            self._since = self._at = found + len(_FUNCTION_ENDS)
            # one in the value of a parameter is a part of that
            if before.endswith(_PARAMETER_ENDS) or text.find(_PARAMETER_BEGINS, self._begin, found) < 0:
                return self._at
        self._at = max(self._at, len(text) - len(_FUNCTION_ENDS) + 1)
        return None


@dataclass(frozen=True)
class CallFormat:
    """One form of calls."""

    name: str
    marks: tuple[str, ...]
    """Texts before a call. They may be special tokens, and are no part of an answer's text."""
    bare: str = ""
    """Signs with which a call may begin without a mark where an answer begins, or behind another call."""
    opening: str = ""
    """A text with which a call may begin in any place, without a mark before it."""
    inner: tuple[str, ...] = ()
    """Special tokens inside of a call."""
    closes: tuple[str, ...] = ()
    """Texts behind a call."""
    separators: str = ""
    """Signs between two calls without a mark."""
    forced: str | None = None
    """The text before calls that are JSON alone (`swarm.gateway.forced_calls`): the first of the marks and white space,
    or nothing. None for forms that are no JSON."""
    arguments: str = "arguments"
    """The name of a call's arguments in its JSON."""
    is_list: bool = False
    """Whether the JSON is a list of calls."""
    extent: Callable[[str, int], Extent | None] = lambda text, at: Brackets(at)
    """Returns the extent of what begins there, behind a mark and white space; None if more text is needed. Raises
    ValueError if it is no call."""
    opened: Callable[[str, int], Opened | None] = lambda text, at: None
    """Returns the call that begins there, as for `extent`, once its arguments have begun. From then on it is a call,
    whatever follows. None as long as they have not, and always for forms that are no JSON."""
    read: Callable[[str, Schemas], list[Call]] = lambda text, schemas: []
    """Returns the calls in such a text. Raises ValueError, or what msgspec raises, if it is none."""

    @property
    def ends(self) -> tuple[str, ...]:
        """Texts that end arguments which have no brace at their end. One that begins as JSON may is none of them, since
        arguments are sent letter by letter."""
        return tuple(sign for sign in (*self.closes, *self.marks) if sign[0] not in "[{")

    def calls(self, text: str, schemas: Schemas) -> list[Call]:
        """Return the calls in a text, each of a function that was offered; none if one of them does not parse."""
        try:
            found = self.read(text, schemas)
        except (ValueError, *MALFORMED):
            return []
        return found if all(name in schemas for name, _ in found) else []


# -- JSON --------------------------------------------------------------------------------------------------------------


_ABSENT: Final = msgspec.Raw(b"")


class _Written(msgspec.Struct):
    """A call as JSON. The arguments stay as the model wrote them."""

    name: Annotated[str, msgspec.Meta(max_length=64)]
    arguments: msgspec.Raw = _ABSENT
    parameters: msgspec.Raw = _ABSENT


def _starts(signs: str, is_python: bool = False) -> Callable[[str, int], Extent | None]:
    def extent(text: str, at: int) -> Extent | None:
        if at == len(text):
            return None
        if text[at] not in signs:
            raise ValueError(f"it does not begin with one of {signs}")
        return Brackets(at, is_python)

    return extent


def _read_json(text: str, schemas: Schemas) -> list[Call]:
    """Read one call, or a list of them."""
    content = text.encode(errors="replace")
    several = text.startswith("[")
    written = msgspec.json.decode(content, type=list[_Written]) if several else [_written(content)]
    return [(one.name, _arguments(one)) for one in written]


def _written(content: bytes) -> _Written:
    return msgspec.json.decode(content, type=_Written)


def _arguments(written: _Written) -> str:
    return _checked(bytes(written.arguments) or bytes(written.parameters) or b"{}")


def _checked(raw: bytes) -> str:
    """Return arguments that are a JSON object, or one in a string, as some models write it; null is none."""
    found = msgspec.json.decode(raw)
    if found is None:
        return "{}"
    if isinstance(found, str):
        raw = found.encode(errors="replace")
        found = msgspec.json.decode(raw)
    if not isinstance(found, dict) or is_deep(found):
        raise ValueError("arguments are no object")
    return raw.decode()


# -- Mistral's --------------------------------------------------------------------------------------------------------


_NAMED: Final = re.compile(r"([a-zA-Z0-9_-]{1,64})(?:\[CALL_ID\][a-zA-Z0-9]{1,64})?(?:\[ARGS\])?\s{0,16}(?=\{)")
_NAMED_CHARS_MAX: Final = 256
"""More than `_NAMED` matches."""


def _mistral_extent(text: str, at: int) -> Extent | None:
    if at == len(text):
        return None
    if text[at] in "[{":
        return Brackets(at)
    named = _NAMED.match(text, at)
    if named:
        return Brackets(named.end())
    if "{" in text[at:] or len(text) - at > _NAMED_CHARS_MAX:
        raise ValueError("it has no name")
    return None


def _mistral_opened(text: str, at: int) -> Opened | None:
    named = _NAMED.match(text, at)
    return Opened(named[1], named.end(), "") if named else opened_json(text, at)


def _read_mistral(text: str, schemas: Schemas) -> list[Call]:
    named = _NAMED.match(text)
    return [(named[1], _checked(text[named.end() :].encode()))] if named else _read_json(text, schemas)


# -- tags of Qwen3-Coder ----------------------------------------------------------------------------------------------

_FUNCTION: Final = "<function="
_OPENED: Final = re.compile(r"<function=([a-zA-Z0-9_-]{1,64})>\s*")
_PYTHON_WORDS: Final = {"True": True, "False": False, "None": None}
_PARAMETER: Final = re.compile(r"<parameter=([^<>]{1,256})>")


def _tags_extent(text: str, at: int) -> Extent | None:
    begin = text[at : at + len(_FUNCTION)]
    if not _FUNCTION.startswith(begin):
        raise ValueError("it calls no function")
    return Tags(at) if begin == _FUNCTION else None


def _read_tags(text: str, schemas: Schemas) -> list[Call]:
    opened = _OPENED.match(text)
    if not opened or opened[1] not in schemas:
        raise ValueError("it names no function")
    properties = schemas[opened[1]].get("properties")
    known = properties if isinstance(properties, dict) else {}
    body = text[opened.end() : -len(_FUNCTION_ENDS)].rstrip()
    arguments: dict[str, Any] = {}
    for part in re.split(r"(?<=</parameter>)\s*(?=<parameter=)", body) if body else ():
        named = _PARAMETER.match(part)
        if not named or not part.endswith(_PARAMETER_ENDS):
            raise ValueError("it has something else than parameters")
        value = part[named.end() : -len(_PARAMETER_ENDS)].removeprefix("\n").removesuffix("\n")
        arguments[named[1]] = _typed(value, known.get(named[1]))
    if is_deep(arguments):
        raise ValueError("arguments are nested too deeply")
    return [(opened[1], msgspec.json.encode(arguments).decode())]


def _typed(value: str, schema: Any) -> Any:
    """Return a value as its schema has it: text, or JSON. What is no JSON is text; Python's True and None are meant."""
    kind = schema.get("type") if isinstance(schema, dict) else "string"
    kinds = kind if isinstance(kind, list) else [kind]
    if "string" in kinds:
        return None if value == "null" and "null" in kinds else value
    if value in _PYTHON_WORDS:
        return _PYTHON_WORDS[value]
    try:
        return msgspec.json.decode(value.encode(errors="replace"))
    except MALFORMED:
        return value


def _read_python(text: str, schemas: Schemas) -> list[Call]:
    return [(name, msgspec.json.encode(arguments).decode()) for name, arguments in read_python_calls(text)]


# -- the table -------------------------------------------------------------------------------------------------------


FORMATS: Final[Mapping[str, CallFormat]] = {
    form.name: form
    for form in (
        CallFormat(
            "hermes",
            ("<tool_call>",),
            closes=("</tool_call>",),
            forced="<tool_call>\n",
            extent=_starts("{["),
            opened=opened_json,
            read=_read_json,
        ),
        CallFormat(
            "qwen3_coder",
            ("<tool_call>",),
            opening=_FUNCTION,
            closes=("</tool_call>",),
            extent=_tags_extent,
            read=_read_tags,
        ),
        CallFormat(
            "mistral",
            ("[TOOL_CALLS]",),
            inner=("[CALL_ID]", "[ARGS]"),
            forced="[TOOL_CALLS]",
            is_list=True,
            extent=_mistral_extent,
            opened=_mistral_opened,
            read=_read_mistral,
        ),
        CallFormat(
            "llama3_json",
            ("<|python_tag|>",),
            bare="{",
            separators=";",
            forced="",
            arguments="parameters",
            extent=_starts("{"),
            opened=opened_json,
            read=_read_json,
        ),
        CallFormat(
            "pythonic",
            ("<|python_start|>",),
            bare="[",
            closes=("<|python_end|>",),
            extent=_starts("[", is_python=True),
            read=_read_python,
        ),
    )
}
_SIGNS_OF: Final = (
    (("[TOOL_CALLS]",), "mistral"),
    (("<function=", "<parameter="), "qwen3_coder"),
    (("<tool_call>",), "hermes"),
    (("[func_name1(",), "pythonic"),
    (("<|python_tag|>",), "llama3_json"),
    (('"parameters": dictionary',), "llama3_json"),
)
"""The texts that a template of each form has, all of a line; the first line that holds counts."""
_TAKES_TOOLS: Final = re.compile(r"\btools\b")


def takes_tools(template: str) -> bool:
    """Return whether a template writes the functions that it is given."""
    return _TAKES_TOOLS.search(template) is not None


def check_parser(chosen: str) -> None:
    """Raise ConfigError for what --tool-parser does not take."""
    if chosen not in (AUTO, *FORMATS):
        raise ConfigError(f"--tool-parser {plain(chosen, 80)} is not known: give {AUTO}, {', '.join(FORMATS)}")


def format_of(template: str, chosen: str = AUTO) -> CallFormat | None:
    """Return the form of the model with this template; None if the template does not show it. `chosen`: what
    --tool-parser says. Raises ConfigError."""
    check_parser(chosen)
    if chosen == AUTO:
        return next((FORMATS[name] for signs, name in _SIGNS_OF if all(sign in template for sign in signs)), None)
    return FORMATS[chosen]
