"""The process that runs a chat template: `python -m swarm.gateway.template_child SOCKET_FD PARENT_PID`.

The template comes from a stranger, the founder of the model. So it runs in jinja2's sandbox, in a process that can open
no file but Python's own, make no connection and start no program, and whose memory is limited. The parent ends this
process when a conversation takes too long. Frames are four bytes of length and JSON: the template first, answered by
an empty object; then conversations, each answered by its text or by an error.

What a template is given is what `transformers` gives it, so that checkpoints' templates work unchanged.
"""

from __future__ import annotations

import datetime
import json
import os
import resource
import signal
import struct
import sys
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, BinaryIO, Final

from jinja2 import Template, TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from peer.confinement import kernel
from peer.confinement.confine import confine
from peer.confinement.grants import Grants

MEMORY_BYTES_MAX: Final = 512 << 20
"""Of address space: Python and jinja2 take about 60 MB."""
TEXT_CHARS_MAX: Final = 2 << 20
ERROR_CHARS_MAX: Final = 300
FRAME: Final = struct.Struct(">I")


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


def compiled(source: str) -> Template:
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


def rendered(template: Template, given: Mapping[str, Any]) -> str:
    """Return the text of a conversation. Raises ValueError if it is too long, and what the template raises."""
    pieces, size = list[str](), 0
    for piece in template.generate(**given):
        size += len(piece)
        if size > TEXT_CHARS_MAX:
            raise ValueError(f"it writes more than {TEXT_CHARS_MAX} characters")
        pieces.append(piece)
    return "".join(pieces)


def read_frame(source: BinaryIO) -> Any:
    """Return the next frame; None at the end."""
    head = source.read(FRAME.size)
    if len(head) < FRAME.size:
        return None
    (size,) = FRAME.unpack(head)
    return json.loads(source.read(size))


def write_frame(sink: BinaryIO, value: Any) -> None:
    body = json.dumps(value).encode()
    sink.write(FRAME.pack(len(body)) + body)
    sink.flush()


def _confine(parent_pid: int) -> None:
    if sys.platform == "linux":
        kernel.follow_parent(signal.SIGKILL)
    if os.getppid() != parent_pid:
        os._exit(0)
    confine(Grants(private=os.devnull))
    with suppress(ValueError, OSError):  # not on every system
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES_MAX, MEMORY_BYTES_MAX))


def _answer(source: str, given: Mapping[str, Any], known: dict[str, Template]) -> dict[str, str]:
    try:
        if source not in known:
            known[source] = compiled(source)
        return {"text": rendered(known[source], given)}
    except MemoryError:
        return {"error": f"it needs more than {MEMORY_BYTES_MAX >> 20} MB of memory"}
    except TemplateError as error:
        return {"error": (error.message or type(error).__name__)[:ERROR_CHARS_MAX]}
    except Exception as error:  # noqa: BLE001  a stranger's program can raise anything
        return {"error": f"{type(error).__name__}: {error}"[:ERROR_CHARS_MAX]}


def main() -> None:
    """Serve the parent until it closes the socket."""
    socket_fd, parent_pid = int(sys.argv[1]), int(sys.argv[2])
    _confine(parent_pid)
    known: dict[str, Template] = {}
    with open(socket_fd, "rb", closefd=False) as source, open(socket_fd, "wb", closefd=False) as sink:
        first = read_frame(source)
        if first is None:
            return
        write_frame(sink, {})
        while (given := read_frame(source)) is not None:
            write_frame(sink, _answer(first["template"], given, known))


if __name__ == "__main__":
    main()
