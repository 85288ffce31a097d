"""Tools of a request: what is read of them, what a template gets, and what is refused by name."""

from __future__ import annotations

import json
from typing import Any, cast

import pytest

from peer.model.text_rules import TextRules
from swarm.gateway.asks import GenerationAsk, read_chat
from swarm.gateway.errors import ApiError
from swarm.gateway.json_depth import DEPTH_MAX
from swarm.gateway.template import ChatTemplate, TemplateFailed, ToolsRefused, open_template

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather <now> in „Köln“",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            "required": ["city"],
        },
    },
}
CLOCK = {"type": "function", "function": {"name": "clock"}}
CALLED = {
    "role": "assistant",
    "content": None,
    "tool_calls": [
        {
            "id": "call_1",
            "type": "function",
            "function": {"name": "get_weather", "arguments": '{"city": "Bonn", "n": 1}'},
        },
        {"id": "call_2", "type": "function", "function": {"name": "clock", "arguments": ""}},
    ],
}
TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "How is it there?"},
    CALLED,
    {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
    {"role": "tool", "tool_call_id": "call_2", "content": [{"type": "text", "text": "12:00"}]},
]
# in the form of Hermes and Qwen, with what else templates do: an indent, the name of a result
TOOLED = """{{- '<|im_start|>system\\n' }}
{%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n' }}{%- endif %}
{%- if tools %}
    {{- '<tools>' }}{%- for tool in tools %}{{- '\\n' }}{{- tool | tojson }}{{- tool.function | tojson(indent=4) }}{%- endfor %}
    {{- '</tools>\\nAnswer <tool_call>\\n{"name": ..., "arguments": ...}\\n</tool_call>' }}
{%- endif %}
{{- '<|im_end|>\\n' }}
{%- for message in messages %}
    {%- if message.role == 'assistant' and message.tool_calls %}
        {{- '<|im_start|>assistant' }}{%- if message.content %}{{- '\\n' + message.content }}{%- endif %}
        {%- for call in message.tool_calls %}
            {{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- call.function.arguments | tojson }}{{- '}\\n</tool_call>' }}{{- call.id }}
            {%- for name, value in call.function.arguments.items() %}{{- name }}{%- endfor %}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {{- '<tool_response>' + message.name + message.tool_call_id + message.content + '</tool_response>\\n' }}
    {%- elif message.role != 'system' %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""


def chat(**body: Any) -> GenerationAsk:
    return read_chat(json.dumps({"model": "m", "messages": [{"role": "user", "content": "Hi"}], **body}).encode())


def refusal(**body: Any) -> ApiError:
    with pytest.raises(ApiError) as refused:
        chat(**body)
    assert refused.value.status == 400
    return refused.value


def golden(talk: list[dict[str, Any]], tools: list[dict[str, Any]] | None) -> str:
    """Return what `transformers` makes of a conversation with tools."""
    from transformers.utils.chat_template_utils import render_jinja_template

    texts, _ = cast(Any, render_jinja_template)(
        [talk], chat_template=TOOLED, tools=tools, add_generation_prompt=True, bos_token="<s>", eos_token="</s>"
    )
    return str(texts[0])


@pytest.mark.process
async def test_a_template_gets_tools_as_transformers_gives_them() -> None:
    function = {**CLOCK["function"], "parameters": {"type": "object", "properties": {}}}  # type: ignore[dict-item]
    tools = [WEATHER, {"type": "function", "function": function}]
    first, second = CALLED["tool_calls"]
    calls = [
        {**first, "function": {"name": "get_weather", "arguments": {"city": "Bonn", "n": 1}}},  # type: ignore[dict-item]
        {**second, "function": {"name": "clock", "arguments": {}}},  # type: ignore[dict-item]
    ]
    talk = [
        *TALK[:2],
        {"role": "assistant", "content": "", "tool_calls": calls},
        {**TALK[3], "name": "get_weather"},
        {**TALK[4], "name": "clock", "content": "12:00"},
    ]
    ask, quiet = chat(tools=[WEATHER, CLOCK], messages=TALK), chat(tools=[WEATHER], tool_choice="none", messages=TALK)
    assert ask.tools is not None and quiet.tools is None
    async with open_template(TextRules(bos="<s>", eos="</s>", chat_template=TOOLED)) as template:
        assert template.form.name == "hermes"
        assert await template.render(ask.messages, ask.tools.given) == golden(talk, tools)
        assert await template.render(quiet.messages) == golden(talk, None)


@pytest.mark.process
async def test_mistrals_templates_get_ids_of_nine_letters() -> None:
    source = "[TOOL_CALLS]{{ tools }}{% for m in messages %}{{ (m.tool_calls or [m])[0].id }} {{ m.tool_call_id }};{% endfor %}"
    async with open_template(TextRules(chat_template=source)) as template:
        text = await template.render(chat(messages=TALK[1:4]).messages)
    called, answered = text.split(";")[1].strip(), text.split(";")[2].strip()
    assert called == answered and len(called) == 9 and called.isalnum()


async def test_a_model_that_takes_no_tools_says_so() -> None:
    with pytest.raises(ToolsRefused, match="no chat template"):
        _ = ChatTemplate().form
    with pytest.raises(TemplateFailed, match="calls of tools"):
        await ChatTemplate().render(chat(messages=TALK).messages)
    for source, words in (("{{ messages }}", "writes no tools"), ("{{ tools }}", "--tool-parser")):
        async with open_template(TextRules(chat_template=source)) as template:
            with pytest.raises(ToolsRefused, match=words):
                _ = template.form
    async with open_template(TextRules(chat_template="{{ tools }}"), parser="pythonic") as template:
        assert template.form.name == "pythonic"


def test_what_is_read_of_tools() -> None:
    strict = {"type": "function", "vendor": 1, "function": {**WEATHER["function"], "strict": True}}  # type: ignore[dict-item]
    ask = chat(tools=[strict, CLOCK], parallel_tool_calls=False)
    assert ask.tools is not None and not ask.tools.is_parallel and ask.tools.given[0] == WEATHER
    assert ask.ignored == ("tools.vendor", "tools.strict")
    assert ask.tools.parameters["clock"] == {"type": "object", "properties": {}}
    allowed = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [CLOCK]}}
    ask = chat(tools=[WEATHER, CLOCK], tool_choice=allowed)
    assert ask.tools is not None and list(ask.tools.parameters) == ["clock"]
    for none in (
        {},
        {"tools": []},
        {"tools": None},
        {"tools": [CLOCK], "tool_choice": "none"},
        {"tool_choice": "auto"},
    ):
        assert chat(**none).tools is None and chat(**none).ignored == ()


@pytest.mark.parametrize(
    "choice",
    [
        "required",
        {"type": "function", "function": {"name": "clock"}},
        {"type": "custom", "custom": {"name": "clock"}},
        {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [CLOCK]}},
    ],
)
def test_a_call_cannot_be_forced(choice: Any) -> None:
    error = refusal(tools=[CLOCK], tool_choice=choice)
    assert (error.code, error.param) == ("unsupported_parameter", "tool_choice")
    assert "cannot force a call: send auto or none" in str(error)


def named(name: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def deep(levels: int) -> Any:
    value: Any = {}
    for _ in range(levels):
        value = {"properties": value}
    return value


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"tools": [named(f"f{index}") for index in range(129)]}, "129 functions"),
        ({"tools": [named("f"), named("f")]}, "name f of another"),
        ({"tools": [named("a b")]}, "'a b': send 1 to 64"),
        ({"tools": [named("x" * 65)]}, "send 1 to 64"),
        ({"tools": [named(None)]}, "send 1 to 64"),
        ({"tools": ["f"]}, "no object"),
        ({"tools": [{"type": "custom", "custom": {"name": "f"}}]}, "type 'custom'"),
        ({"tools": [{"type": "function"}]}, "function is no object"),
        ({"tools": [{"function": {"name": "f", "parameters": []}}]}, "parameters is no object"),
        ({"tools": [{"function": {"name": "f", "description": 1}}]}, "description is no text"),
        ({"tools": [{"function": {"name": "f", "parameters": deep(DEPTH_MAX)}}]}, "nested deeper"),
        ({"tools": [{"function": {"name": "f", "description": "x" * (256 << 10)}}]}, "more than 262144"),
        ({"tools": [CLOCK], "tool_choice": "always"}, "not one of none, auto"),
        (
            {"tools": [CLOCK], "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [WEATHER]}},
            "not in tools",
        ),
    ],
)
def test_tools_have_bounds(change: dict[str, Any], words: str) -> None:
    error = refusal(**change)
    assert words in str(error) and error.param in change


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ({"role": "tool", "content": "x"}, "tool_call_id is no text"),
        ({"role": "tool", "tool_call_id": "call_9", "content": "x"}, "no call before it"),
        ({"role": "tool", "tool_call_id": "x" * 129, "content": "x"}, "1 to 128"),
        ({"role": "user", "content": "x", "tool_calls": [{}]}, "tool_calls is not supported"),
        ({"role": "assistant", "tool_calls": {}}, "no list"),
        ({"role": "assistant", "tool_calls": [{"type": "custom", "id": "1"}]}, "no call of a function"),
        ({"role": "assistant", "tool_calls": [{"id": "1", **named("a.b")}]}, "send 1 to 64"),
        (
            {"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": "[1]"}}]},
            "no JSON object",
        ),
        (
            {"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": {}}}]},
            "no JSON object",
        ),
        ({"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": ""}}]}, "id is no text"),
        ({"role": "assistant", "tool_calls": [{}] * 129}, "no list of at most 128"),
    ],
)
def test_a_history_of_calls_has_bounds(message: dict[str, Any], words: str) -> None:
    error = refusal(messages=[CALLED, message])
    assert words in str(error) and error.param == "messages"


def test_hostile_arguments_and_schemas_are_no_burden() -> None:
    many = json.dumps({"a": [[[]]] * 60_000})
    arguments = {"id": "1", "function": {"name": "f", "arguments": many}}
    assert chat(messages=[{"role": "assistant", "tool_calls": [arguments]}]).messages[0].calls
    arguments["function"] = {"name": "f", "arguments": '{"a":' * 50_000}
    assert refusal(messages=[{"role": "assistant", "tool_calls": [arguments]}]).param == "messages"
