"""`echo`: the prompt before the answer, with the log-probabilities of its tokens."""

from __future__ import annotations

from typing import Any

import pytest

from peer.model.text.rules import TextRules
from tests.swarm.gateway.scripted import CONTEXT, ScriptedModel, events_of, open_site

TEXT = "/v1/completions"
ONCE = {"model": "scripted", "prompt": "Once", "echo": True}


def listed(body: Any) -> tuple[str, dict[str, list[Any]], str]:
    """Return the text, the log-probabilities and the end of the first choice, whole or of a stream."""
    chunks = events_of(body)[:-1] if isinstance(body, bytes) else [body]
    choices = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == 0]
    merged = dict[str, list[Any]]()
    for choice in choices:
        for name, values in (choice["logprobs"] or {}).items():
            merged[name] = merged.get(name, []) + (values or [])
    return "".join(choice["text"] for choice in choices), merged, choices[-1]["finish_reason"]


@pytest.mark.parametrize("stream", [False, True])
async def test_the_prompt_comes_first_with_its_log_probabilities(stream: bool) -> None:
    async with open_site(ScriptedModel(b"ab")) as site:
        asked = {**ONCE, "max_tokens": 2, "logprobs": 2, "stream": stream, "stream_options": {"include_usage": True}}
        _, _, body = await site.post(TEXT, asked)
    text, merged, finish = listed(body)
    assert (text, finish) == ("Onceab", "length")
    best = {"\0": -1.0, "\1": -2.0}
    assert merged == {
        "tokens": list("Onceab"),
        "token_logprobs": [None, *(-100.0 - byte for byte in b"nce"), -0.5, -0.5],
        "top_logprobs": [
            None,
            *({**best, letter: -100.0 - ord(letter)} for letter in "nce"),
            *({letter: -0.5, "\0": -1.5} for letter in "ab"),
        ],
        "text_offset": [0, 1, 2, 3, 4, 5],
    }
    usage = (events_of(body)[-2] if isinstance(body, bytes) else body)["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (4, 2)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("logprobs", [None, 0, 1])
async def test_max_tokens_0_gives_the_prompt_alone(stream: bool, logprobs: int | None) -> None:
    model = ScriptedModel(b"ab")
    async with open_site(model) as site:
        given = {**ONCE, "prompt": list(b"Once") * (CONTEXT // 4), "max_tokens": 0}
        status, _, body = await site.post(TEXT, {**given, "logprobs": logprobs, "stream": stream})
    text, merged, finish = listed(body)
    assert status == 200 and (text, finish) == ("Once" * (CONTEXT // 4), "length"), "it may fill the context"
    assert len(merged.get("tokens", [])) == (0 if logprobs is None else CONTEXT)
    assert bool(merged.get("top_logprobs")) == (logprobs == 1)
    if not stream:
        assert body["usage"] == {"prompt_tokens": CONTEXT, "completion_tokens": 0, "total_tokens": CONTEXT}
    assert all(session.closed.is_set() for session in model.sessions)


async def test_the_token_that_ends_an_answer_is_listed() -> None:
    """lm-eval drops one token behind the prompt, whatever it is."""
    async with open_site(ScriptedModel(b"!", text=TextRules(stops=(ord("!"),)))) as site:
        _, _, body = await site.post(TEXT, {**ONCE, "max_tokens": 1, "logprobs": 1})
    text, merged, finish = listed(body)
    assert (text, finish) == ("Once", "stop") and merged["tokens"] == list("Once!")


async def test_every_answer_to_each_prompt_has_it() -> None:
    async with open_site(ScriptedModel(b"ab")) as site:
        asked = {**ONCE, "prompt": [list(b"Once"), list(b"X")], "n": 2, "max_tokens": 1, "logprobs": 1}
        _, _, body = await site.post(TEXT, asked)
    assert [choice["text"] for choice in body["choices"]] == ["Oncea", "Oncea", "Xa", "Xa"]
    assert body["choices"][2]["logprobs"]["token_logprobs"] == [None, -0.5]


async def test_special_tokens_of_ids_are_shown_on_request_only() -> None:
    async with open_site(ScriptedModel(b"ab", special=b"<")) as site:
        asked = {**ONCE, "prompt": list(b"<Once"), "max_tokens": 0, "logprobs": 0}
        _, _, hidden = await site.post(TEXT, asked)
        _, _, shown = await site.post(TEXT, {**asked, "skip_special_tokens": False})
    assert listed(hidden)[0] == "Once" and listed(hidden)[1]["text_offset"] == [0, 0, 1, 2, 3]
    assert listed(shown)[0] == "<Once" and listed(shown)[1]["text_offset"] == [0, 1, 2, 3, 4]


async def test_an_answer_of_no_tokens_is_refused_without_it() -> None:
    async with open_site(ScriptedModel(b"ab")) as site:
        status, _, body = await site.post(TEXT, {**ONCE, "echo": False, "max_tokens": 0})
    assert status == 400 and body["error"]["param"] == "max_tokens" and "echo=true" in body["error"]["message"]
