"""Responses over real HTTP: the official `openai` client, whole and streamed, and its types, strictly checked."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import partial
from typing import Any, cast, get_args

import openai
import pytest
import trio
from openai.types.responses import Response, ResponseStreamEvent

from peer.errors import BarnraiseError
from swarm.gateway.asks import read_chat
from swarm.gateway.errors import ApiError
from swarm.gateway.responses.request import read_response
from tests.swarm.gateway.reading import thinking_models
from tests.swarm.gateway.reading.thinking_models import model_of
from tests.swarm.gateway.scripted import ScriptedModel, open_site
from tests.swarm.gateway.tool_models import ADD, CLOCK, HERMES, WEATHER, Calls, written

PATH = "/v1/responses"
TOOLS = [{"type": "function", "strict": False, **tool["function"]} for tool in (WEATHER, ADD, CLOCK)]
EVENTS: dict[str, Any] = {
    get_args(kind.model_fields["type"].annotation)[0]: kind for kind in get_args(get_args(ResponseStreamEvent)[0])
}
"""OpenAI's type of each event."""
MORE = {"max_output_tokens": 900, "temperature": 0.5, "reasoning": {"effort": "low"}}
QUESTION = "How warm are Köln and Bonn together?"
CITIES: Calls = [("get_weather", {"city": 'Köln "}]', "days": 1}), ("get_weather", {"city": "Bonn" * 100})]
SUM: Calls = [("add", {"terms": [20, 1.5]})]
RESULTS: dict[str, Callable[..., str]] = {
    "get_weather": lambda city, days=0: f"{len(city)} degrees",
    "add": lambda terms: str(sum(terms)),
}


def asked(port: int, stream: bool, **ask: Any) -> Response:
    """Ask with OpenAI's own client, in a thread. Its stream checks the order of events."""
    with openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0, timeout=60) as client:
        if not stream:
            return cast(Response, cast(Any, client.responses.create)(model="scripted", **ask))
        with cast(Any, client.responses.stream)(model="scripted", **ask) as events:
            texts, kinds = dict[str, str](), list[str]()
            for event in events:
                kinds.append(event.type)
                if event.type.endswith(".delta"):
                    texts[event.item_id] = texts.get(event.item_id, "") + event.delta
            done = cast(Response, events.get_final_response())
        assert kinds[:2] == ["response.created", "response.in_progress"] and kinds[-1] == "response.completed"
        whole = {item.id: item.arguments if item.type == "function_call" else text_of(item) for item in done.output}
        assert texts == {id: text for id, text in whole.items() if text}
        return done


def text_of(item: Any) -> str:
    return "".join(part.text for part in item.content)


async def said(model: ScriptedModel, ask: dict[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return a whole response and the events of a streamed one, of which each is of OpenAI's types."""
    async with open_site(model) as site:
        status, _, whole = await site.post(PATH, {"model": "scripted", **ask})
        assert status == 200, whole
        _, _, streamed = await site.post(PATH, {"model": "scripted", **ask, "stream": True})
    Response.model_validate(whole, strict=True)
    events = []
    for number, block in enumerate(streamed.decode().strip().split("\n\n")):
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}" and event["sequence_number"] == number
        EVENTS[event["type"]].model_validate_json(json.dumps(event), strict=True)
        events.append(event)
    return whole, events


@pytest.mark.process
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_an_agent_calls_two_tools_and_gets_its_answer(stream: bool) -> None:
    model = model_of(HERMES)
    model.manifest.model.max_seq_len = 30_000
    history: list[Any] = [{"role": "user", "content": QUESTION}]
    async with open_site(model) as site:
        ask = partial(asked, site.port, stream, instructions="Be brief.", tools=TOOLS, max_output_tokens=4000)
        for calls in (CITIES, SUM):
            model.script = (f"Let me see.\n{written('hermes', calls)}\0".encode(),)
            response = await trio.to_thread.run_sync(partial(ask, input=history))
            assert (response.status, response.output_text) == ("completed", "Let me see.")
            found: list[Any] = [item for item in response.output if item.type == "function_call"]
            assert [(one.name, json.loads(one.arguments)) for one in found] == list(calls)
            history += response.output  # as OpenAI's examples do
            for one in found:
                output = RESULTS[one.name](**json.loads(one.arguments))
                history.append({"type": "function_call_output", "call_id": one.call_id, "output": output})
        model.script = (b"21.5 degrees\0",)
        response = await trio.to_thread.run_sync(partial(ask, input=json.loads(json.dumps(history, default=dumped))))
    assert response.output_text == "21.5 degrees"
    prompt = bytes(model.sessions[-1].tokens).decode()
    assert prompt.startswith("<|im_start|>system\nBe brief.") and prompt.count("<|im_start|>assistant\n") == 3
    assert f"assistant\nLet me see.\n{written('hermes', CITIES)}<|im_end|>" in prompt
    assert "400 degrees" in prompt and "21.5\n</tool_response>" in prompt


def dumped(item: Any) -> Any:
    return item.model_dump()


@pytest.mark.process
async def test_every_event_is_of_openais_types_and_thinking_is_an_item() -> None:
    call = written("hermes", [("clock", {})])
    model = model_of(thinking_models.TOOLS, f"<think>\nHm.\n</think>\n\nNow.\n{call}\nDone\0".encode())
    whole, events = await said(model, {"input": "Hi", "tools": TOOLS, **MORE})
    assert [item["type"] for item in whole["output"]] == ["reasoning", "message", "function_call", "message"]
    assert whole["output"][0]["content"] == [{"type": "reasoning_text", "text": "Hm."}] and whole["store"] is False
    assert whole["usage"]["output_tokens_details"]["reasoning_tokens"] == len("<think>\nHm.\n</think>")
    assert whole["reasoning"] == {"effort": "low", "summary": None}
    assert (whole["temperature"], whole["max_output_tokens"], whole["tools"]) == (0.5, 900, TOOLS)
    kinds = [event["type"].removeprefix("response.") for event in events]
    once = [kind for at, kind in enumerate(kinds) if kinds[at - 1] != kind]
    text = [f"{name}.{end}" for name in ("{}",) for end in ("delta", "done")]
    item = ["output_item.added", "content_part.added", *text, "content_part.done", "output_item.done"]
    thought, told = ([kind.format(f"{name}_text") for kind in item] for name in ("reasoning", "output"))
    called = [kind.format("function_call_arguments") for kind in item if "content_part" not in kind]
    assert once == ["created", "in_progress", *thought, *told, *called, *told, "completed"]
    streamed = events[-1]["response"]
    assert shape(streamed) == shape(whole)


def shape(response: dict[str, Any]) -> Any:
    """Return a response without what differs between two of them."""
    items = [
        {name: value for name, value in item.items() if name not in ("id", "call_id")} for item in response["output"]
    ]
    own = ("id", "created_at", "completed_at", "output")
    return {name: value for name, value in response.items() if name not in own}, items


@pytest.mark.process
async def test_a_cut_answer_is_incomplete_and_an_empty_one_is_a_message() -> None:
    whole, events = await said(ScriptedModel(b"Hello"), {"input": "Hi", "max_output_tokens": 3})
    assert (whole["status"], whole["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert [(one["status"], one["content"][0]["text"]) for one in whole["output"]] == [("incomplete", "Hel")]
    assert events[-1]["type"] == "response.incomplete" and shape(events[-1]["response"]) == shape(whole)
    whole, events = await said(model_of(HERMES, b"\0"), {"input": "Hi"})
    assert [one["content"][0]["text"] for one in whole["output"]] == [""] and whole["status"] == "completed"
    assert [event["item"]["status"] for event in events if "item" in event] == ["in_progress", "completed"]


@pytest.mark.process
async def test_a_cut_call_is_incomplete_and_comes_as_it_is_written() -> None:
    text = written("hermes", SUM)
    model = model_of(HERMES, text.encode())
    begin, middle = text.index('{"terms"'), text.index("1.5")
    ask = {"input": "Hi", "tools": TOOLS}
    whole, events = await said(model, {**ask, "max_output_tokens": middle})
    (call,) = whole["output"]
    assert (call["status"], call["arguments"], whole["status"]) == ("incomplete", text[begin:middle], "incomplete")
    assert events[-1]["type"] == "response.incomplete" and shape(events[-1]["response"]) == shape(whole)
    deltas = [event["delta"] for event in events if event["type"] == "response.function_call_arguments.delta"]
    assert deltas == list(text[begin:middle])  # a token is a letter
    done = [event["arguments"] for event in events if event["type"] == "response.function_call_arguments.done"]
    assert done == [text[begin:middle]]
    model.script = (f"{text[:middle]}\n</tool_call>\0".encode(),)
    whole, events = await said(model, ask)
    assert (whole["status"], [one["status"] for one in whole["output"]]) == ("completed", ["incomplete"])
    assert shape(events[-1]["response"]) == shape(whole)
    history = [*whole["output"], {"type": "function_call_output", "call_id": "x", "output": "no JSON"}]
    history[0]["call_id"] = "x"
    model.script = (b"Sorry.\0",)
    status, _, answered = await _posted(model, {**ask, "input": history})
    assert status == 200 and answered["output"][0]["content"][0]["text"] == "Sorry."


@pytest.mark.process
async def test_an_error_inside_of_a_call_leaves_no_half_item() -> None:
    text = written("hermes", SUM)
    model = model_of(HERMES, text[:-20].encode(), BarnraiseError("a server is gone"))
    _, _, body = await _posted(model, {"input": "Hi", "tools": TOOLS, "stream": True})
    events = [json.loads(one) for one in re.findall("^data: (.*)$", body.decode(), re.MULTILINE)]
    assert "response.function_call_arguments.delta" in [event["type"] for event in events]
    assert events[-1]["type"] == "response.failed" and events[-1]["response"]["output"] == []


@pytest.mark.process
async def test_log_probabilities_are_those_of_a_chat() -> None:
    """Of the text of messages; thinking and calls have none."""
    call = written("hermes", [("clock", {})])
    model = model_of(thinking_models.TOOLS, f"<think>Hm.</think>\n\nNow \u00e9.\n{call}Done\0".encode())
    ask = {"input": "Hi", "tools": TOOLS, "include": ["message.output_text.logprobs"], "top_logprobs": 2}
    whole, events = await said(model, ask)
    parts = [item["content"][0] for item in whole["output"] if item["type"] == "message"]
    for part in parts:
        assert b"".join(bytes(one["bytes"]) for one in part["logprobs"]).decode().endswith(part["text"])
        assert all(len(one["top_logprobs"]) == 2 for one in part["logprobs"])
    assert [part["text"] for part in parts] == ["Now \u00e9.", "Done"]
    deltas = [event for event in events if event["type"] == "response.output_text.delta"]
    streamed = [one for event in deltas for one in event["logprobs"]]
    assert streamed == [one for part in parts for one in part["logprobs"]]
    done = [event["logprobs"] for event in events if event["type"] == "response.output_text.done"]
    assert done == [part["logprobs"] for part in parts]
    assert shape(events[-1]["response"]) == shape(whole) and whole["top_logprobs"] == 2
    body = {"model": "m", "messages": [{"role": "user", "content": "Hi"}], "logprobs": True, "top_logprobs": 2}
    assert read(include=ask["include"], top_logprobs=2).logprobs == read_chat(json.dumps(body).encode()).logprobs == 2
    assert read(include=ask["include"]).logprobs == 0 and read(include=["x"]).logprobs is None
    assert (read(include=ask["include"]).ignored, read(include=["x"]).ignored) == ((), ("include",))


@pytest.mark.process
async def test_an_error_in_a_stream_is_its_last_event() -> None:
    model = ScriptedModel(b"He", BarnraiseError("a server is gone"))
    _, _, body = await _posted(model, {"input": "Hi", "stream": True})
    events = [json.loads(one) for one in re.findall("^data: (.*)$", body.decode(), re.MULTILINE)]
    for event in events:
        EVENTS[event["type"]].model_validate_json(json.dumps(event), strict=True)
    error, failed = events[-2:]
    assert error["type"] == "error" and error["code"] == "servers_failed" and "a server is gone" in error["message"]
    assert failed["type"] == "response.failed" and failed["response"]["status"] == "failed"
    assert failed["response"]["error"] == {"code": "server_error", "message": error["message"]}
    assert failed["response"]["output"] == [] and failed["response"]["completed_at"] is None
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    async with open_site(model) as site:
        kinds, error = await trio.to_thread.run_sync(failure, site.port)
    assert kinds[-2:] == ["error", "response.failed"] and error.code == "server_error" and "is gone" in error.message
    status, _, body = await _posted(model, {"input": "Hi"})
    assert status == 503 and body["error"]["code"] == "servers_failed"


def failure(port: int) -> tuple[list[str], Any]:
    """Return the kinds of events that OpenAI's own client reads of a stream that fails, and the error."""
    with openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0, timeout=60) as client:
        events: list[Any] = list(client.responses.create(model="scripted", input="Hi", stream=True))
    return [event.type for event in events], events[-1].response.error


async def _posted(model: ScriptedModel, ask: dict[str, Any]) -> tuple[int, dict[str, str], Any]:
    async with open_site(model) as site:
        return await site.post(PATH, {"model": "scripted", **ask})


@pytest.mark.process
async def test_what_is_ignored_is_listed() -> None:
    given = {"store": True, "metadata": {"a": "b"}, "reasoning": {"summary": "auto"}, "include": ["file_search"]}
    item = {"role": "user", "content": "Hi", "phase": "commentary"}
    status, headers, body = await _posted(
        ScriptedModel(b"Hi"), {"input": [item], "tool_choice": "none", "tools": TOOLS, **given}
    )
    assert status == 200 and body["store"] is False
    assert headers["x-barnraise-ignored"] == "metadata, include, reasoning.summary, input.phase, store"
    _, headers, _ = await _posted(
        ScriptedModel(b"Hi"), {"input": "Hi", "store": False, "text": {"format": {"type": "text"}}, "truncation": None}
    )
    assert "x-barnraise-ignored" not in headers


# -- requests ----------------------------------------------------------------------------------------------------------


def read(**ask: Any) -> Any:
    return read_response(json.dumps({"model": "m", "input": "Hi", **ask}).encode())


def test_items_become_messages() -> None:
    call = {"type": "function_call", "name": "clock", "arguments": "{}"}
    part = {"type": "input_text", "text": "So"}
    ask = read(
        instructions="Be brief.",
        input=[
            {"role": "developer", "content": [{**part, "text": "And "}, {**part, "text": "kind."}]},
            {"role": "user", "content": "Hi"},
            {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
            {"type": "message", "role": "assistant", "content": [{**part, "type": "output_text", "annotations": []}]},
            {**call, "call_id": "a"},
            {**call, "call_id": "b"},
            {"type": "function_call_output", "call_id": "b", "output": [{"type": "input_text", "text": "12"}]},
            {"type": "function_call_output", "call_id": "a", "output": "11"},
            {"type": "reasoning", "id": "rs_2", "summary": [], "encrypted_content": "x"},
            {"role": "assistant", "content": "One"},
            {"role": "assistant", "content": "Two"},
        ],
    )  # fmt: skip
    told = [
        (one.role, one.content, one.thought, [call.id for call in one.calls], one.tool_call_id, one.name)
        for one in ask.messages
    ]
    assert told == [
        ("system", "Be brief.\n\nAnd kind.", "", [], "", ""),
        ("user", "Hi", "", [], "", ""),
        ("assistant", "So", "Hm.", ["a", "b"], "", ""),
        ("tool", "12", "", [], "b", "clock"),
        ("tool", "11", "", [], "a", "clock"),
        ("assistant", "One", "", [], "", ""),
        ("assistant", "Two", "", [], "", ""),
    ]
    assert ask.ignored == ("input.encrypted_content",)


def test_tools_and_parameters_are_those_of_a_chat() -> None:
    allowed = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "add"}]}
    ask = read(tools=TOOLS, tool_choice=allowed, parallel_tool_calls=False, max_output_tokens=7, top_p=0.5, stream=True)
    assert ask.tools is not None and ask.tools.given == (ADD,) and not ask.tools.is_parallel
    assert (ask.count, ask.sampling.top_p, ask.n, ask.stream) == (7, 0.5, 1, True)
    forced = read(tools=TOOLS, tool_choice={"type": "function", "name": "add"}).tools
    assert forced is not None and forced.forced == ("add",) and len(forced.given) == 3
    both = read(tools=TOOLS, text={"format": {"type": "json_object"}})
    assert both.tools is not None and both.grammar is not None, "the model chooses"
    assert read(tools=[]).count is None and read(tool_choice="none", tools=TOOLS).tools is None


def test_the_format_of_the_text_is_that_of_a_chat() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    form = {"type": "json_schema", "name": "a", "schema": schema, "strict": True}
    chat = {"type": "json_schema", "json_schema": {name: form[name] for name in form if name != "type"}}
    body = {"model": "m", "messages": [{"role": "user", "content": "Hi"}], "response_format": chat}
    assert read(text={"format": form}).grammar == read_chat(json.dumps(body).encode()).grammar is not None
    assert read(text={"format": {"type": "json_object"}}).grammar is not None
    assert read(text={"format": {"type": "text"}, "verbosity": "medium"}).grammar is read(text={}).grammar is None


@pytest.mark.parametrize(
    ("given", "param", "words"),
    [
        ({"text": {"format": {"type": "xml"}}}, "text.format", "text.format.type is 'xml'"),
        ({"text": {"format": {"type": "json_schema", "schema": {}}}}, "text.format", "text.format is no object with a"),
        (
            {"text": {"format": {"type": "json_schema", "name": "a", "shape": 1}}},
            "text.format",
            "text.format.shape is not known",
        ),
        ({"text": {"format": {"type": "json_schema", "name": "a", "schema": 3}}}, "text.format", "no JSON object"),
        ({"text": {"verbosity": "low"}}, "text.verbosity", "leave it out"),
        ({"previous_response_id": "resp_1"}, "previous_response_id", "send the history in input"),
        ({"conversation": "conv_1"}, "conversation", "send the history in input"),
        ({"background": True}, "background", "leave it out"),
        ({"prompt": {"id": "p"}}, "prompt", "leave it out"),
        ({"truncation": "auto"}, "truncation", "leave it out"),
        ({"reasoning": {"effort": "utmost"}}, "reasoning", "correct it"),
        ({"reasoning_effort": "high"}, "reasoning_effort", "leave it out"),
        ({"top_logprobs": 2}, "top_logprobs", "send include=['message.output_text.logprobs'], too"),
        ({"n": 2}, "n", "leave it out"),
        ({"max_tokens": 5}, "max_tokens", "send max_output_tokens"),
        ({"text": {"format": 3}}, "text", "send {'format'"),
        ({"tools": [{"type": "web_search"}]}, "tools", "tools[0] has the type 'web_search': send functions only"),
        ({"tools": [{"type": "function", "name": "a b"}]}, "tools", "tools[0].name is 'a b'"),
        ({"tool_choice": {"type": "function", "name": "f"}, "tools": TOOLS}, "tool_choice", "names 'f', not in tools"),
        ({"input": []}, "input", "correct it"),
        ({"input": [7]}, "input", "input[0] is no object"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input", "input[0] has the type 'item_reference'"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input", "input[0].role"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input", "input[0].content has a part"),
        (
            {"input": [{"type": "function_call", "call_id": "a", "name": "f", "arguments": {}}]},
            "input",
            "input[0].arguments is no text",
        ),
        (
            {"input": [{"type": "function_call_output", "call_id": "a", "output": "x"}]},
            "input",
            "input[0].call_id is that of no call before it",
        ),
    ],
)
def test_what_is_refused_names_the_remedy(given: dict[str, Any], param: str, words: str) -> None:
    with pytest.raises(ApiError) as refused:
        read(**given)
    assert refused.value.status == 400 and refused.value.param == param and words in str(refused.value)
