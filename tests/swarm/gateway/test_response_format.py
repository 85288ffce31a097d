"""`response_format` and forced calls: a random model writes JSON, through the web server, a client and the servers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from jsonschema import Draft202012Validator as Checker

from peer.ipc.grammar_messages import ANY_OBJECT, SCHEMA_CHARS_MAX, Grammar
from swarm.gateway.asks import read_chat, read_completion
from swarm.gateway.errors import ApiError
from swarm.gateway.response_format import read_format, schema_grammar
from tests.swarm.gateway.served_model import KEY, NAME, ServedModel, served_model
from tests.swarm.gateway.test_forced_calls import BY_NAME, SCHEMAS, TOOLS
from tests.swarm.gateway.tool_models import TEMPLATES

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "sizes": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "maxItems": 3},
    },
    "required": ["name", "sizes"],
    "additionalProperties": False,
}
FORMAT: Any = {"type": "json_schema", "json_schema": {"name": "thing", "schema": SCHEMA, "strict": True}}
ASK: dict[str, Any] = {"model": NAME, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 200}


def of_schema(**fields: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": fields}


@pytest.mark.parametrize("given", [None, {}, {"type": "text"}])
def test_any_text_has_no_grammar(given: Any) -> None:
    assert read_format(given) is None


def test_both_kinds_of_requests_have_a_format() -> None:
    body = {"model": NAME, "response_format": FORMAT}
    for ask in (
        read_chat(json.dumps({**body, "messages": ASK["messages"]}).encode()),
        read_completion(json.dumps({**body, "prompt": "a"}).encode()),
    ):
        assert ask.grammar is not None and json.loads(ask.grammar.schema) == SCHEMA
    assert read_format({"type": "json_object"}) == ANY_OBJECT == read_format(of_schema(name="a"))
    assert schema_grammar({"type": "null"}, "<a>", "</a>") == Grammar('{"type":"null"}', "<a>", "</a>")


@pytest.mark.parametrize(
    "given",
    [
        {"type": "xml"},
        {"schema": {}},
        {"type": 7},
        {"type": "json_schema"},
        {"type": "json_schema", "json_schema": SCHEMA},
        of_schema(schema=SCHEMA),
        of_schema(name="a", schema=[1]),
        of_schema(name="a", schema=True),
        of_schema(name="a", schema=SCHEMA, schemas=SCHEMA),
        of_schema(name="a", schema={"const": "a" * SCHEMA_CHARS_MAX}),
    ],
)
def test_what_is_no_format_is_refused(given: Any) -> None:
    with pytest.raises(ApiError) as refused:
        read_format(given)
    assert (refused.value.status, refused.value.param) == (400, "response_format") and ": " in str(refused.value)


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
def test_answers_follow_their_schema(client: openai.OpenAI) -> None:
    answers = client.chat.completions.create(**ASK, response_format=FORMAT, n=3, seed=4, temperature=1.0)
    for choice in answers.choices:
        assert choice.finish_reason == "stop"
        Checker(SCHEMA).validate(json.loads(choice.message.content or ""))
    texts = [choice.message.content for choice in answers.choices]
    assert len(set(texts)) == 3
    parts = client.chat.completions.create(**ASK, response_format=FORMAT, stream=True, seed=4, temperature=1.0)
    choices = [part.choices[0] for part in parts]
    assert "".join(choice.delta.content or "" for choice in choices) == texts[0]
    assert choices[-1].finish_reason == "stop"
    text = client.completions.create(
        model=NAME, prompt="Hello", max_tokens=200, temperature=0, extra_body={"response_format": FORMAT}
    )
    Checker(SCHEMA).validate(json.loads(text.choices[0].text))


@pytest.mark.process
def test_a_short_answer_is_cut(client: openai.OpenAI) -> None:
    long = {"type": "object", "properties": {"a": {"type": "string", "minLength": 20}}, "required": ["a"]}
    form: Any = {"type": "json_schema", "json_schema": {"name": "long", "schema": long}}
    answer = client.chat.completions.create(**{**ASK, "max_tokens": 9}, response_format=form)
    choice = answer.choices[0]
    assert choice.finish_reason == "length" and (choice.message.content or "").startswith("{")


@pytest.mark.process
@pytest.mark.parametrize("stream", [False, True])
def test_an_unsupported_keyword_is_refused_by_name(client: openai.OpenAI, stream: bool) -> None:
    with pytest.raises(openai.BadRequestError, match="has uniqueItems, which") as refused:
        client.chat.completions.create(
            **ASK,
            response_format=of_schema(name="a", schema={"type": "array", "uniqueItems": True}),  # type: ignore[call-overload]
            stream=stream,
        )
    assert refused.value.param == "response_format"


# -- forced calls ------------------------------------------------------------------------------------------------------


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
def test_a_random_model_writes_the_format_or_calls(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {**ASK, "tools": TOOLS, "response_format": FORMAT, "temperature": 1.0}
    found = client.chat.completions.create(**asked, parallel_tool_calls=False, n=8, seed=2)
    for choice in found.choices:
        if choice.finish_reason == "tool_calls":
            (call,) = choice.message.tool_calls or []
            assert call.type == "function" and choice.message.content is None
            Checker(SCHEMAS[call.function.name]).validate(json.loads(call.function.arguments))
        else:
            assert choice.finish_reason == "stop" and choice.message.tool_calls is None
            Checker(SCHEMA).validate(json.loads(choice.message.content or ""))
    assert len({choice.finish_reason for choice in found.choices}) == 2
    forced = client.chat.completions.create(**asked, tool_choice=BY_NAME, seed=2).choices[0]
    assert forced.finish_reason == "tool_calls"


@pytest.mark.process
def test_a_schema_that_is_not_supported_is_named(client: openai.OpenAI) -> None:
    unique = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
    function: Any = {"type": "function", "function": {"name": "f", "parameters": unique}}
    with pytest.raises(openai.BadRequestError, match="uniqueItems") as refused:
        client.chat.completions.create(**ASK, tools=[function], tool_choice="required")
    assert refused.value.param == "tools"
