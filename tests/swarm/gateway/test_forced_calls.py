"""Calls that a `tool_choice` forces: grammars and reading. In test_response_format.py a model writes such calls."""

from __future__ import annotations

import json
from typing import Any

import pytest
from jsonschema import Draft202012Validator as Checker

from swarm.gateway.asks import read_chat
from swarm.gateway.errors import ApiError
from swarm.gateway.forced_calls import forced_calls
from swarm.gateway.reading.call_formats import FORMATS
from swarm.gateway.reading.tool_calls import CallStream
from swarm.gateway.tools import Tools
from tests.swarm.gateway.served_model import NAME

PLACE: dict[str, Any] = {
    "type": "object",
    "properties": {
        "place": {"type": "string", "maxLength": 6},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["place", "days"],
    "additionalProperties": False,
}
TREE: dict[str, Any] = {
    "properties": {"kind": {"$ref": "#/$defs/Kind"}},
    "required": ["kind"],
    "additionalProperties": False,
    "$defs": {"Kind": {"enum": ["oak", "ash"]}},
}
SCHEMAS = {"weather": PLACE, "plant": TREE}
TOOLS: list[Any] = [{"type": "function", "function": {"name": k, "parameters": v}} for k, v in SCHEMAS.items()]
ASK: dict[str, Any] = {"model": NAME, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 200}
BY_NAME: Any = {"type": "function", "function": {"name": "plant"}}


def tools(*forced: str, is_parallel: bool = True) -> Tools:
    return Tools(tuple(TOOLS), is_parallel, forced)


@pytest.mark.parametrize("form", ["hermes", "mistral", "llama3_json"])
def test_what_follows_the_grammar_is_read_as_the_call(form: str) -> None:
    forced = forced_calls(FORMATS[form], tools("weather", "plant"))
    arguments = "parameters" if form == "llama3_json" else "arguments"
    call = {"name": "plant", arguments: {"kind": "ash"}}
    written = [call] if form == "mistral" else call
    Checker(json.loads(forced.grammar.schema)).validate(written)
    for wrong in ({**call, "name": "other"}, {**call, arguments: {"kind": "fir"}}, {"name": "plant"}, {**call, "a": 1}):
        assert not Checker(json.loads(forced.grammar.schema)).is_valid([wrong] if form == "mistral" else wrong)
    stream = CallStream(FORMATS[form], SCHEMAS)
    parts = [*stream.push(forced.begin), *stream.push(json.dumps(written)), *stream.finish()]
    pieces = [one for part in parts for one in part.calls]
    assert [(one.name, json.loads(one.arguments), one.end) for one in pieces] == [
        ("plant", {"kind": "ash"}, "completed")
    ]
    assert not any(part.text for part in parts)


def test_arguments_are_objects_and_one_call_is_one() -> None:
    """The schema of `plant` does not say that it is of objects."""
    one = json.loads(forced_calls(FORMATS["mistral"], tools("plant", is_parallel=False)).grammar.schema)
    assert one["maxItems"] == 1 and one["$defs"]["plant"]["type"] == "object"
    assert Checker(one).is_valid([{"name": "plant", "arguments": {"kind": "oak"}}])
    assert not Checker(one).is_valid([{"name": "plant", "arguments": []}])
    assert not Checker(one).is_valid([{"name": "weather", "arguments": {"place": "a", "days": 1}}])


@pytest.mark.parametrize("form", ["pythonic", "qwen3_coder"])
def test_a_form_that_is_no_json_cannot_be_forced(form: str) -> None:
    with pytest.raises(ApiError, match=f"in the form {form}, which is no JSON .*: send tool_choice auto") as refused:
        forced_calls(FORMATS[form], tools("plant"))
    assert (refused.value.code, refused.value.param) == ("unsupported_parameter", "tool_choice")


def test_choices_name_what_they_force() -> None:
    allowed = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [BY_NAME]}}
    for choice, forced, given in (
        ("required", ("weather", "plant"), 2),
        (BY_NAME, ("plant",), 2),
        (allowed, ("plant",), 1),
        ("auto", (), 2),
    ):
        ask = read_chat(json.dumps({**ASK, "tools": TOOLS, "tool_choice": choice}).encode())
        assert ask.tools is not None and (ask.tools.forced, len(ask.tools.given)) == (forced, given)
