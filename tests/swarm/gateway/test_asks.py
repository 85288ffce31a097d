"""Bodies of requests: what they ask for, and what is refused by name."""

from __future__ import annotations

import json
from typing import Any

import pytest

from swarm.gateway.asks import GenerationAsk, read_chat, read_completion
from swarm.gateway.errors import ApiError
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
    )  # fmt: skip
    sampling = ask.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.0, 0.5, 4, 0.1)
    assert (sampling.repetition_penalty, sampling.seed, sampling.logprobs) == (1.2, (1 << 64) - 1, 5)
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
        {"tools": [{"type": "function"}]},
        {"tool_choice": "required"},
        {"response_format": {"type": "json_object"}},
        {"logit_bias": {"5": 1}},
        {"presence_penalty": 0.5},
        {"frequency_penalty": -1},
        {"audio": {}},
        {"modalities": ["audio"]},
        {"store": True},
        {"reasoning_effort": "high"},
        {"no_such_thing": 1},
    ],
)
def test_what_is_not_supported_is_refused_by_name(given: dict[str, Any]) -> None:
    (name,) = given
    error = refusal(chat, **given)
    assert (error.code, error.param) == ("unsupported_parameter", name) and str(error).startswith(name)


@pytest.mark.parametrize("given", [{"echo": True}, {"suffix": "x"}, {"best_of": 2}, {"max_completion_tokens": 3}])
def test_nor_in_a_completion(given: dict[str, Any]) -> None:
    assert refusal(text, **given).param == next(iter(given))


def test_values_that_change_nothing_are_taken() -> None:
    chat(tools=[], tool_choice="auto", response_format={"type": "text"}, logit_bias={}, presence_penalty=0, store=False)
    chat(frequency_penalty=0.0, stop=None, seed=None, audio=None)
    text(echo=False, best_of=1, suffix=None)


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
        ("stream_options", {"other": True}),
        ("top_logprobs", 3),
        ("top_logprobs", 21),
        ("messages", []),
        ("messages", "Hi"),
        ("messages", [{"role": "tool", "content": "x"}]),
        ("messages", [{"role": "user", "content": 3}]),
        ("messages", [{"content": "x"}]),
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


def test_a_model_must_be_named() -> None:
    with pytest.raises(ApiError) as refused:
        read_completion(b'{"prompt":"x"}')
    assert refused.value.param == "model"
