"""Chat templates: strangers' programs in Jinja2, run in its sandbox. Only a confined worker runs them.

A template gets the same variables as in `transformers`, so that checkpoints' templates work unchanged.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
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


class _Generation(Extension):
    """The tag {% generation %}, by which trainers find the assistant's words. Here it shows what it holds."""

    tags = {"generation"}  # noqa: RUF012  as jinja2 declares it

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True)).set_lineno(line)


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


def _compiled(source: str) -> Template:
    """Compile a template. Raises what jinja2 raises."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    environment.globals["dict"] = _MakeDict()
    environment.globals["namespace"] = _PublicNamespace
    return environment.from_string(source)


class ChatTemplateCode:
    """The template of one model, compiled when it is first used."""

    def __init__(self, source: str, bos: str, eos: str) -> None:
        self._source, self._bos, self._eos = source, bos, eos
        self._template: Template | None = None

    def render(self, messages: Sequence[Mapping[str, str]]) -> str:
        """Return a conversation as text that ends where the assistant's next words begin. Raises ValueError, whose text
        says why the template does not write it."""
        try:
            self._template = self._template or _compiled(self._source)
            return self._rendered(self._template, messages)
        except MemoryError:
            reason = "it needs too much memory"
        except TemplateError as error:
            reason = error.message or type(error).__name__
        except Exception as error:  # noqa: BLE001  a stranger's program can raise anything
            reason = f"{type(error).__name__}: {error}"
        raise ValueError(reason[:_FAULT_CHARS_MAX])

    def _rendered(self, template: Template, messages: Sequence[Mapping[str, str]]) -> str:
        given = {
            "messages": [dict(message) for message in messages],
            "add_generation_prompt": True,
            "tools": None,
            "documents": None,
            "bos_token": self._bos,
            "eos_token": self._eos,
        }
        room = OWN_CHARS_MAX + sum(len(text) for message in messages for text in message.values())
        pieces, size = list[str](), 0
        for piece in template.generate(given):
            size += len(piece)
            if size > room:
                raise TemplateError(f"it writes more than {OWN_CHARS_MAX} characters beside the messages")
            pieces.append(piece)
        return "".join(pieces)
