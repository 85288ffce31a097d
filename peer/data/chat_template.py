"""Chat templates: strangers' programs in Jinja2, run in its sandbox. Only a confined worker runs them.

A template gets the same variables as in `transformers`, so that checkpoints' templates work unchanged.
"""

from __future__ import annotations

import datetime
import json
import secrets
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

from jinja2 import Template, TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

OWN_CHARS_MAX: Final = 64 << 10
"""The characters that a template may write beside the messages themselves."""
_FAULT_CHARS_MAX: Final = 300


_DAY: Final = datetime.datetime(2024, 7, 26)
"""Today, in data sets."""
_BEGINS: Final = f"\x02{secrets.token_hex(16)}\x02"
_ENDS: Final = f"\x03{secrets.token_hex(16)}\x03"
"""Stand around what the tag {% generation %} holds until a text is done. No message of a file can hold them by intent:
they differ from process to process."""


class _Generation(Extension):
    """The tag {% generation %}, by which trainers find the assistant's words. Here it shows what it holds."""

    tags = {"generation"}  # noqa: RUF012  as jinja2 declares it

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(self.shown(body)).set_lineno(line)

    def shown(self, body: list[nodes.Node]) -> list[nodes.Node]:
        """Return what stands in place of the tag and what it holds."""
        return body


class _MarkedGeneration(_Generation):
    """The same tag, where the text tells what it held."""

    def shown(self, body: list[nodes.Node]) -> list[nodes.Node]:
        begins, ends = (nodes.Output([nodes.TemplateData(mark)]) for mark in (_BEGINS, _ENDS))
        return [begins, *body, ends]


class _PublicNamespace(Namespace):
    """A namespace without names that begin with an underscore."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # `self` is a name that a template may use
        for name in dict(*args[1:], **kwargs):
            _check_name(name)
        Namespace.__init__(*args, **kwargs)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


class _MakeDict:
    """What templates know as `dict`: it makes one, and is no type."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace takes no name like {name!r}")


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Return JSON without the escapes for HTML that jinja2's own filter makes."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _compiled(source: str, generation: type[_Generation]) -> Template:
    """Compile a template. Raises what jinja2 raises."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    today = _DAY if generation is _MarkedGeneration else None
    environment.globals["strftime_now"] = lambda form: (today or datetime.datetime.now()).strftime(form)
    environment.globals["dict"] = _MakeDict()
    environment.globals["namespace"] = _PublicNamespace
    return environment.from_string(source)


class ChatTemplateCode:
    """The template of one model, compiled when it is first used."""

    def __init__(self, source: str, bos: str, eos: str) -> None:
        self._source, self._bos, self._eos = source, bos, eos
        self._templates: dict[type[_Generation], Template] = {}

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] = MappingProxyType({}),
    ) -> str:
        """Return a conversation as text that ends where the assistant's next words begin. `tools`: what the model may
        call. `variables`: more of the template's, by name. Raises ValueError, whose text says why the template does not
        write it."""
        return self._written(messages, _Generation, True, tools, variables)

    def render_tagged(
        self, messages: Sequence[Mapping[str, str]], is_open: bool = False
    ) -> tuple[str, list[tuple[int, int]]]:
        """Return a whole conversation as text, and where what the tag {% generation %} holds lies in it: half-open
        ranges of characters. With `is_open` it ends as that of `render`. The text is the same on every day: a template
        that asks for the date is given one. Raises as `render`."""
        return _untagged(self._written(messages, _MarkedGeneration, is_open))

    def _written(
        self,
        messages: Sequence[Mapping[str, Any]],
        generation: type[_Generation],
        is_open: bool,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] = MappingProxyType({}),
    ) -> str:
        try:
            if generation not in self._templates:
                self._templates[generation] = _compiled(self._source, generation)
            return self._rendered(self._templates[generation], messages, is_open, tools, variables)
        except MemoryError:
            reason = "it needs too much memory"
        except TemplateError as error:
            reason = error.message or type(error).__name__
        except Exception as error:  # noqa: BLE001  a stranger's program can raise anything
            reason = f"{type(error).__name__}: {error}"
        raise ValueError(reason[:_FAULT_CHARS_MAX])

    def _rendered(
        self,
        template: Template,
        messages: Sequence[Mapping[str, Any]],
        is_open: bool,
        tools: Sequence[Mapping[str, Any]] | None,
        variables: Mapping[str, Any],
    ) -> str:
        given = {
            "messages": [dict(message) for message in messages],
            "add_generation_prompt": is_open,
            "tools": None if tools is None else list(tools),
            "documents": None,
            "bos_token": self._bos,
            "eos_token": self._eos,
        }
        if taken := sorted(variables.keys() & (given.keys() | template.globals.keys())):
            raise TemplateError(f"{taken[0]} is a name of the template's own")
        marks = len(messages) * len(_BEGINS + _ENDS)
        room = OWN_CHARS_MAX + marks + sum(_size(value) for message in messages for value in message.values())
        room += _size(tools) + sum(map(_size, variables.values()))
        pieces, size = list[str](), 0
        for piece in template.generate({**given, **variables}):
            size += len(piece)
            if size > room:
                raise TemplateError(f"it writes more than {OWN_CHARS_MAX} characters beside the messages")
            pieces.append(piece)
        return "".join(pieces)


def _size(value: Any) -> int:
    """Return how many characters a template may write for a value: those of a text, and of others twice their JSON."""
    if value is None or isinstance(value, str):
        return len(value or "")
    return 2 * len(json.dumps(value, indent=4))


def _untagged(text: str) -> tuple[str, list[tuple[int, int]]]:
    """Return a text without the marks of tags, and what lay between them; what is empty is left out."""
    pieces, spans, size = list[str](), list[tuple[int, int]](), 0
    for number, part in enumerate(text.split(_BEGINS)):
        inside, ended, outside = part.partition(_ENDS)
        if number and ended and inside:
            spans.append((size, size + len(inside)))
        pieces += [inside, outside.replace(_ENDS, "")]
        size += sum(map(len, pieces[-2:]))
    return "".join(pieces), spans
