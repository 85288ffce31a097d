"""Calls that a `tool_choice` forces: a random model writes them, through the web server, a client, and the servers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from jsonschema import Draft202012Validator as Checker

from swarm.gateway.asks import read_chat
from swarm.gateway.errors import ApiError
from swarm.gateway.forced_calls import forced_calls
from swarm.gateway.reading.call_formats import FORMATS
from swarm.gateway.reading.tool_calls import CallStream
from swarm.gateway.tools import Tools
from tests.swarm.gateway.served_model import KEY, NAME, ServedModel, served_model
from tests.swarm.gateway.tool_models import TEMPLATES

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
    calls = [(one.name, json.loads(one.arguments)) for part in parts for one in part.calls]
    assert calls == [("plant", {"kind": "ash"})] and not any(part.text for part in parts)


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


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedModel]:
    template = tmp_path_factory.mktemp("template") / "hermes.jinja"
    template.write_text(TEMPLATES["hermes"])
    with served_model(tmp_path_factory.mktemp("served"), "--template", str(template)) as model:
        yield model


@pytest.fixture
def client(served: ServedModel) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key=KEY, max_retries=0, timeout=60) as made:
        yield made


@pytest.mark.process
def test_a_random_model_calls_what_it_must(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {**ASK, "tools": TOOLS, "seed": 4, "temperature": 1.0}
    free = client.chat.completions.create(**{**asked, "max_tokens": 20}).choices[0].message
    assert not free.tool_calls and free.content
    found = client.chat.completions.create(**asked, tool_choice="required", n=6)
    names, texts = set(), list[tuple[str, str]]()
    for choice in found.choices:
        assert choice.finish_reason == "tool_calls" and choice.message.content is None
        (call,) = choice.message.tool_calls or []
        assert call.type == "function"
        Checker(SCHEMAS[call.function.name]).validate(json.loads(call.function.arguments))
        names.add(call.function.name)
        texts.append((call.function.name, call.function.arguments))
    assert names == {"weather", "plant"} and len(set(texts)) > 2
    deltas = [
        part.choices[0].delta
        for part in client.chat.completions.create(**asked, tool_choice="required", stream=True)
        if part.choices
    ]
    pieces = [one.function for delta in deltas for one in delta.tool_calls or () if one.function]
    streamed = "".join(one.name or "" for one in pieces), "".join(one.arguments or "" for one in pieces)
    assert streamed == texts[0] and not any(delta.content for delta in deltas)
    for choice in client.chat.completions.create(**asked, tool_choice=BY_NAME, n=2).choices:
        assert [call.function.name for call in choice.message.tool_calls or () if call.type == "function"] == ["plant"]


@pytest.mark.process
def test_a_schema_that_is_not_supported_is_named(client: openai.OpenAI) -> None:
    unique = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
    function: Any = {"type": "function", "function": {"name": "f", "parameters": unique}}
    with pytest.raises(openai.BadRequestError, match="uniqueItems") as refused:
        client.chat.completions.create(**ASK, tools=[function], tool_choice="required")
    assert refused.value.param == "tools"
