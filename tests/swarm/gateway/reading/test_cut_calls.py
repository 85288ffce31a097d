"""Calls over real HTTP while the model still writes them, and calls that are cut."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, cast

import openai
import pytest
import trio

from tests.swarm.gateway.reading.answers import JSON
from tests.swarm.gateway.tool_models import ADD, CLOCK, Calls, site_of, streamed_events, written

pytestmark = pytest.mark.process

CHAT = "/v1/chat/completions"
TOOLS = [ADD, CLOCK]
QUESTION: dict[str, Any] = {"role": "user", "content": "How much is it?"}
SUM: Calls = [("add", {"terms": [20, 1.5]})]


@pytest.mark.parametrize("form", JSON)
async def test_arguments_come_while_the_model_still_writes_them(form: str) -> None:
    """The model goes on only once the client has the first piece of the arguments."""
    text = written(form, SUM)
    begin, came = text.index('"terms"'), trio.Event()
    async with site_of(form, text[:begin].encode(), came, text[begin:].encode(), b"\0") as (site, _):
        first = await trio.to_thread.run_sync(began, f"http://127.0.0.1:{site.port}", came.set)
    assert first == ("{", {"terms": [20, 1.5]})


def began(url: str, tell: Callable[[], None]) -> tuple[str, Any]:
    """Read a stream with OpenAI's own client, in a thread; `tell` is called with the first piece of arguments. Return
    that, and the whole arguments."""
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        create = cast(Any, client.chat.completions.create)
        chunks = create(model="scripted", messages=[QUESTION], tools=TOOLS, stream=True, max_tokens=4000)
        pieces = list[str]()
        for chunk in chunks:
            for delta in chunk.choices[0].delta.tool_calls or ():
                if delta.function.arguments and not pieces:
                    trio.from_thread.run_sync(tell)
                if delta.function.arguments:
                    pieces.append(delta.function.arguments)
        return pieces[0], json.loads("".join(pieces))


async def test_a_call_without_arguments_or_of_an_unknown_function_is_content() -> None:
    text = written("hermes", SUM)
    ask = {"model": "scripted", "messages": [QUESTION], "tools": TOOLS}
    async with site_of("hermes", text.encode()) as (site, model):
        _, _, cut = await site.post(CHAT, {**ask, "max_tokens": text.index('{"terms"')})
        _, _, stopped = await site.post(CHAT, {**ask, "stop": '"arguments"'})
        _, _, without = await site.post(CHAT, {**ask, "tool_choice": "none"})
        model.script = (text.replace('"add"', '"multiply"').encode(),)
        _, _, unknown = await site.post(CHAT, ask)
    assert [one["choices"][0]["finish_reason"] for one in (cut, stopped, without, unknown)] == [
        "length", "stop", "length", "length"
    ]  # fmt: skip
    contents = [one["choices"][0]["message"]["content"] for one in (cut, stopped, without, unknown)]
    heads = [text.split('{"terms"')[0], text.split('"arguments"')[0]]
    assert contents == [*heads, text, text.replace('"add"', '"multiply"')]
    assert not any("tool_calls" in one["choices"][0]["message"] for one in (cut, stopped, without, unknown))


@pytest.mark.parametrize("form", JSON)
async def test_a_call_that_is_cut_has_the_arguments_so_far_and_the_history_takes_it(form: str) -> None:
    text = written(form, SUM)
    ask = {"model": "scripted", "messages": [QUESTION], "tools": TOOLS}
    begin, middle = text.index('{"terms"'), text.index("1.5")
    async with site_of(form, text.encode()) as (site, model):
        for change, arguments, finish in (
            ({"max_tokens": middle}, text[begin:middle], "length"),
            ({"stop": "1.5"}, text[begin:middle], "tool_calls"),
            ({"max_tokens": begin + 1}, "{", "length"),
        ):
            _, _, whole = await site.post(CHAT, {**ask, **change})
            _, _, streamed = await site.post(CHAT, {**ask, **change, "stream": True})
            (choice,) = whole["choices"]
            (call,) = choice["message"]["tool_calls"]
            assert call["function"] == {"name": "add", "arguments": arguments} and choice["finish_reason"] == finish
            assert choice["message"]["content"] is None
            events = [event["choices"][0] for event in streamed_events(streamed)]
            pieces = [one["function"] for event in events for one in event["delta"].get("tool_calls", ())]
            assert "".join(piece["arguments"] for piece in pieces) == arguments and pieces[0]["name"] == "add"
            assert events[-1]["finish_reason"] == finish and not any(one["delta"].get("content") for one in events)
        history = [QUESTION, choice["message"], {"role": "tool", "tool_call_id": call["id"], "content": "no JSON"}]
        model.script = (b"Sorry.\0",)
        status, _, body = await site.post(CHAT, {**ask, "messages": history})
    assert status == 200 and body["choices"][0]["message"]["content"] == "Sorry."
    assert '"{"' in bytes(model.sessions[-1].tokens).decode()  # as templates write a text as JSON
