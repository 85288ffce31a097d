"""The official `openai` client, and `peer chat`, against a model that is served by real processes."""

from __future__ import annotations

import json
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import openai
import pytest
import torch
import trio

from swarm.inference.client import open_model
from swarm.run.invite import Invite
from tests.cli.support.seen_in import command
from tests.support.forking.command import peer
from tests.swarm.gateway.served_model import KEY, NAME, TEMPLATE, ServedModel, decoded, encoded, served_model
from tests.swarm.serving.serving_swarm import CONTEXT, reference_model, reference_tokens

pytestmark = pytest.mark.process

HELLO: Any = [{"role": "user", "content": "Hello there"}]
PROMPT = "<|im_start|>user\nHello there<|im_end|>\n<|im_start|>assistant\n"
GREEDY: Any = {"model": NAME, "messages": HELLO, "temperature": 0}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedModel]:
    with served_model(tmp_path_factory.mktemp("served"), "--at-once", "4") as model:
        yield model


@pytest.fixture
def client(served: ServedModel) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key=KEY, max_retries=0, timeout=60) as made:
        yield made


def greedy_text(count: int) -> str:
    """Return the likeliest answer to HELLO, as transformers computes it."""
    assert TEMPLATE.startswith("{% for")
    return decoded(reference_tokens(encoded(PROMPT), count))


def test_a_chat_says_what_transformers_says(client: openai.OpenAI) -> None:
    raw = client.chat.completions.with_raw_response.create(**GREEDY, max_tokens=24)
    answer = raw.parse()
    assert answer.choices[0].message.content == greedy_text(24) and answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(encoded(PROMPT)), 24)
    assert [hop.rpartition("=")[2] for hop in raw.headers["x-barnraise-route"].split(", ")] == ["0:3", "3:6"]
    assert [model.id for model in client.models.list()] == [NAME]
    assert client.models.retrieve(NAME).id == NAME


def test_a_stream_has_the_same_text_and_its_usage(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        **GREEDY, max_tokens=24, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == greedy_text(24) and chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].usage is not None and chunks[-1].usage.completion_tokens == 24
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "length"


def test_a_stop_text_and_a_completion(client: openai.OpenAI) -> None:
    whole = greedy_text(24)
    stop = whole[len(whole) // 2 :][:3]
    cut = whole[: whole.index(stop)]
    answer = client.chat.completions.create(**GREEDY, max_tokens=24, stop=["never so", stop])
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == (cut, "stop")
    same = client.completions.create(model=NAME, prompt=PROMPT, max_tokens=24, temperature=0, stop=stop, stream=True)
    assert "".join(chunk.choices[0].text for chunk in same) == cut


def test_seeds_and_several_answers(client: openai.OpenAI) -> None:
    def texts(**options: Any) -> list[str | None]:
        answer = client.chat.completions.create(model=NAME, messages=HELLO, max_tokens=12, **options)
        return [choice.message.content for choice in answer.choices]

    three = texts(seed=4, n=3)
    assert len(set(three)) == 3 and three == texts(seed=4, n=3) and three[1:] == texts(seed=5, n=2)
    assert texts(seed=4, extra_body={"top_k": 1}) == texts(temperature=0)


def test_penalties_and_biases(client: openai.OpenAI) -> None:
    """Against OpenAI's formula over the logits of transformers, in float64."""
    prompt, bias, own = encoded(PROMPT), {5: 2.5, 40: -100.0}, list[int]()
    for _ in range(24):
        with torch.no_grad():
            logits = reference_model()(torch.tensor([prompt + own])).logits[0, -1].double().numpy()
        counts = np.bincount(own, minlength=len(logits))
        wanted = logits - counts * 1.5 - (counts > 0) * 0.5
        for token, raised in bias.items():
            wanted[token] += raised
        own.append(int(wanted.argmax()))
    answer = client.chat.completions.create(
        **GREEDY,
        max_tokens=24,
        frequency_penalty=1.5,
        presence_penalty=0.5,
        extra_body={"logit_bias": bias},
    )
    assert answer.choices[0].message.content == decoded(own) != greedy_text(24)
    with pytest.raises(openai.BadRequestError) as beyond:
        client.chat.completions.create(**GREEDY, logit_bias={"300": 1})
    assert beyond.value.param == "logit_bias"


def test_logprobs(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(**GREEDY, max_tokens=4, logprobs=True, top_logprobs=3)
    assert answer.choices[0].logprobs is not None and answer.choices[0].logprobs.content is not None
    for token in answer.choices[0].logprobs.content:
        assert len(token.top_logprobs) == 3 and token.top_logprobs[0].logprob == token.logprob < 0
    text = client.completions.create(model=NAME, prompt=PROMPT, max_tokens=4, temperature=0, logprobs=2)
    assert text.choices[0].logprobs is not None and text.choices[0].logprobs.token_logprobs is not None
    assert [round(value, 4) for value in text.choices[0].logprobs.token_logprobs] == [
        round(token.logprob, 4) for token in answer.choices[0].logprobs.content
    ]


def test_errors_are_those_of_openai(client: openai.OpenAI, served: ServedModel) -> None:
    with pytest.raises(openai.NotFoundError) as unknown:
        client.chat.completions.create(**{**GREEDY, "model": "gpt-4o"})
    with pytest.raises(openai.BadRequestError) as too_long:
        client.chat.completions.create(**{**GREEDY, "messages": [{"role": "user", "content": "x" * CONTEXT}]})
    with pytest.raises(openai.BadRequestError) as unsupported:
        client.chat.completions.create(**GREEDY, verbosity="high")
    with pytest.raises(openai.AuthenticationError) as wrong_key:
        client.with_options(api_key="sk-other").chat.completions.create(**GREEDY)
    codes = [caught.value.code for caught in (unknown, too_long, unsupported, wrong_key)]
    assert codes == ["model_not_found", "context_length_exceeded", "unsupported_parameter", "invalid_api_key"]
    assert unsupported.value.param == "verbosity"
    assert urllib.request.urlopen(f"{served.url}/healthz", timeout=20).status == 200


def test_too_many_requests_at_once(client: openai.OpenAI) -> None:
    streams = [client.chat.completions.create(**GREEDY, max_tokens=2000, stream=True) for _ in range(4)]
    try:
        with pytest.raises(openai.RateLimitError) as refused:
            client.chat.completions.create(**GREEDY)
        assert refused.value.response.headers["retry-after"] == "1"
    finally:
        for stream in streams:
            stream.close()


async def test_a_client_that_goes_away_in_mid_stream_ends_the_servers_work(served: ServedModel) -> None:
    """Each server publishes a record every few seconds: sooner or later these know of no session."""
    body = {**GREEDY, "max_tokens": 3000, "stream": True}
    async with open_model(Invite.parse(served.invite.read_text())) as model:

        async def both_have(sessions: int, since: float) -> None:
            with trio.fail_after(300):
                while True:
                    await model.servers.refresh(0.2)
                    found = [record for record in model.servers.records.values() if record.at >= since]
                    if [record.sessions for record in found] == [sessions] * 2:
                        return
                    await trio.sleep(0.2)

        before = len(served.events("api", "request_answered"))
        async with httpx2.AsyncClient(base_url=served.url, headers={"Authorization": f"Bearer {KEY}"}) as http:
            async with http.stream("POST", "/v1/chat/completions", json=body, timeout=60) as response:
                assert response.status_code == 200
                await both_have(1, time.time())
            gone = time.time()
        with trio.fail_after(300):
            while len(served.events("api", "request_answered")) == before:
                await trio.sleep(0.02)
        assert served.events("api", "request_answered")[-1]["ended"] == "disconnected"
        await both_have(0, gone)


# -- peer chat ---------------------------------------------------------------------------------------------------------


def chat(served: ServedModel, typed: str, *options: str) -> subprocess.CompletedProcess[str]:
    return peer("chat", served.invite, "--temperature", "0", *options, given=typed)


def shown(text: str) -> str:
    """Return a text as a terminal is shown it."""
    from peer.plain_text import plain

    return "\n".join("\t".join(map(plain, line.split("\t"))) for line in text.split("\n"))


def test_a_chat_in_the_terminal(served: ServedModel) -> None:
    done = chat(served, "Hello there\n\nAgain\n/reset\n/what\nHello there\n/exit\nnever\n", "--max-tokens", "8")
    assert done.returncode == 0, done.stderr
    first = greedy_text(8)
    talk = f"{PROMPT}{first}<|im_end|>\n<|im_start|>user\nAgain<|im_end|>\n<|im_start|>assistant\n"
    second = decoded(reference_tokens(encoded(talk), 8))
    assert done.stdout == "".join(shown(text) + "\n" for text in (first, second, first))
    facts = [line for line in done.stderr.splitlines() if line.startswith("[")]
    assert len(facts) == 3 and all(line.startswith("[8 tokens, ") for line in facts)
    assert all("s0 (blocks 0 to 2), s1 (blocks 3 to 5)]" in line for line in facts)
    assert "A new conversation begins." in done.stderr and "/what is no command: /help lists them" in done.stderr


def test_a_chat_tells_its_figures_and_is_continued_from_its_file(served: ServedModel, tmp_path: Path) -> None:
    history = tmp_path / "talk" / "one.jsonl"
    kept = ("--max-tokens", "8", "--history", str(history))
    whole = chat(served, "Hello there\nAgain\n/stats\n", *kept)
    assert whole.returncode == 0, whole.stderr
    told = whole.stderr.splitlines()
    place = next(place for place, line in enumerate(told) if line.startswith("2 answers, 16 tokens, "))
    assert told[place + 1].endswith(f" of {CONTEXT} tokens of context are used")
    assert told[place + 2].endswith(" begun, 0 servers replaced")
    lines = history.read_text().splitlines()
    assert [json.loads(line)["role"] for line in lines] == ["user", "assistant", "user", "assistant"]
    history.write_text("\n".join(lines[:2]) + "\n")
    assert chat(served, "Again\n", *kept).stdout == whole.stdout.splitlines(keepends=True)[-1]
    chat(served, "/reset\n", *kept)
    assert history.read_text() == ""
    history.write_text("something else")
    refused = chat(served, "", *kept)
    assert refused.returncode == 2 and f"line 1 of {history} is no message of a chat" in refused.stderr


@pytest.mark.parametrize(
    ("source", "written"),
    [("plain", "user: Hello there\nassistant:"), ("{{ messages[0].content + '<|im_end|>' }}", "Hello there<|im_end|>")],
)
def test_a_chat_by_another_template(served: ServedModel, tmp_path: Path, source: str, written: str) -> None:
    (tmp_path / "own.jinja").write_text(source)
    chosen = source if source == "plain" else str(tmp_path / "own.jinja")
    done = chat(served, "Hello there\n", "--max-tokens", "8", "--template", chosen)
    assert done.stdout == shown(decoded(reference_tokens(encoded(written), 8))) + "\n"


def test_a_chat_with_a_system_prompt(served: ServedModel) -> None:
    done = chat(served, "/system Be brief.\nHello there\n", "--max-tokens", "8")
    answer = decoded(reference_tokens(encoded(f"<|im_start|>system\nBe brief.<|im_end|>\n{PROMPT}"), 8))
    assert (done.returncode, done.stdout) == (0, shown(answer) + "\n")
    same = chat(served, "Hello there", "--max-tokens", "8", "--system", "Be brief.")
    assert same.stdout == done.stdout


def test_the_type_on_the_wire_is_chosen_for_a_chat_and_for_an_interface(served: ServedModel) -> None:
    """The answer is that of a model rounded between the servers."""
    prompt = encoded("<|im_start|>user\nTell me<|im_end|>\n<|im_start|>assistant\n")
    rounded = decoded(reference_tokens(prompt, 24, border=(3, "int8")))
    unrounded = decoded(reference_tokens(prompt, 24))
    assert rounded != unrounded
    for options, text in ([], unrounded), (["--wire", "int8"], rounded):
        assert chat(served, "Tell me\n", "--max-tokens", "24", *options).stdout == shown(text) + "\n"

    served.start("int8", "api", served.invite, "--listen", "127.0.0.1:0", "--json", "--wire", "int8")
    url = served.event("int8", "listening")["url"]
    asked = {"model": NAME, "messages": [{"role": "user", "content": "Tell me"}], "max_tokens": 24, "temperature": 0}
    answer = httpx2.post(f"{url}/v1/chat/completions", json=asked, timeout=60).json()
    assert answer["choices"][0]["message"]["content"] == rounded


def test_a_chat_that_is_too_long_says_so(served: ServedModel) -> None:
    done = chat(served, "x" * (CONTEXT + 1) + "\n")
    assert done.returncode == 2 and "begin a new one" in done.stderr


async def test_ctrl_c_stops_an_answer_and_then_the_chat(served: ServedModel) -> None:
    """On a terminal of its own."""
    async with command(100, "chat", str(served.invite), "--max-tokens", "3900") as (terminal, process):
        await terminal.until(lambda text: text.rstrip().endswith(">"))
        terminal.press("Hello there\r")
        await terminal.until(lambda text: len(text.partition("Hello there")[2].strip()) > 20)  # it answers
        terminal.press("\x03")
        await terminal.until(lambda text: "Stopped." in text and text.rstrip().endswith(">"))
        assert " a second, by s0" in terminal.text
        terminal.press("\x03")
        assert await trio.to_thread.run_sync(process.wait, 60) == 130


@pytest.mark.parametrize("given", ["text", "ids"])
def test_the_log_probabilities_of_a_prompt_are_those_of_transformers(client: openai.OpenAI, given: str) -> None:
    """By two servers; the prompt is longer than a chunk of tokens that they compute at once."""
    text = "Once upon a time there was a swarm of peers in the thin air. " * 6
    ids = encoded(text)
    assert len(ids) > 256
    with torch.no_grad():
        logits = reference_model()(torch.tensor([ids])).logits[0]
    right = torch.log_softmax(logits, -1)
    prompt: Any = text if given == "text" else [ids, ids[:20]]
    asked: Any = {"model": NAME, "prompt": prompt, "temperature": 0, "logprobs": 5}
    for count in (0, 1):
        body = client.completions.create(**asked, max_tokens=count, echo=True)
        for choice, own in zip(body.choices, [ids, ids[:20]], strict=False):
            told = choice.logprobs
            assert told is not None and told.token_logprobs is not None and told.top_logprobs is not None
            assert len(told.token_logprobs) == len(told.top_logprobs) == len(told.tokens or ()) == len(own) + count
            assert choice.text.startswith(decoded(own)) and told.token_logprobs[0] is None
            values = torch.tensor(told.token_logprobs[1 : len(own)])
            assert torch.allclose(values, right[torch.arange(len(own) - 1), torch.tensor(own[1:])], atol=1e-4)
            likeliest = [max(one.values()) for one in told.top_logprobs[1 : len(own)]]
            assert torch.allclose(torch.tensor(likeliest), right[: len(own) - 1].max(-1).values, atol=1e-4)
