"""Calls of tools over real HTTP: agents of the official `openai` client, and bodies as other programs send them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import msgspec
import openai
import pytest
import trio
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

from peer.model.text.rules import TextRules
from peer.worker.text_client import open_model_text
from tests.swarm.gateway.scripted import ScriptedModel, open_site
from tests.swarm.gateway.tool_models import (
    ADD,
    CLOCK,
    TEMPLATES,
    WEATHER,
    Calls,
    MarkedText,
    model_of,
    site_of,
    streamed_events,
    written,
)

pytestmark = pytest.mark.process

CHAT = "/v1/chat/completions"
TOOLS = [WEATHER, ADD, CLOCK]
QUESTION: dict[str, Any] = {"role": "user", "content": "How warm are Köln and Bonn together, and when?"}
CITY: Calls = [("get_weather", {"city": "Köln \"}])' \n", "days": 1}), ("get_weather", {"city": "Bonn"})]
SUM: Calls = [("add", {"terms": [20, 1.5]})]
TIME: Calls = [("clock", {})]
RESULTS: dict[str, Callable[..., str]] = {
    "get_weather": lambda city, days=0: f"{len(city)} degrees",
    "add": lambda terms: str(sum(terms)),
    "clock": lambda: "12:00 „exactly“",
}
LAST = "21.5 degrees, at 12:00 „exactly“."


# -- agents ------------------------------------------------------------------------------------------------------------


@dataclass
class Turn:
    """What a client has read of one answer."""

    content: str | None
    calls: list[dict[str, Any]]
    finish: str | None

    @property
    def named(self) -> list[tuple[str, Any]]:
        return [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in self.calls]


def asked(url: str, messages: Sequence[dict[str, Any]], stream: bool) -> Turn:
    """Ask with OpenAI's own client, in a thread."""
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        create = cast(Any, client.chat.completions.create)
        answer = create(model="scripted", messages=messages, tools=TOOLS, stream=stream, max_tokens=4000)
        if stream:
            return joined(answer)
        (choice,) = answer.choices
        calls = [call.model_dump() for call in choice.message.tool_calls or ()]
        return Turn(choice.message.content, calls, choice.finish_reason)


def joined(chunks: Iterable[Any]) -> Turn:
    """Put a stream together as clients do: a call begins with its id and name, and its arguments come in pieces."""
    turn = Turn(None, [], None)
    for chunk in chunks:
        (choice,) = chunk.choices
        assert turn.finish is None
        turn.finish = choice.finish_reason
        if choice.delta.content:
            assert not turn.calls
            turn.content = (turn.content or "") + choice.delta.content
        for delta in choice.delta.tool_calls or ():
            if delta.index == len(turn.calls):
                assert delta.type == "function" and delta.function.arguments == ""
                turn.calls.append({"id": delta.id, "type": "function", "function": {"name": delta.function.name}})
                turn.calls[-1]["function"]["arguments"] = ""
            else:
                assert delta.index == len(turn.calls) - 1 and delta.id is delta.type is delta.function.name is None
                turn.calls[-1]["function"]["arguments"] += delta.function.arguments
    return turn


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("form", sorted(TEMPLATES))
async def test_an_agent_calls_three_tools_and_gets_its_answer(form: str, stream: bool) -> None:
    steps = [CITY, SUM, TIME] if form != "llama3_json" else [CITY[:1], CITY[1:], SUM, TIME]
    thought = "" if form in ("llama3_json", "pythonic") else "Let me see."
    messages = [QUESTION]
    async with site_of(form) as (site, model):
        for calls in steps:
            model.script = (f"{thought}\n{written(form, calls)}\n\0".encode(),)
            turn = await trio.to_thread.run_sync(asked, f"http://127.0.0.1:{site.port}", messages, stream)
            assert (turn.content, turn.finish, turn.named) == (thought or None, "tool_calls", list(calls))
            messages.append({"role": "assistant", "content": turn.content, "tool_calls": turn.calls})
            for call, (name, arguments) in zip(turn.calls, turn.named, strict=True):
                messages.append({"role": "tool", "tool_call_id": call["id"], "content": RESULTS[name](**arguments)})
        assert len({call["id"] for message in messages for call in message.get("tool_calls", ())}) == 4
        model.script = (f"{LAST}\0".encode(),)
        turn = await trio.to_thread.run_sync(asked, f"http://127.0.0.1:{site.port}", messages, stream)
        assert (turn.content, turn.finish, turn.calls) == (LAST, "stop", [])
    told = bytes(model.sessions[-1].tokens).decode()
    assert "Bonn" in told and "21.5" in told and "12:00 „exactly“" in told  # the history reaches the model


async def test_special_tokens_of_a_form_are_seen_and_not_shown() -> None:
    async with site_of("mistral") as (site, model):
        model.text, model.special = MarkedText("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"), frozenset({256, 257, 258})
        model.script = (b"Hi", 256, b"clock", 257, b"{}\0")
        _, _, called = await site.post(CHAT, {"model": "scripted", "messages": [QUESTION], "tools": TOOLS})
        model.script = (b"Hi", 258, b" and", 256, b" bye")
        _, _, told = await site.post(CHAT, {"model": "scripted", "messages": [QUESTION], "tools": TOOLS})
    (choice,) = called["choices"]
    (call,) = choice["message"]["tool_calls"]
    assert choice["message"]["content"] == "Hi" and choice["finish_reason"] == "tool_calls"
    assert call["function"] == {"name": "clock", "arguments": "{}"}
    assert told["choices"][0]["message"] == {
        "role": "assistant", "content": "Hi[CALL_ID] and[TOOL_CALLS] bye", "refusal": None
    }  # fmt: skip


async def test_a_real_tokenizer_reveals_the_special_tokens_of_calls() -> None:
    tokenizer = Tokenizer(BPE({letter: id for id, letter in enumerate(sorted(ByteLevel.alphabet()))}, []))
    tokenizer.pre_tokenizer, tokenizer.decoder = ByteLevel(add_prefix_space=False), ByteLevelDecoder()
    tokenizer.add_special_tokens(["<|python_tag|>", "<|eom_id|>"])
    answer = tokenizer.encode(f"Schön. <|python_tag|>{written('llama3_json', SUM)}<|eom_id|>").ids
    assert answer[-1] == 257 and answer.count(256) == 1
    async with (
        open_model_text(tokenizer.to_str().encode(), 258) as text,
        site_of("llama3_json", *answer) as (site, model),
    ):
        await text.start()
        model.text, model.special = text, text.special
        model.manifest.text = msgspec.structs.replace(model.manifest.text, stops=(257,))
        _, _, body = await site.post(CHAT, {"model": "scripted", "messages": [QUESTION], "tools": TOOLS})
    (choice,) = body["choices"]
    assert choice["message"]["content"] == "Schön." and choice["finish_reason"] == "tool_calls"
    (call,) = choice["message"]["tool_calls"]
    assert call["function"] == {"name": "add", "arguments": '{"terms": [20, 1.5]}'}


async def test_several_answers_and_one_call_each() -> None:
    ask = {"model": "scripted", "messages": [QUESTION], "tools": TOOLS, "n": 2, "parallel_tool_calls": False}
    text = written("hermes", CITY)
    async with site_of("hermes", text.encode()) as (site, model):
        _, _, whole = await site.post(CHAT, ask)
        _, _, streamed = await site.post(CHAT, {**ask, "stream": True})
        _, _, cut = await site.post(CHAT, {**ask, "n": 1, "max_tokens": len(text.encode()) - 30})
    for choice in whole["choices"]:
        assert [call["function"]["name"] for call in choice["message"]["tool_calls"]] == ["get_weather"]
        assert choice["message"]["content"] is None and choice["finish_reason"] == "tool_calls"
    assert all(session.closed.is_set() for session in model.sessions)
    assert whole["usage"]["completion_tokens"] < len(text)  # the second call is not generated
    begun = [
        (choice["index"], delta["index"], delta["id"])
        for event in streamed_events(streamed)
        for choice in event["choices"]
        for delta in choice["delta"].get("tool_calls", ())
        if "id" in delta
    ]
    assert sorted(one[:2] for one in begun) == [(0, 0), (1, 0)] and len({id for *_, id in begun}) == 2
    assert cut["choices"][0]["finish_reason"] == "tool_calls"


async def test_log_probabilities_name_each_token_of_a_call_once() -> None:
    text = written("hermes", TIME)
    ask = {"model": "scripted", "messages": [QUESTION], "tools": TOOLS, "logprobs": True, "max_tokens": 500}
    async with site_of("hermes", f"Now. {text}".encode()) as (site, _):
        _, _, whole = await site.post(CHAT, ask)
        _, _, streamed = await site.post(CHAT, {**ask, "stream": True})
    told = whole["choices"][0]["logprobs"]["content"]
    assert "".join(one["token"] for one in told) == f"Now. {text}"
    parts = [event["choices"][0]["logprobs"] for event in streamed_events(streamed)]
    assert [one for part in parts if part for one in part["content"]] == told


CUT = {"id": "call_9", "type": "function", "function": {"name": "add", "arguments": '{"terms": [1'}}


# -- refusals ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("template", "change", "param", "words"),
    [
        ("", {}, "tools", "has no chat template: send no tools, or start peer api with a --template"),
        ("{{ messages }}", {}, "tools", "writes no tools: send no tools, or start peer api with a --template"),
        ("{{ tools }}", {}, "tools", "start peer api with --tool-parser"),
        (
            "{{ tools }}<tool_call>{% for name in messages[1].tool_calls[0].function.arguments.items() %}{% endfor %}",
            {"messages": [QUESTION, {"role": "assistant", "tool_calls": [CUT]}]},
            "messages",
            "the model's chat template does not take this conversation",
        ),
        (TEMPLATES["pythonic"], {"tool_choice": "required"}, "tool_choice", "cannot be forced: send tool_choice auto"),
        (TEMPLATES["hermes"], {"tools": [{"type": "web_search"}]}, "tools", "send functions only"),
        (
            TEMPLATES["mistral"],
            {"messages": [QUESTION, {"role": "tool", "tool_call_id": "call_9", "content": "x"}]},
            "messages",
            "no call before it",
        ),
    ],
)
async def test_what_is_refused_names_the_remedy(template: str, change: Any, param: str, words: str) -> None:
    model = ScriptedModel(b"Hi", text=TextRules(chat_template=template))
    async with open_site(model) as site:
        status, _, body = await site.post(CHAT, {"model": "scripted", "messages": [QUESTION], "tools": TOOLS, **change})
    assert status == 400 and body["error"]["param"] == param and words in body["error"]["message"]
    assert not model.sessions


async def test_a_chosen_parser_reads_a_template_that_shows_no_form() -> None:
    model = model_of("hermes", written("pythonic", TIME).encode())
    model.manifest.text = TextRules(chat_template="{{ tools }}{{ messages }}")
    async with open_site(model, parser="pythonic") as site:
        _, _, body = await site.post(CHAT, {"model": "scripted", "messages": [QUESTION], "tools": TOOLS})
    assert body["choices"][0]["message"]["tool_calls"][0]["function"] == {"name": "clock", "arguments": "{}"}


# -- bodies of other programs ------------------------------------------------------------------------------------------

CALL = {"id": "call_a1", "type": "function", "function": {"name": "read_file", "arguments": '{"path": "a.py"}'}}
FILE_SCHEMA = {
    "type": "object",
    "properties": {"path": {"type": "string", "description": "The path"}},
    "required": ["path"],
    "additionalProperties": False,
}
READ_FILE = {"name": "read_file", "description": "Reads a file", "parameters": FILE_SCHEMA}
BODIES: dict[str, dict[str, Any]] = {
    "LangChain": {
        "messages": [
            {"content": "Be brief.", "role": "system"},
            {"content": "Read a.py", "role": "user"},
            {"role": "assistant", "tool_calls": [CALL], "content": None},
            {"content": "print(1)", "role": "tool", "tool_call_id": "call_a1"},
        ],
        "model": "scripted",
        "n": 1,
        "stream": False,
        "temperature": 0.0,
        "parallel_tool_calls": True,
        "tools": [{"type": "function", "function": {**READ_FILE, "strict": True}}],
        "tool_choice": "auto",
    },
    "Cline": {
        "model": "scripted",
        "messages": [
            {"role": "system", "content": "You are Cline."},
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": "<task>\nRead a.py\n</task>"},
                    {"type": "text", "text": "<environment_details>\n# Mode\nACT\n</environment_details>"},
                ],
            },
            {
                "role": "assistant",
                "content": "I read it.",
                "tool_calls": [CALL],
                "reasoning_details": [],
            },
            {"role": "tool", "tool_call_id": "call_a1", "content": "print(1)"},
            {"role": "user", "content": [{"type": "text", "text": "Go on", "cache_control": {"type": "ephemeral"}}]},
        ],
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "tools": [{"type": "function", "function": {**READ_FILE, "strict": False}}],
        "tool_choice": "auto",
        "parallel_tool_calls": False,
    },
    "Continue": {
        "messages": [
            {"role": "system", "content": "<important_rules>\nAgent mode\n</important_rules>"},
            {"role": "user", "content": [{"type": "text", "text": "Read a.py"}]},
            {"role": "assistant", "content": " ", "tool_calls": [CALL]},
            {"role": "tool", "content": "print(1)", "tool_call_id": "call_a1"},
        ],
        "model": "scripted",
        "max_tokens": 400,
        "stream": True,
        "tools": [
            {
                "type": "function",
                "displayTitle": "Read File",
                "wouldLikeTo": "read {{{ path }}}",
                "readonly": True,
                "group": "Built-In",
                "function": READ_FILE,
            }
        ],
        "parallel_tool_calls": False,
    },
    "OpenAI Agents SDK": {
        "messages": [
            {"content": "You are helpful", "role": "developer"},
            {"role": "user", "content": "Read a.py"},
            {"role": "assistant", "content": None, "tool_calls": [CALL], "audio": None, "refusal": None},
            {"role": "tool", "tool_call_id": "call_a1", "content": [{"type": "text", "text": "print(1)"}]},
        ],
        "model": "scripted",
        "frequency_penalty": None,
        "max_tokens": None,
        "metadata": {"trace": "1"},
        "parallel_tool_calls": None,
        "presence_penalty": None,
        "reasoning_effort": None,
        "response_format": None,
        "store": True,
        "stream": False,
        "temperature": None,
        "tool_choice": "auto",
        "tools": [{"type": "function", "function": {**READ_FILE, "strict": True}}],
        "top_p": None,
        "verbosity": None,
    },
}


@pytest.mark.parametrize("name", sorted(BODIES))
async def test_bodies_of_editors_and_frameworks_are_answered(name: str) -> None:
    text = written("hermes", [("read_file", {"path": "b.py"})])
    async with site_of("hermes", text.encode()) as (site, model):
        status, _, body = await site.post(CHAT, BODIES[name])
    assert status == 200, body
    if isinstance(body, bytes):
        deltas = [choice["delta"] for event in streamed_events(body) for choice in event["choices"]]
        calls = [call["function"] for delta in deltas for call in delta.get("tool_calls", ())]
        found = calls[0]["name"], "".join(call["arguments"] for call in calls)
    else:
        (call,) = body["choices"][0]["message"]["tool_calls"]
        found = call["function"]["name"], call["function"]["arguments"]
    assert found == ("read_file", '{"path": "b.py"}')
    prompt = bytes(model.sessions[0].tokens).decode()
    assert '{"name": "read_file", "arguments": {"path": "a.py"}}' in prompt and "print(1)" in prompt
    assert '"additionalProperties": false' in prompt and "strict" not in prompt
