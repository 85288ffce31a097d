"""Tools of a request: what is read of them, what a template gets, and what is refused by name."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, cast

import pytest
from blake3 import blake3
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from peer.model.text.rules import TextRules
from swarm.gateway.asks import GenerationAsk, read_chat
from swarm.gateway.errors import ApiError
from swarm.gateway.json_depth import DEPTH_MAX
from swarm.gateway.template import ChatTemplate, TemplateFailed, ToolsRefused, open_template, read_arguments
from tests.swarm.gateway.tool_models import CLOCK, TEMPLATES, WEATHER

CALLED: dict[str, Any] = {
    "role": "assistant",
    "content": None,
    "tool_calls": [
        {
            "id": "call_1",
            "type": "function",
            "function": {"name": "get_weather", "arguments": '{"city": "Bonn <é>", "n": 1}'},
        },
        {"id": "call_2", "type": "function", "function": {"name": "clock", "arguments": ""}},
    ],
}
TALK: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "How is it there?"},
    CALLED,
    {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
    {"role": "tool", "tool_call_id": "call_2", "content": [{"type": "text", "text": "12:00"}]},
]


def chat(**body: Any) -> GenerationAsk:
    return read_chat(json.dumps({"model": "m", "messages": [{"role": "user", "content": "Hi"}], **body}).encode())


def refusal(**body: Any) -> ApiError:
    with pytest.raises(ApiError) as refused:
        chat(**body)
    assert refused.value.status == 400
    return refused.value


def golden(source: str, talk: list[dict[str, Any]], tools: list[dict[str, Any]] | None, **variables: Any) -> str:
    """Return what `transformers` makes of a conversation with tools."""
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel({"<s>": 0, "</s>": 1}, unk_token="</s>")),
        bos_token="<s>",
        eos_token="</s>",
    )
    text = cast(Any, tokenizer.apply_chat_template)(
        talk, tools=tools, chat_template=source, tokenize=False, add_generation_prompt=True, **variables
    )
    return str(text)


def of_templates(talk: list[dict[str, Any]], ids: Sequence[str]) -> list[dict[str, Any]]:
    """Return a conversation as templates take it: arguments are objects, and results have the name of their function.
    `ids`: of its calls."""
    given, names = list[dict[str, Any]](), dict[str, str]()
    for message in talk:
        message = dict(message)
        if "tool_calls" in message:
            message["content"] = ""
            message["tool_calls"] = [dict(call, function=dict(call["function"])) for call in message["tool_calls"]]
            for call in message["tool_calls"]:
                call["function"]["arguments"] = json.loads(call["function"]["arguments"] or "{}")
                names[call["id"]] = call["function"]["name"]
                call["id"] = ids[list(names).index(call["id"])]
        if "tool_call_id" in message:
            id = message["tool_call_id"]
            message |= {"tool_call_id": ids[list(names).index(id)], "name": names[id]}
        if isinstance(message["content"], list):
            message["content"] = "".join(part["text"] for part in message["content"])
        given.append(message)
    return given


@pytest.mark.process
@pytest.mark.parametrize("form", ["hermes", "llama3_json", "mistral"])
async def test_a_template_gets_tools_as_transformers_gives_them(form: str) -> None:
    talk, ids = TALK, ["call_1", "call_2"]
    if form == "llama3_json":  # one call a message
        calls = [{**CALLED, "tool_calls": [call]} for call in CALLED["tool_calls"]]
        talk = [*TALK[:2], calls[0], TALK[3], calls[1], TALK[4]]
    if form == "mistral":
        ids = [blake3(id.encode()).hexdigest()[:9] for id in ids]
    tools = [WEATHER, {**CLOCK, "function": {**CLOCK["function"], "parameters": {"type": "object", "properties": {}}}}]
    ask, quiet = chat(tools=[WEATHER, CLOCK], messages=talk), chat(tools=[WEATHER], tool_choice="none", messages=talk)
    assert ask.tools is not None and quiet.tools is None
    async with open_template(TextRules(bos="<s>", eos="</s>", chat_template=TEMPLATES[form])) as template:
        assert template.form.name == form
        with_tools = await template.render(ask.messages, ask.tools.given)
        assert with_tools == golden(TEMPLATES[form], of_templates(talk, ids), tools)
        assert "„Köln“" in with_tools and "Bonn <é>" in with_tools and "sunny" in with_tools
        without = await template.render(quiet.messages)
        assert without == golden(TEMPLATES[form], of_templates(talk, ids), None)
        assert "„Köln“" not in without


AS_IT_IS = "{% set a = messages[1].tool_calls[0].function.arguments %}{{ a if a is string else a | tojson }}"
"""As newer templates of Qwen write arguments."""
CUT = ('{"city": "Bo', '{"n": 01}', "[1]", '"x"', "null", '{"a":' * (DEPTH_MAX + 1) + "1" + "}" * (DEPTH_MAX + 1))
"""Arguments that are no object, or too deep."""


@pytest.mark.process
@pytest.mark.parametrize("form", ["hermes", "llama3_json", "as it is"])
async def test_a_template_gets_arguments_that_are_no_object_as_transformers_gives_a_text(form: str) -> None:
    source = TEMPLATES.get(form, AS_IT_IS)
    async with open_template(TextRules(bos="<s>", eos="</s>", chat_template=source)) as template:
        for arguments in CUT:
            call = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": arguments}}
            messages = [TALK[1], {"role": "assistant", "content": "", "tool_calls": [call]}, TALK[3]]
            text = await template.render(chat(messages=messages).messages)
            assert text == golden(source, messages, None)
            assert (arguments if form == "as it is" else json.dumps(arguments)) in text


@pytest.mark.process
async def test_a_template_that_needs_an_object_says_so() -> None:
    source = "{% for name, value in messages[0].tool_calls[0].function.arguments.items() %}{{ name }}{% endfor %}"
    async with open_template(TextRules(chat_template=source)) as template:
        assert await template.render(chat(messages=[called("f", '{"a": 1}')]).messages) == "a"
        with pytest.raises(TemplateFailed, match=r"does not take this conversation .*: send other messages"):
            await template.render(chat(messages=[called("f", CUT[0])]).messages)


@pytest.mark.process
async def test_mistrals_templates_get_ids_of_nine_letters() -> None:
    source = (
        "[TOOL_CALLS]{{ tools }}"
        "{% for m in messages %}{{ (m.tool_calls or [m])[0].id }} {{ m.tool_call_id }};{% endfor %}"
    )
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
    strict = {"type": "function", "vendor": 1, "function": {**WEATHER["function"], "strict": True}}
    ask = chat(tools=[strict, CLOCK], parallel_tool_calls=False)
    assert ask.tools is not None and not ask.tools.is_parallel and ask.tools.given[0] == WEATHER
    assert ask.ignored == ("tools.vendor", "tools.strict")
    assert ask.tools.parameters["clock"] == {"type": "object", "properties": {}}
    allowed = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [CLOCK]}}
    ask = chat(tools=[WEATHER, CLOCK], tool_choice=allowed)
    assert ask.tools is not None and list(ask.tools.parameters) == ["clock"]
    nothing: tuple[dict[str, Any], ...] = (
        {},
        {"tools": []},
        {"tools": None},
        {"tools": [CLOCK], "tool_choice": "none"},
        {"tool_choice": "auto"},
    )
    for none in nothing:
        assert chat(**none).tools is None and chat(**none).ignored == ()


@pytest.mark.parametrize(
    "choice",
    [
        {"type": "custom", "custom": {"name": "clock"}},
        {"type": "allowed_tools", "allowed_tools": {"mode": "perhaps", "tools": [CLOCK]}},
        {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": []}},
        {"type": "function"},
        {"type": "function", "function": {"name": "weather"}},
    ],
)
def test_what_is_no_choice_is_refused(choice: Any) -> None:
    error = refusal(tools=[CLOCK], tool_choice=choice)
    assert (error.code, error.param) == ("invalid_value", "tool_choice")
    assert "choose one of them" in str(error) or "name one of these" in str(error)


def test_a_call_needs_tools() -> None:
    assert "there are no tools" in str(refusal(tool_choice="required"))


def called(name: str, arguments: Any) -> dict[str, Any]:
    return {"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": name, "arguments": arguments}}]}


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
        ({"tools": [CLOCK], "tool_choice": "always"}, "not one of none, auto, required"),
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
        (called("a.b", ""), "send 1 to 64"),
        (called("f", {}), "arguments is no text: send the arguments of the call in a string"),
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
    for deep_or_cut in ('{"a":' * 50_000, '{"a":' * 50_000 + "1" + "}" * 50_000):
        arguments["function"] = {"name": "f", "arguments": deep_or_cut}
        (call,) = chat(messages=[{"role": "assistant", "tool_calls": [arguments]}]).messages[0].calls
        assert read_arguments(call.arguments) is None  # a template gets it as a text


@pytest.mark.process
async def test_a_template_has_room_for_the_tools_that_it_is_given() -> None:
    """Also where it indents them, as Llama's does."""
    large = {"type": "function", "function": {"name": "f", "description": "x" * 100_000}}
    async with open_template(TextRules(chat_template="{{ tools | tojson(indent=4) }}{{ messages }}")) as template:
        ask = chat(tools=[large])
        assert ask.tools is not None
        assert "x" * 100_000 in await template.render(ask.messages, ask.tools.given)
