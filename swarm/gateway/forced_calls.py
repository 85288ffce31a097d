"""Calls under a grammar. Where a `tool_choice` of required or a name forces them, the prompt ends with what begins a
call in the model's form, and the answer follows a grammar of the rest. Beside a `response_format` the model chooses:
its answer follows the grammar of calls or that of the format.

What begins a call may be a special token, which no grammar of letters has.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from peer.ipc.grammar_messages import CallsGrammar, Grammar
from peer.worker.text_client import ModelText
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
    return ForcedCalls(form.forced, _written(form, tools, tools.forced))


async def with_calls(grammar: Grammar, form: CallFormat, tools: Tools, text: ModelText, param: str) -> Grammar:
    """Return the grammar of an answer that follows `grammar`, or is calls of any of the tools. `text`: of the model,
    which knows whether the mark of a call is a token. `param`: what brought the grammar, for errors. Raises ApiError if
    the form's calls are no JSON, and what `ModelText.encode` raises."""
    if form.forced is None:
        raise ApiError(
            400,
            f"{param} allows calls of tools as JSON, and the model writes them in the form {form.name}, which is none:"
            " send it without them, or tool_choice none",
            code="unsupported_parameter",
            param=param,
        )
    mark, mark_id = form.marks[0], None
    if form.forced.startswith(mark):
        ids = await text.encode(mark, special=False)
        mark_id = ids[0] if len(ids) == 1 and ids[0] in text.special else None
    calls = CallsGrammar(
        _written(form, tools, tuple(tools.parameters)).schema,
        mark=form.forced if mark_id is None else form.forced.removeprefix(mark),
        mark_id=mark_id,
        close=f"\n{form.closes[0]}" if form.closes else "",
        separator=(form.separators[:1] or "\n") if tools.is_parallel and not form.is_list else None,
    )
    return msgspec.structs.replace(grammar, calls=calls)


def _written(form: CallFormat, tools: Tools, names: Sequence[str]) -> Grammar:
    """Return the grammar of the JSON in a form of calls of these functions."""
    wanted = {name: tools.parameters[name] for name in names}
    calls = [_call(form.arguments, function) for function in wanted]
    schema: dict[str, Any] = calls[0] if len(calls) == 1 else {"anyOf": calls}
    if form.is_list:
        most = {} if tools.is_parallel else {"maxItems": 1}
        schema = {"type": "array", "items": schema, "minItems": 1, **most}
    parameters = {name: {"type": "object", **_moved(given, name)} for name, given in wanted.items()}
    return schema_grammar(schema | {"$defs": parameters}, param="tools")


def _call(arguments: str, function: str) -> dict[str, Any]:
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
