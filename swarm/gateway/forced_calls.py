"""Calls that a `tool_choice` of required or a name forces: what a grammar needs to make a model write them.

This is the seam for grammars. Until there are any, `swarm.gateway.tools` refuses such a `tool_choice`. With them,
`begin` goes to the end of the prompt and, before the answer's own text, into its `CallStream`; it obeys `schema`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from swarm.gateway.call_formats import CallFormat, Schemas


@dataclass(frozen=True)
class ForcedCalls:
    """What an answer must be that is calls alone."""

    begin: str
    """The text before the JSON; it may be a special token."""
    schema: dict[str, Any]
    """The JSON schema of the calls."""


def forced_calls(form: CallFormat, schemas: Schemas, name: str | None, is_parallel: bool) -> ForcedCalls | None:
    """Return what forces calls in a form, None if its calls are no JSON. `schemas`: of the parameters of the functions
    that were offered. `name`: of the function to call; None for any of them. `is_parallel`: whether there may be
    several calls, where the form writes them as one JSON."""
    if form.forced is None:
        return None
    wanted = schemas if name is None else {name: schemas[name]}
    calls = [_call(form.arguments, function, schema) for function, schema in wanted.items()]
    schema: dict[str, Any] = calls[0] if len(calls) == 1 else {"anyOf": calls}
    if form.is_list:
        schema = {"type": "array", "items": schema, "minItems": 1} | ({} if is_parallel else {"maxItems": 1})
    return ForcedCalls(form.forced, schema | {"$defs": {one: _moved(wanted[one], one) for one in wanted}})


def _call(arguments: str, function: str, parameters: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {"name": {"const": function}, arguments: {"$ref": f"#/$defs/{function}"}},
        "required": ["name", arguments],
        "additionalProperties": False,
    }


def _moved(schema: Any, function: str) -> Any:
    """Return a function's schema with its references to itself, as it stands in the $defs of another one."""
    if isinstance(schema, Mapping):
        return {
            name: f"#/$defs/{function}{value[1:]}"
            if name == "$ref" and isinstance(value, str) and value.startswith("#")
            else _moved(value, function)
            for name, value in schema.items()
        }
    return [_moved(inner, function) for inner in schema] if isinstance(schema, list) else schema
