"""All types that bytes from outside are decoded into, found in the source: a new one is fuzzed without a line here."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, get_args

import msgspec

from tests.house.source import ROOT, tracked

PACKAGES = ("peer", "dht", "optim", "swarm")
ELSEWHERE = ("benchmarks/simulation/", "peer/model/", "peer/data/")
"""Traces that a developer writes, and JSON of files that others define: test_foreign_files.py mutates these."""
CALLED = ("Method", "Schema", "open_body", "decode", "ask", "_read")
MINOR_METHODS = 33  # fewer means that this module no longer finds them


@dataclass(frozen=True)
class WireMethod:
    """One `Method(...)` of the source."""

    name: str
    request: type[msgspec.Struct]
    reply: type[msgspec.Struct]


@cache
def calls() -> tuple[tuple[ModuleType, ast.Call, str], ...]:
    """Return each call in the packages: its module, itself, and the name of what is called."""
    found = []
    for path in tracked(*PACKAGES):
        if path.suffix != ".py" or str(path).startswith(ELSEWHERE):
            continue
        text = (ROOT / path).read_text()
        if not any(f"{name}(" in text or f"{name}[" in text for name in CALLED):  # most files: to parse all takes 1 s
            continue
        tree = ast.parse(text)
        wanted = [
            (node, called)
            for node in ast.walk(tree)
            if isinstance(node, ast.Call)
            if (called := _called(node.func)) in CALLED
        ]
        if wanted:
            module = _module(path)
            found += [(module, node, called) for node, called in wanted]
    return tuple(found)


@cache
def methods() -> dict[str, WireMethod]:
    """Return all methods of the wire by name, also those whose payload limits depend on a run."""
    found = {}
    for module, node, called in calls():
        if called != "Method" or len(node.args) < 3 or not isinstance(node.args[0], ast.Constant):
            continue
        request, reply = (_resolve(module, node.args[n]) for n in (1, 2))
        assert isinstance(request, type) and isinstance(reply, type), ast.unparse(node)
        found[str(node.args[0].value)] = WireMethod(str(node.args[0].value), request, reply)
    return found


@cache
def wire_types() -> dict[str, Any]:
    """Return by name all types that peers' and files' bytes are decoded into."""
    from peer.net.wire import ReplyHeader, RequestHeader
    from swarm.inference.messages import ServingMessage

    found: dict[str, Any] = {"RequestHeader": RequestHeader, "ReplyHeader": ReplyHeader}
    found.update({kind.__name__: kind for kind in get_args(ServingMessage)})  # of flows, which have no methods
    for method in methods().values():
        found[f"{method.name} request"] = method.request
        found[f"{method.name} reply"] = method.reply
    for module, node, called in calls():
        if called in ("open_body", "_read", "Schema", "decode"):
            given = [*node.args, *(keyword.value for keyword in node.keywords if keyword.arg == "type")]
            for value in map(lambda part, module=module: _resolve(module, part), given):  # type: ignore[misc]
                found.update({kind.__name__: kind for kind in _structs(value)})
    return found


@cache
def worker_types() -> dict[str, Any]:
    """Return by name all types of a worker's messages and results."""
    from peer.ipc.block_messages import FromBlocks
    from peer.ipc.messages import FromWorker

    found = {kind.__name__: kind for kind in (*get_args(FromWorker), *get_args(FromBlocks))}
    for module, node, called in calls():
        if called == "ask" and len(node.args) == 2:
            found.update({kind.__name__: kind for kind in _structs(_resolve(module, node.args[1]))})
    from peer.ipc.train_messages import InnerResult

    return {**found, "InnerResult": InnerResult}


def _structs(value: Any) -> Iterator[type[msgspec.Struct]]:
    for kind in get_args(value) or (value,):
        if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
            yield kind


def _called(function: ast.expr) -> str:
    while isinstance(function, ast.Subscript):
        function = function.value
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def _module(path: Path) -> ModuleType:
    return importlib.import_module(".".join(path.with_suffix("").parts).removesuffix(".__init__"))


def _resolve(module: ModuleType, node: ast.expr) -> Any:
    """Return what an expression of names means in a module, None if it is more than that."""
    if isinstance(node, ast.Name):
        return vars(module).get(node.id)
    if isinstance(node, ast.Attribute):
        return getattr(_resolve(module, node.value), node.attr, None)
    return None
