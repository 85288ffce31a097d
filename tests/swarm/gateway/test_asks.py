"""Bodies of requests: what they ask for, and what is refused by name."""

from __future__ import annotations

import json
from typing import Any, get_type_hints
from urllib.parse import unquote

import pytest
from openai.types import completion_create_params as text_params
from openai.types.chat import (
    ChatCompletionAssistantMessageParam,
    ChatCompletionToolMessageParam,
    ChatCompletionUserMessageParam,
)
from openai.types.chat import completion_create_params as chat_params

from swarm.gateway.asks import GenerationAsk, _ChatBody, _TextBody, read_chat, read_completion
from swarm.gateway.errors import ApiError
from swarm.gateway.ignored import HARMLESS, REFUSED, REFUSED_IN_MESSAGES, ignored_header
from swarm.gateway.template import ChatMessage


def chat(**body: Any) -> GenerationAsk:
    return read_chat(json.dumps({"model": "m", "messages": [{"role": "user", "content": "Hi"}], **body}).encode())


def text(**body: Any) -> GenerationAsk:
    return read_completion(json.dumps({"model": "m", "prompt": "Hi", **body}).encode())


def refusal(read: Any, **body: Any) -> ApiError:
    with pytest.raises(ApiError) as refused:
        read(**body)
    assert refused.value.status == 400
    return refused.value


def test_the_defaults_are_openais() -> None:
    ask = chat()
    assert (ask.count, ask.n, ask.stops, ask.stream, ask.logprobs) == (None, 1, (), False, None)
    assert (ask.sampling.temperature, ask.sampling.top_p, ask.sampling.logprobs) == (1.0, 1.0, 0)
    assert (text().count, text().prompts) == (16, ("Hi",))
    assert chat().sampling.seed != chat().sampling.seed


def test_every_parameter_arrives() -> None:
    ask = chat(
        max_completion_tokens=9, temperature=0, top_p=0.5, top_k=4, min_p=0.1, repetition_penalty=1.2, seed=-1, n=3,
        stop="x", stream=True, stream_options={"include_usage": True}, logprobs=True, top_logprobs=5, user="me",
        frequency_penalty=-0.5, presence_penalty=2, logit_bias={"7": -100, "0": 1.5},
    )  # fmt: skip
    sampling = ask.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.0, 0.5, 4, 0.1)
    assert (sampling.repetition_penalty, sampling.seed, sampling.logprobs) == (1.2, (1 << 64) - 1, 5)
    assert (sampling.frequency_penalty, sampling.presence_penalty) == (-0.5, 2.0)
    assert sampling.logit_bias == ((0, 1.5), (7, -100.0))
    assert (ask.count, ask.n, ask.stops, ask.stream, ask.include_usage, ask.logprobs) == (9, 3, ("x",), True, True, 5)
    assert chat(max_tokens=4).count == 4 and chat(top_k=-1).sampling.top_k == 0
    assert chat(logprobs=True).sampling.logprobs == 1 and chat(logprobs=True).logprobs == 0


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [("a", ("a",)), (["a", "b"], ("a", "b")), ([1, 2], ((1, 2),)), ([[1], [2, 3]], ((1,), (2, 3)))],
)
def test_the_four_kinds_of_prompts(prompt: Any, prompts: Any) -> None:
    assert text(prompt=prompt).prompts == prompts


@pytest.mark.parametrize(
    "given",
    [
        {"audio": {"voice": "a"}},
        {"modalities": ["audio"]},
        {"web_search_options": {}},
    ],
)
def test_what_is_not_supported_is_refused_by_name(given: dict[str, Any]) -> None:
    (name,) = given
    error = refusal(chat, **given)
    assert (error.code, error.param) == ("unsupported_parameter", name) and str(error).startswith(name)


@pytest.mark.parametrize("given", [{"suffix": "x"}, {"best_of": 2}, {"max_completion_tokens": 3}, {"max_tokens": 0}])
def test_nor_in_a_completion(given: dict[str, Any]) -> None:
    assert refusal(text, **given).param == next(iter(given))


@pytest.mark.parametrize(
    "given",
    [
        {"ignore_eos": False},
        {"stop_token_ids": []},
        {"metadata": {"run": "7"}},
        {"store": True},
        {"store": False},
        {"safety_identifier": "u1"},
        {"prompt_cache_key": "k"},
        {"service_tier": "flex"},
        {"user": "me"},
        {"min_tokens": 0},
        {"length_penalty": 1.0},
        {"use_beam_search": False},
        {"add_generation_prompt": True},
        {"spaces_between_special_tokens": True},
        {"include_stop_str_in_output": False},
        {"guided_json": ""},
        {"no_such_thing": {}},
        {"no_such_number": 0.0},
        {"no_such_switch": False},
        {"no_such_switch": True},
        {"no_such_number": -1},
        {"cline_task": {"id": "1", "mode": ["act"]}},
        {"prediction": {"type": "content", "content": "x"}},
    ],
)
def test_a_parameter_that_changes_nothing_or_is_unknown_is_ignored_and_listed(given: dict[str, Any]) -> None:
    assert chat(**given).ignored == text(**given).ignored == tuple(given)


@pytest.mark.parametrize(
    "given",
    [
        {"ignore_eos": True},
        {"stop_token_ids": [2]},
        {"min_tokens": 5},
        {"length_penalty": 2},
        {"add_generation_prompt": False},
        {"detokenize": False},
        {"best_of": True},
    ],
)
def test_a_parameter_that_would_change_the_answer_is_refused(given: dict[str, Any]) -> None:
    for read in (chat, text):
        assert refusal(read, **given).code == "unsupported_parameter"


def test_what_is_null_is_absent() -> None:
    ask = chat(stop=None, seed=None, audio=None, stream_options={"include_usage": None, "other": None})
    assert ask.ignored == text(suffix=None).ignored == () and not ask.include_usage


def test_parameters_inside_of_another_one_are_ignored_too() -> None:
    ask = chat(stream=True, stream_options={"include_usage": True, "continuous_usage_stats": False})
    assert ask.include_usage and ask.ignored == ("stream_options.continuous_usage_stats",)
    cached = {"role": "user", "content": "x", "cache_control": {"type": "ephemeral"}}
    ask = chat(messages=[cached, {**cached, "tool_calls": [], "id": "1", "audio": None}], vendor=1)
    assert ask.ignored == ("vendor", "messages.cache_control", "messages.tool_calls", "messages.id")


@pytest.mark.parametrize(("kind", "theirs"), [(_ChatBody, chat_params), (_TextBody, text_params)])
def test_every_parameter_that_openai_defines_is_honoured_refused_or_harmless(kind: Any, theirs: Any) -> None:
    defined = {*get_type_hints(theirs.CompletionCreateParamsBase), "stream"}
    honoured = set(kind.__struct_fields__)
    places = (honoured, HARMLESS - honoured, set(REFUSED) - honoured)
    assert {"model", "temperature", "stream_options"} < defined
    assert {name: sum(name in place for place in places) for name in defined} == dict.fromkeys(defined, 1)


def test_every_field_that_openai_defines_of_a_message_is_honoured_or_refused() -> None:
    kinds = (ChatCompletionUserMessageParam, ChatCompletionAssistantMessageParam, ChatCompletionToolMessageParam)
    defined = {name for kind in kinds for name in get_type_hints(kind)}
    assert defined - {"role", "content"} == set(REFUSED_IN_MESSAGES)


def test_special_tokens_are_shown_on_request() -> None:
    assert (chat().special, chat(skip_special_tokens=False).special) == (False, True)


def test_the_header_lists_names_escaped_and_at_most_32() -> None:
    assert ignored_header(()) == {}
    hostile = ("a\r\nSet-Cookie: x", "é", "\ud800", "a, b", "n" * 500)
    (header,) = ignored_header(hostile).values()
    assert header.isascii() and header.isprintable() and header.count(",") == len(hostile) - 1
    (wide,) = ignored_header(["\U0001f642" * 500] * 40).values()
    assert len(wide) <= 32 * 66 and unquote(wide.split(", ")[0]) == "\U0001f642" * 5
    (header,) = ignored_header([f"p{index}" for index in range(500)]).values()
    assert header.split(", ") == [f"p{index}" for index in range(32)]


@pytest.mark.parametrize(
    ("param", "value"),
    [
        ("temperature", 2.5),
        ("temperature", "hot"),
        ("top_p", -0.1),
        ("n", 0),
        ("n", 17),
        ("max_tokens", 0),
        ("max_tokens", 1.5),
        ("seed", 1 << 70),
        ("seed", "1"),
        ("stop", ["x"] * 17),
        ("stop", [""]),
        ("stream", "yes"),
        ("frequency_penalty", 2.5),
        ("presence_penalty", -2.5),
        ("presence_penalty", True),
        ("logit_bias", {"5": 101}),
        ("logit_bias", {"-1": 1}),
        ("logit_bias", {"05": 1}),
        ("logit_bias", {"the": 1}),
        ("logit_bias", {str(1 << 24): 1}),
        ("logit_bias", [5]),
        ("logit_bias", {str(token): 1 for token in range(301)}),
        ("top_logprobs", 3),
        ("top_logprobs", 21),
        ("messages", []),
        ("messages", "Hi"),
        ("messages", [{"role": "tool", "content": "x"}]),
        ("messages", [{"role": "user", "content": 3}]),
        ("messages", [{"content": "x"}]),
        ("messages", [{"role": "user", "content": None}]),
        ("messages", [{"role": "system"}]),
        ("messages", [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]),
        ("messages", [{"role": "user", "content": "x", "name": "me"}]),
        ("messages", [{"role": "assistant", "content": "x", "tool_calls": [{}]}]),
    ],
)
def test_a_wrong_value_names_its_parameter(param: str, value: Any) -> None:
    assert refusal(chat, **{param: value}).param == param


def test_wrong_prompts() -> None:
    for prompt in ([], [1, "a"], 5, [[1], 2], [-1]):
        assert refusal(text, prompt=prompt).param == "prompt"
    assert refusal(text, prompt=["a"] * 9, n=2).param == "n"


def test_messages_of_all_kinds() -> None:
    given = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": "c", "refusal": None, "tool_calls": [], "audio": None},
    ]
    told = (("system", "Be brief."), ("user", "ab"), ("assistant", "c"))
    assert chat(messages=given).messages == tuple(ChatMessage(*one) for one in told)


def test_an_answer_without_content_in_a_history_is_empty() -> None:
    given = [{"role": "assistant", "content": None, "tool_calls": []}, {"role": "assistant"}]
    assert chat(messages=given).messages == (ChatMessage("assistant", ""),) * 2


def test_a_model_must_be_named() -> None:
    with pytest.raises(ApiError) as refused:
        read_completion(b'{"prompt":"x"}')
    assert refused.value.param == "model"
