"""Thinking in answers: told apart from the content whatever the pieces, over real HTTP and with the `openai` client."""

from __future__ import annotations

import re
from typing import Any, cast

import openai
import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from swarm.gateway.reading.thinking import FORMATS, SPACE_CHARS_MAX, ThinkingFormat, ThoughtStream, thinking_of
from tests.swarm.gateway.reading.thinking_models import OPEN, QWEN3, TOOLS, model_of
from tests.swarm.gateway.scripted import events_of, open_site
from tests.swarm.gateway.tool_models import CLOCK, HERMES, MarkedText, written

CHAT = "/v1/chat/completions"
HELLO: dict[str, Any] = {"role": "user", "content": "Hello"}
THINK = FORMATS[0]
Found = tuple[str, str]


def found(
    pieces: list[str], is_open: bool = False, form: ThinkingFormat = THINK, hidden: tuple[str, ...] = ()
) -> Found:
    """Return the thinking and the content of an answer that comes in pieces."""
    stream = ThoughtStream(form, is_open)
    told = [one for piece in pieces for one in stream.push(piece, piece not in hidden)] + stream.finish()
    assert all(one.text for one in told)
    order = [one.is_thought for one in told]
    assert order == sorted(order, reverse=True)  # the thinking comes first
    thought = "".join(one.text for one in told if one.is_thought)
    return thought, "".join(one.text for one in told if not one.is_thought and one.is_shown)


def expected(text: str, is_open: bool) -> Found:
    """Return the same of a whole answer, by other means."""
    begun = re.match(rf"\s{{0,{SPACE_CHARS_MAX}}}<think>", text)
    if not is_open and not begun:
        return "", text
    inside, end, content = text[0 if is_open or not begun else begun.end() :].partition("</think>")
    inside = inside.lstrip()
    return re.sub(rf"\s{{1,{SPACE_CHARS_MAX}}}\Z", "", inside) if end else inside, content.lstrip()


_FRAGMENTS = [
    *("<think>", "</think>", "<", "<thi", "</", "think>", "[THINK]"),
    *("Hmm.", "Aa", "é\u3000", " ", "\n\n", "{", '<tool_call>{"name"'),
    *(size * " " for size in (SPACE_CHARS_MAX - 1, SPACE_CHARS_MAX, SPACE_CHARS_MAX + 1)),
]
_ANSWERS = st.lists(st.sampled_from(_FRAGMENTS), max_size=8).map("".join)


@given(_ANSWERS, st.booleans(), st.booleans(), st.lists(st.integers(0, 2000), max_size=10))
def test_pieces_of_any_size_give_the_same(text: str, begins: bool, is_open: bool, places: list[int]) -> None:
    text = "<think>" * begins + text
    ends = sorted({min(place, len(text)) for place in places})
    pieces = [text[begin:end] for begin, end in zip([0, *ends], [*ends, len(text)], strict=True)]
    wanted = expected(text, is_open)
    assert found([text], is_open) == found(list(text), is_open) == found(pieces, is_open) == wanted


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.begin)
def test_tags_may_be_hidden_special_tokens(form: ThinkingFormat) -> None:
    begin, end = form.begin, form.end
    hidden = (begin, end, "<|other|>")
    answer = [begin, "\nHm", "<|other|>", ".\n", end, "\n\n", "Hi", "<|other|>"]
    assert found(answer, False, form, hidden) == ("Hm.", "Hi")
    assert found(["Hm.", end, "Hi"], True, form, hidden) == ("Hm.", "Hi")
    assert found(["<|other|>", begin, "Hm."], False, form, hidden) == ("Hm.", "")
    assert found(["Hi ", begin, "you", end], False, form, hidden) == ("", "Hi you")  # as without thinking
    assert found(["Hi ", begin, "you", end], False, form) == ("", f"Hi {begin}you{end}")


def test_the_template_shows_the_tags() -> None:
    assert thinking_of(QWEN3) is thinking_of(OPEN) is thinking_of("content.split('</think>')") is THINK
    assert thinking_of("{{ '[THINK]' + message.reasoning + '[/THINK]' }}") is FORMATS[1]
    assert thinking_of(HERMES) is thinking_of("") is thinking_of("<think>") is None
    assert THINK.is_open("assistant\n<think>\n") and not THINK.is_open("assistant\n<think>\n\n</think>\n\n")


# -- over HTTP ---------------------------------------------------------------------------------------------------------


def asked(port: int, stream: bool, **more: Any) -> tuple[str, str, str]:
    """Ask with OpenAI's own client, in a thread; return the thinking, the content and why it ended."""
    with openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0, timeout=60) as client:
        answer = cast(Any, client.chat.completions.create)(
            model="scripted", messages=[HELLO], stream=stream, max_tokens=500, **more
        )
        if not stream:
            (choice,) = answer.choices
            message = choice.message
            return getattr(message, "reasoning_content", ""), message.content or "", choice.finish_reason
        thought = content = finish = ""
        for chunk in answer:
            (choice,) = chunk.choices
            more_thought = getattr(choice.delta, "reasoning_content", "")
            assert not (more_thought and content)
            thought, content = thought + more_thought, content + (choice.delta.content or "")
            finish = choice.finish_reason or finish
        return thought, content, finish


@pytest.mark.process
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize(
    ("template", "answer", "wanted"),
    [
        (QWEN3, "<think>\nThe user\nsays „hi“.\n</think>\n\nHello!\0", ("The user\nsays „hi“.", "Hello!", "stop")),
        (QWEN3, "Hello <think>!\0", ("", "Hello <think>!", "stop")),
        (QWEN3, "<think>\n\n</think>\n\nHello!\0", ("", "Hello!", "stop")),
        (OPEN, "The user says hi.\n</think>\n\nHello!\0", ("The user says hi.", "Hello!", "stop")),
        (OPEN, "On and on", ("On and on", "", "length")),
        (HERMES, "<think>\nHm.\n</think>\n\nHello!\0", ("", "<think>\nHm.\n</think>\n\nHello!", "stop")),
    ],
)
async def test_thinking_has_a_field_of_its_own(template: str, answer: str, wanted: Any, stream: bool) -> None:
    async with open_site(model_of(template, answer.encode())) as site:
        assert await trio.to_thread.run_sync(asked, site.port, stream) == wanted


@pytest.mark.process
async def test_special_tokens_and_what_they_enclose_are_counted() -> None:
    model = model_of(QWEN3, 256, b"Hm.\n", 257, b"\n\nHello\0")
    model.text, model.special = MarkedText("<think>", "</think>"), frozenset({256, 257})
    async with open_site(model) as site:
        _, _, body = await site.post(CHAT, {"model": "scripted", "messages": [HELLO]})
        model.script = (b"Hello\0",)
        _, _, plain = await site.post(CHAT, {"model": "scripted", "messages": [HELLO]})
    assert body["choices"][0]["message"] == {
        "role": "assistant", "content": "Hello", "refusal": None, "reasoning_content": "Hm."
    }  # fmt: skip
    assert body["usage"]["completion_tokens"] == 14
    assert body["usage"]["completion_tokens_details"] == {"reasoning_tokens": 6}
    assert "completion_tokens_details" not in plain["usage"]


@pytest.mark.process
async def test_calls_come_after_thinking_and_none_inside() -> None:
    call = written("hermes", [("clock", {})])
    model = model_of(TOOLS, f"<think>\nShall I {call}?\n</think>\n\nNow.\n{call}\0".encode())
    ask = {"model": "scripted", "messages": [HELLO], "tools": [CLOCK], "n": 2}
    async with open_site(model) as site:
        _, _, body = await site.post(CHAT, ask)
        _, _, streamed = await site.post(CHAT, {**ask, "stream": True})
        model.script = (f"<think>\n{call}".encode(),)
        _, _, endless = await site.post(CHAT, ask)
    assert len(body["choices"]) == 2
    for choice in body["choices"]:
        message = choice["message"]
        assert (message["reasoning_content"], message["content"]) == (f"Shall I {call}?", "Now.")
        assert [one["function"]["name"] for one in message["tool_calls"]] == ["clock"]
        assert choice["finish_reason"] == "tool_calls"
    *events, _ = events_of(streamed)
    for index in (0, 1):
        deltas = [one["delta"] for event in events for one in event["choices"] if one["index"] == index]
        assert "".join(delta.get("reasoning_content", "") for delta in deltas) == f"Shall I {call}?"
        assert "".join(delta.get("content") or "" for delta in deltas) == "Now."
        assert sum("id" in one for delta in deltas for one in delta.get("tool_calls", ())) == 1
    (message,) = {str(choice["message"]): choice["message"] for choice in endless["choices"]}.values()
    assert message["reasoning_content"] == call and message["content"] is None and "tool_calls" not in message


@pytest.mark.process
async def test_an_answer_that_follows_a_grammar_is_content() -> None:
    ask = {"model": "scripted", "messages": [HELLO], "response_format": {"type": "json_object"}}
    async with open_site(model_of(OPEN, b'{"a": 1}')) as site:
        _, _, body = await site.post(CHAT, ask)
    assert body["choices"][0]["message"] == {"role": "assistant", "content": '{"a": 1}', "refusal": None}


@pytest.mark.process
async def test_a_forced_call_comes_without_thinking() -> None:
    model = model_of(f"{TOOLS}{{{{- '<think>\\n' }}}}", b'{"name": "clock", "arguments": {}}')
    ask = {"model": "scripted", "messages": [HELLO], "tools": [CLOCK], "tool_choice": "required"}
    async with open_site(model) as site:
        _, _, body = await site.post(CHAT, ask)
    message = body["choices"][0]["message"]
    assert [one["function"]["name"] for one in message["tool_calls"]] == ["clock"]
    assert message["content"] is None and "reasoning_content" not in message


@pytest.mark.process
async def test_stop_strings_end_thinking_and_log_probabilities_name_each_token_once() -> None:
    text = "<think>\nOne, two.\n</think>\n\nThree."
    ask = {"model": "scripted", "messages": [HELLO], "logprobs": True}
    async with open_site(model_of(QWEN3, text.encode() + b"\0")) as site:
        _, _, whole = await site.post(CHAT, ask)
        _, _, streamed = await site.post(CHAT, {**ask, "stream": True})
        _, _, inside = await site.post(CHAT, {**ask, "stop": "two"})
        _, _, behind = await site.post(CHAT, {**ask, "stop": "ree"})
        _, _, tag = await site.post(CHAT, {**ask, "stop": "</think>"})
    told = whole["choices"][0]["logprobs"]["content"]
    assert "".join(one["token"] for one in told) == text
    *events, _ = events_of(streamed)
    parts = [event["choices"][0]["logprobs"] for event in events]
    assert [one for part in parts if part for one in part["content"]] == told
    ends = [one["choices"][0] for one in (inside, behind, tag)]
    assert [one["finish_reason"] for one in ends] == ["stop"] * 3
    shown = [(one["message"]["reasoning_content"], one["message"]["content"]) for one in ends]
    assert shown == [("One, ", None), ("One, two.", "Th"), ("One, two.\n", None)]


@pytest.mark.process
async def test_thinking_in_the_history_reaches_the_template() -> None:
    model = model_of(QWEN3, b"Hi\0")
    turns = [HELLO, {"role": "assistant", "content": "Hello!", "reasoning_content": "\nGreet."}, HELLO]
    async with open_site(model) as site:
        _, headers, _ = await site.post(CHAT, {"model": "scripted", "messages": turns})
        assert "x-barnraise-ignored" not in headers
        assert "assistant\n<think>\nGreet.\n</think>\n\nHello!<|im_end|>" in bytes(model.sessions[0].tokens).decode()
        turns[0] = {**HELLO, "reasoning_content": "Why?"}
        _, headers, _ = await site.post(CHAT, {"model": "scripted", "messages": turns})
        assert headers["x-barnraise-ignored"] == "messages.reasoning_content"
        turns[1] = {**turns[1], "reasoning_content": ["x"]}
        status, _, refused = await site.post(CHAT, {"model": "scripted", "messages": turns})
    assert status == 400 and "messages[1].reasoning_content is no text: send a string" in refused["error"]["message"]
