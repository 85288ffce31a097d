"""Variables of the chat template that a request sets: what `transformers` writes with them, and what is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

from peer.data.chat_template import ChatTemplateCode
from peer.ipc.text_messages import TEMPLATE_NAMES
from peer.model.text.rules import TextRules
from swarm.gateway.asks import GenerationAsk, read_chat
from swarm.gateway.errors import ApiError
from swarm.gateway.json_depth import DEPTH_MAX
from swarm.gateway.template import open_template
from swarm.gateway.template_variables import VARIABLES_BYTES_MAX
from tests.swarm.gateway.reading.thinking_models import QWEN3, model_of
from tests.swarm.gateway.scripted import ScriptedModel, open_site
from tests.swarm.gateway.test_tools import golden
from tests.swarm.gateway.tool_models import CLOCK, HERMES

CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"
THINKING = QWEN3 + (
    "{%- if add_generation_prompt and enable_thinking is defined and enable_thinking is false %}"
    "{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}"
)
"""Ends as Qwen3's does."""
EFFORT = (
    '{%- if reasoning_effort is not defined %}{%- set reasoning_effort = "medium" %}{%- endif %}'
    '{{- "Reasoning: " + reasoning_effort + "\\n\\n" }}'
    "{%- for message in messages %}{{- message.role + '>' + message.content }}{%- endfor %}"
    "{{- {'limits': limits | default({}), 'at': day | default('')} | tojson }}"
)
"""Begins as that of gpt-oss does."""
TALK = [{"role": "user", "content": "Hi"}]


def chat(**body: Any) -> GenerationAsk:
    return read_chat(json.dumps({"model": "m", "messages": TALK, **body}).encode())


async def written(source: str, **body: Any) -> tuple[str, tuple[str, ...]]:
    """Return the prompt of a chat, and the fields that its template does not read."""
    ask = chat(**body)
    async with open_template(TextRules(bos="<s>", eos="</s>", chat_template=source)) as template:
        variables, ignored = ask.variables.read_by(template.names)
        return await template.render(ask.messages, variables=variables), ignored


@pytest.mark.process
@pytest.mark.parametrize(
    ("source", "body", "variables"),
    [
        (THINKING, {"chat_template_kwargs": {"enable_thinking": False}}, {"enable_thinking": False}),
        (THINKING, {"chat_template_kwargs": {"enable_thinking": True}}, {"enable_thinking": True}),
        (THINKING, {"reasoning_effort": "none"}, {"enable_thinking": False}),
        (THINKING, {"reasoning_effort": "high"}, {"enable_thinking": True}),
        (
            THINKING,
            {"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": True}},
            {"enable_thinking": True},
        ),
        (EFFORT, {"reasoning_effort": "high"}, {"reasoning_effort": "high"}),
        (
            EFFORT,
            {"reasoning_effort": "low", "chat_template_kwargs": {"limits": {"é": [1, None, 0.5]}, "day": "<2>"}},
            {"reasoning_effort": "low", "limits": {"é": [1, None, 0.5]}, "day": "<2>"},
        ),
    ],
)
async def test_a_template_gets_variables_as_transformers_gives_them(
    source: str, body: dict[str, Any], variables: dict[str, Any]
) -> None:
    assert await written(source, **body) == (golden(source, TALK, None, **variables), ())
    unset = {"enable_thinking": True, "reasoning_effort": "medium"}
    assert (golden(source, TALK, None, **variables) != golden(source, TALK, None)) == any(
        unset.get(name) != value for name, value in variables.items()
    )


@pytest.mark.process
@pytest.mark.parametrize(
    ("body", "ignored"),
    [
        ({"reasoning_effort": "high"}, ("reasoning_effort",)),
        ({"chat_template_kwargs": {"thinks": 1}}, ("chat_template_kwargs",)),
        ({"chat_template_kwargs": {}}, ("chat_template_kwargs",)),
        ({"chat_template_kwargs": {"thinks": 1, "role": 2}}, ("chat_template_kwargs.thinks",)),
        ({"chat_template_kwargs": None, "reasoning_effort": None}, ()),
    ],
)
async def test_a_variable_that_the_template_does_not_read_is_ignored(
    body: dict[str, Any], ignored: tuple[str, ...]
) -> None:
    assert await written(QWEN3, **body) == (golden(QWEN3, TALK, None), ignored)


@pytest.mark.process
async def test_the_server_lists_it_and_the_model_is_given_it() -> None:
    off = {"reasoning_effort": "none", "chat_template_kwargs": {"other": 1}, "metadata": {}}
    model = model_of(THINKING, b"Hi\0")
    async with open_site(model) as site:
        _, headers, _ = await site.post(CHAT, {"model": "scripted", "messages": TALK, **off})
        assert headers["x-barnraise-ignored"] == "metadata, chat_template_kwargs"
        _, headers, body = await site.post(
            RESPONSES, {"model": "scripted", "input": "Hi", "reasoning": {"effort": "none", "summary": "auto"}}
        )
        assert headers["x-barnraise-ignored"] == "reasoning.summary"
        assert body["reasoning"] == {"effort": "none", "summary": None}
        await site.post(CHAT, {"model": "scripted", "messages": TALK})
    prompts = [bytes(session.tokens).decode() for session in model.sessions]
    assert [prompt.count("<think>\n\n</think>") for prompt in prompts] == [1, 1, 0]
    async with open_site(ScriptedModel(b"Hi")) as site:
        _, headers, _ = await site.post(RESPONSES, {"model": "scripted", "input": "Hi", "reasoning": {"effort": "low"}})
        assert headers["x-barnraise-ignored"] == "reasoning.effort", "a plain conversation reads no variables"


def deep(levels: int) -> Any:
    value: Any = {}
    for _ in range(levels):
        value = {"a": value}
    return value


@pytest.mark.parametrize(
    ("given", "words"),
    [
        *(({name: "x"}, f"{name} is a name of the template's own") for name in sorted(TEMPLATE_NAMES)),
        ({"chat_template": "x"}, "leave it out"),
        ({"a b": 1}, "has the name 'a b'"),
        ({"__class__": 1}, "send 1 to 64"),
        ({"x" * 65: 1}, "send 1 to 64"),
        ({"x": deep(DEPTH_MAX)}, f"nested deeper than {DEPTH_MAX}"),
        ({"x": "y" * VARIABLES_BYTES_MAX}, f"more than {VARIABLES_BYTES_MAX}"),
        ([1], "correct it"),
    ],
)
def test_variables_have_bounds(given: Any, words: str) -> None:
    with pytest.raises(ApiError) as refused:
        chat(chat_template_kwargs=given)
    assert (refused.value.status, refused.value.param) == (400, "chat_template_kwargs")
    assert words in str(refused.value)


def test_an_effort_is_one_of_those_that_are_known() -> None:
    with pytest.raises(ApiError) as refused:
        chat(reasoning_effort="utmost")
    assert refused.value.param == "reasoning_effort" and "utmost" in str(refused.value)


@pytest.mark.parametrize("name", sorted(TEMPLATE_NAMES))
def test_a_template_keeps_its_own_names(name: str) -> None:
    code = ChatTemplateCode("{{ messages[0].content }}{{ x }}", "<s>", "</s>")
    assert code.render(TALK, variables={"x": 7}) == "Hi7"
    with pytest.raises(ValueError, match=f"{name} is a name of the template's own"):
        code.render(TALK, variables={name: 7})


LARGE = 1 << 64
CALLED = {"id": "1", "function": {"name": "f", "arguments": f'{{"a": {-LARGE}}}'}}


@pytest.mark.process
@pytest.mark.parametrize(
    "body",
    [
        {"chat_template_kwargs": {"role": [LARGE]}},
        {"tools": [{**CLOCK, "function": {"name": "f", "parameters": {"maximum": LARGE}}}]},
        {"messages": [*TALK, {"role": "assistant", "tool_calls": [CALLED]}]},
    ],
    ids=["variable", "schema", "arguments"],
)
async def test_a_number_that_no_message_to_the_template_holds_is_a_sentence(body: dict[str, Any]) -> None:
    async with open_site(model_of(HERMES, b"Hi\0")) as site:
        status, _, answer = await site.post(CHAT, {"model": "scripted", "messages": TALK, **body})
        assert status == 400 and "more than 64 bits" in answer["error"]["message"], answer
        status, _, _ = await site.post(CHAT, {"model": "scripted", "messages": TALK})
        assert status == 200
