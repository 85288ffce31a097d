"""Calls that a `tool_choice` of required or a name forces: the prompt ends with what begins a call in the model's form,
and the answer follows a grammar of the rest.

What begins a call may be a special token, which no grammar of letters has.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from peer.ipc.grammar_messages import Grammar
from swarm.gateway.errors import ApiError
from swarm.gateway.reading.call_formats import CallFormat
from swarm.gateway.response_format import schema_grammar
from swarm.gateway.tools import Tools


@dataclass(frozen=True)
class ForcedCalls:
    """What an answer must be that is calls alone."""

    begin: str
    """The text before the JSON, which ends the prompt."""
    grammar: Grammar
    """Of the answer: the calls as JSON."""


def forced_calls(form: CallFormat, tools: Tools) -> ForcedCalls:
    """Return what forces calls in a form. Raises ApiError if its calls are no JSON."""
    if form.forced is None:
        raise ApiError(
            400,
            f"tool_choice forces a call, and the model writes calls in the form {form.name}, which is no JSON and"
            " cannot be forced: send tool_choice auto",
            code="unsupported_parameter",
            param="tool_choice",
        )
    wanted = {name: tools.parameters[name] for name in tools.forced}
    calls = [_call(form.arguments, function, schema) for function, schema in wanted.items()]
    schema: dict[str, Any] = calls[0] if len(calls) == 1 else {"anyOf": calls}
    if form.is_list:
        most = {} if tools.is_parallel else {"maxItems": 1}
        schema = {"type": "array", "items": schema, "minItems": 1, **most}
    parameters = {name: {"type": "object", **_moved(given, name)} for name, given in wanted.items()}
    return ForcedCalls(form.forced, schema_grammar(schema | {"$defs": parameters}, param="tools"))


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
