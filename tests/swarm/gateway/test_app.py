"""The gateway over real HTTP, with a model whose answers are written down."""

from __future__ import annotations

import json
from contextlib import suppress
from functools import partial
from typing import Any

import pytest
import trio
from starlette.applications import Starlette
from starlette.routing import Route

from peer.errors import NetworkError
from peer.events import Event
from peer.model.text.rules import TextRules
from swarm.gateway import limits, respond
from swarm.gateway.asks import read_chat
from swarm.gateway.choices import prepare
from swarm.gateway.limits import ApiKeys, Quotas, key_hash
from swarm.gateway.openai import AnswerFormat
from swarm.gateway.template import ChatTemplate
from swarm.inference.client_view import NoServers
from swarm.web import connection
from tests.swarm.gateway.scripted import CONTEXT, ScriptedModel, answer_of, events_of, open_site

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
HELLO = {"model": "scripted", "messages": [{"role": "user", "content": "Hello"}]}
ONCE = {"model": "scripted", "prompt": "Once"}


def text_of(body: Any) -> str:
    """Return the text of the first choice of a response, whole or a stream, of either kind."""
    if isinstance(body, bytes):
        choices = [event["choices"][0] for event in events_of(body)[:-1]]
        return "".join(one["text"] if "text" in one else one["delta"].get("content", "") for one in choices)
    choice = body["choices"][0]
    return str(choice["text"] if "text" in choice else choice["message"]["content"])


async def test_a_chat_is_answered_whole() -> None:
    model = ScriptedModel(b"Good day")
    async with open_site(model) as site:
        status, headers, body = await site.post(CHAT, {**HELLO, "max_tokens": 4, "n": 2, "seed": 7})
        assert await site.ended() == "done"  # told once the answer has left
    assert status == 200 and headers["x-barnraise-route"] == "peer-a=0:3, peer-b=3:6"
    choice = {"index": 0, "message": {"role": "assistant", "content": "Good", "refusal": None}}
    assert body["choices"][0] == {**choice, "logprobs": None, "finish_reason": "length"}
    assert body["usage"] == {
        "prompt_tokens": len("user: Hello\nassistant:"),
        "completion_tokens": 8,
        "total_tokens": 30,
    }
    assert {session.sampling.seed for session in model.sessions} == {7, 8}
    assert all(session.closed.is_set() for session in model.sessions)
    assert site.events[0].fields | {"seconds": 0} == {
        "ended": "done", "seconds": 0, "answers": 2, "prompt_tokens": 22, "tokens": 8, "failovers": 0, "ignored": ""
    }  # fmt: skip


async def test_a_chat_is_streamed() -> None:
    async with open_site(ScriptedModel("Grüß".encode())) as site:
        ask = {**HELLO, "stream": True, "stream_options": {"include_usage": True}, "max_completion_tokens": 6}
        status, headers, body = await site.post(CHAT, ask)
    *chunks, usage, done = events_of(body)
    assert status == 200 and headers["content-type"] == "text/event-stream" and done == "[DONE]"
    assert [chunk["choices"][0]["delta"] for chunk in chunks] == [
        {"role": "assistant", "content": ""},
        *({"content": letter} for letter in "Grüß"),  # no half letters
        {},
    ]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * 5 + ["length"]
    assert all(chunk["object"] == "chat.completion.chunk" and chunk["usage"] is None for chunk in chunks)
    assert usage["choices"] == [] and usage["usage"]["completion_tokens"] == 6
    assert usage["barnraise"]["failovers"] == 0


@pytest.mark.parametrize("stream", [False, True])
async def test_a_stop_text_ends_an_answer(stream: bool) -> None:
    async with open_site(ScriptedModel(b"one two three four")) as site:
        _, _, body = await site.post(TEXT, {**ONCE, "max_tokens": 18, "stop": ["thr", "four"], "stream": stream})
    if stream:
        choices = [event["choices"][0] for event in events_of(body)[:-1]]
        assert "".join(choice["text"] for choice in choices) == "one two "
        assert choices[-1]["finish_reason"] == "stop"
    else:
        assert body["choices"][0] == {"index": 0, "text": "one two ", "logprobs": None, "finish_reason": "stop"}


async def test_a_stop_token_ends_an_answer_and_is_not_shown() -> None:
    async with open_site(ScriptedModel(b"ab!cd", text=TextRules(stops=(ord("!"),)))) as site:
        _, _, body = await site.post(TEXT, {**ONCE, "logprobs": 1})
    (choice,) = body["choices"]
    assert (choice["text"], choice["finish_reason"], body["usage"]["completion_tokens"]) == ("ab", "stop", 3)
    assert choice["logprobs"] == {
        "tokens": ["a", "b"],
        "token_logprobs": [-0.5, -0.5],
        "top_logprobs": [{"a": -0.5}, {"b": -0.5}],
        "text_offset": [0, 1],
    }


@pytest.mark.parametrize("stream", [False, True])
async def test_special_tokens_are_shown_on_request_only(stream: bool) -> None:
    asked = {**ONCE, "stream": stream, "max_tokens": 9, "logprobs": 0}
    async with open_site(ScriptedModel(b"<a>b<", special=b"<>")) as site:
        _, _, hidden = await site.post(TEXT, asked)
        _, _, shown = await site.post(TEXT, {**asked, "skip_special_tokens": False})
        _, _, chat = await site.post(CHAT, {**HELLO, "stream": stream})
    assert (text_of(hidden), text_of(shown), text_of(chat)) == ("ab", "<a>b<", "ab")
    if not stream:
        assert hidden["choices"][0]["logprobs"]["text_offset"] == [0, 0, 1, 1, 2]
        assert hidden["choices"][0]["logprobs"]["tokens"] == ["<", "a", ">", "b", "<"]


async def test_a_stop_text_may_be_a_special_token() -> None:
    async with open_site(ScriptedModel(b"ab<cd", special=b"<")) as site:
        _, _, body = await site.post(TEXT, {**ONCE, "stop": "<"})
    assert (body["choices"][0]["text"], body["choices"][0]["finish_reason"]) == ("ab", "stop")


@pytest.mark.parametrize("stream", [False, True])
async def test_a_response_lists_what_was_ignored(stream: bool) -> None:
    async with open_site(ScriptedModel(b"ab")) as site:
        neutral = {"ignore_eos": False, "metadata": {"a": "b"}, "b\u00e9,\n": ["of an editor"]}
        _, headers, _ = await site.post(CHAT, {**HELLO, "stream": stream, **neutral})
        await site.ended()
        _, quiet, _ = await site.post(CHAT, {**HELLO, "stream": stream})
    assert headers["x-barnraise-ignored"] == "ignore_eos, metadata, b%c3%a9%2c%0a"
    assert str(site.events[0].fields["ignored"]).lower() == headers["x-barnraise-ignored"]
    assert "x-barnraise-ignored" not in quiet


async def test_without_a_template_an_answer_ends_before_the_next_line_of_the_user() -> None:
    async with open_site(ScriptedModel(b"Fine.\nuser: And you?")) as site:
        _, _, body = await site.post(CHAT, HELLO)
    assert body["choices"][0]["message"]["content"] == "Fine."


async def test_a_chat_tells_logprobs() -> None:
    async with open_site(ScriptedModel("é".encode())) as site:
        _, _, body = await site.post(CHAT, {**HELLO, "max_tokens": 2, "logprobs": True, "top_logprobs": 2})
    first, second = body["choices"][0]["logprobs"]["content"]
    assert (first["bytes"], second["bytes"], first["logprob"]) == ([0xC3], [0xA9], -0.5)
    assert [one["bytes"] for one in first["top_logprobs"]] == [[0xC3], [0]]


async def test_several_prompts_are_answered_in_order() -> None:
    async with open_site(ScriptedModel(b"xyz")) as site:
        _, _, body = await site.post(TEXT, {**ONCE, "prompt": ["a", "bc"], "n": 2, "max_tokens": 1})
        _, _, ids = await site.post(TEXT, {**ONCE, "prompt": [1, 2, 3], "max_tokens": 1})
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]
    assert (body["usage"]["prompt_tokens"], ids["usage"]["prompt_tokens"]) == (3, 3)


# -- errors ------------------------------------------------------------------------------------------------------------


async def test_without_servers_the_answer_is_503_and_when_to_come_back() -> None:
    async with open_site(ScriptedModel(NoServers("no server takes blocks 3 to 5: start one"), blocks=6)) as site:
        for stream in (False, True):
            status, headers, body = await site.post(CHAT, {**HELLO, "stream": stream})
            assert (status, headers["retry-after"], body["error"]["code"]) == (503, "5", "no_servers")
        assert (await site.ask("GET", "/healthz"))[0] == 503
    async with open_site(ScriptedModel()) as site:
        assert (await site.ask("GET", "/healthz"))[0] == 200


async def test_an_error_in_mid_stream_is_an_event() -> None:
    async with open_site(ScriptedModel(b"abc", NetworkError("no token came: try again"))) as site:
        status, _, body = await site.post(CHAT, {**HELLO, "stream": True})
    assert status == 200 and events_of(body)[-1]["error"]["code"] == "servers_failed"


@pytest.mark.parametrize(
    ("path", "change", "status", "code"),
    [
        (CHAT, {"model": "other"}, 404, "model_not_found"),
        (CHAT, {"max_tokens": CONTEXT}, 400, "context_length_exceeded"),
        (CHAT, {"messages": [{"role": "user", "content": "x" * CONTEXT}]}, 400, "context_length_exceeded"),
        (CHAT, {"messages": [{"role": "user", "content": "x" * 64 * (CONTEXT + 1)}]}, 400, "context_length_exceeded"),
        (TEXT, {"prompt": ""}, 400, None),
        (TEXT, {"prompt": [256]}, 400, None),
        (TEXT, {"logit_bias": {"255": 1, "256": 1}}, 400, "invalid_value"),
        (TEXT, {"tools": [{}]}, 400, "unsupported_parameter"),
    ],
)
async def test_a_request_is_refused_with_its_reason(path: str, change: Any, status: int, code: str | None) -> None:
    async with open_site(ScriptedModel(b"abc")) as site:
        found, _, body = await site.post(path, {**(HELLO if path == CHAT else ONCE), **change})
    assert (found, body["error"]["code"]) == (status, code) and body["error"]["type"] == "invalid_request_error"


async def test_keys_and_limits() -> None:
    keys = ApiKeys({key_hash("sk-a"): "a", key_hash("sk-b"): "b"})
    async with open_site(ScriptedModel(b"abc"), keys, Quotas(2, 16)) as site:
        assert (await site.ask("GET", "/v1/models"))[0] == 401
        for wrong in ("Bearer sk-c", "Basic sk-a", "sk-a", "Bearer"):
            status, _, body = await site.post(CHAT, HELLO, Authorization=wrong)
            assert (status, body["error"]["type"]) == (401, "authentication_error")
        statuses = [(await site.post(CHAT, HELLO, Authorization="Bearer sk-a"))[0] for _ in range(3)]
        status, headers, _ = await site.post(CHAT, HELLO, Authorization="Bearer sk-a")
        assert statuses == [200, 200, 429] and status == 429 and 1 <= int(headers["retry-after"]) <= 60
        assert (await site.post(CHAT, HELLO, Authorization="bearer sk-b", Host="elsewhere.example"))[0] == 200
        assert (await site.ask("GET", "/"))[0] == 200


async def test_so_many_requests_of_a_key_at_once() -> None:
    model = ScriptedModel(b"abc", ...)
    async with open_site(model, quotas=Quotas(None, 1)) as site, await site.open() as first:
        body = json.dumps({**HELLO, "stream": True}).encode()
        await first.send_all(site.head("POST", CHAT, len(body)) + body)
        assert await first.receive_some()
        status, _, told = await site.post(CHAT, HELLO)
        assert (status, told["error"]["code"]) == (429, "concurrency_limit_exceeded")


async def test_pages_of_other_sites_get_nothing() -> None:
    """Neither by a name that leads here (DNS rebinding), nor by a form, which can send no JSON."""
    async with open_site(ScriptedModel(b"abc")) as site:
        assert (await site.post(CHAT, HELLO, Host="evil.example"))[0] == 403
        assert (await site.post(CHAT, HELLO, Host=f"localhost:{site.port}"))[0] == 200
        status, _, body = await site.ask("POST", CHAT, json.dumps(HELLO).encode(), Content_Type="text/plain")
        assert status == 415 and b"application/json" in body


async def test_unknown_paths_and_methods_are_errors_in_json() -> None:
    async with open_site(ScriptedModel()) as site:
        for method, path, status in [("GET", "/v1/embeddings", 404), ("GET", CHAT, 405), ("GET", "/v1/models/x", 404)]:
            found, headers, body = await site.ask(method, path)
            assert (found, headers["content-type"]) == (status, "application/json") and json.loads(body)["error"][
                "message"
            ]


async def test_the_page_asks_no_other_site() -> None:
    async with open_site(ScriptedModel()) as site:
        for path in ("/", "/chat.js", "/chat.css", "/icon.svg"):
            status, headers, body = await site.ask("GET", path)
            assert status == 200 and headers["content-security-policy"].startswith("default-src 'self'; ")
            assert b"://" not in body.replace(b"http://www.w3.org/2000/svg", b"")


# -- bounds ------------------------------------------------------------------------------------------------------------


async def test_a_body_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    async with open_site(ScriptedModel(b"abc")) as site:
        status, _, body = await site.ask("POST", CHAT, b"x" * (limits.BODY_BYTES_MAX + 1))
        assert status == 413 and json.loads(body)["error"]["code"] == "body_too_large"
        for bad in (b"", b"{", b"[]", b"\xff", b"[" * 100_000):
            assert (await site.ask("POST", CHAT, bad))[0] == 400
        monkeypatch.setattr(respond, "BODY_S", 0.1)
        async with await site.open() as slow:
            await slow.send_all(site.head("POST", CHAT, 100) + b"{")
            assert (await answer_of(slow))[0] == 408


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_goes_away_ends_its_sessions(stream: bool) -> None:
    model = ScriptedModel(b"abc", ...)
    async with open_site(model) as site:
        stream_to = await site.open()
        body = json.dumps({**HELLO, "n": 2, "stream": stream}).encode()
        await stream_to.send_all(site.head("POST", CHAT, len(body)) + body)
        if stream:
            assert await stream_to.receive_some()
        with trio.fail_after(300):
            while len(model.sessions) < 2:
                await trio.sleep(0.01)
            await stream_to.aclose()
            for session in model.sessions:
                await session.closed.wait()
        assert await site.ended() == "disconnected"


async def test_a_client_that_reads_nothing_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """hypercorn itself would wait for it for ever, in a shielded write."""
    monkeypatch.setattr(connection, "SEND_S", 0.3)
    model = ScriptedModel(b"word " * 200_000)
    model.manifest.model.max_seq_len = 1 << 24
    async with open_site(model) as site, await site.open() as lazy:
        body = json.dumps({**HELLO, "stream": True, "max_tokens": 1 << 20}).encode()
        await lazy.send_all(site.head("POST", CHAT, len(body)) + body)
        assert await site.ended() == "disconnected"
        assert model.sessions[0].closed.is_set()


async def test_the_server_ends_although_a_client_reads_nothing() -> None:
    model = ScriptedModel(b"word " * 200_000)
    model.manifest.model.max_seq_len = 1 << 24
    with trio.fail_after(300):
        async with open_site(model) as site:
            lazy = await site.open()
            body = json.dumps({**HELLO, "stream": True, "max_tokens": 1 << 20}).encode()
            await lazy.send_all(site.head("POST", CHAT, len(body)) + body)
            while not model.sessions:
                await trio.sleep(0.01)
            said = -1
            while said != len(model.sessions[0].tokens):  # until the connection is full
                said = len(model.sessions[0].tokens)
                await trio.sleep(0.2)
    await lazy.aclose()


@pytest.mark.parametrize("stream", [False, True])
async def test_a_server_that_stops_reports_an_error_to_clients_that_wait(stream: bool) -> None:
    model, told = ScriptedModel(b"abc", ...), list[Event]()
    model.events.subscribe(told.append)
    async with open_site(model) as site:
        client = await site.open()
        body = json.dumps({**HELLO, "n": 2, "stream": stream}).encode()
        await client.send_all(site.head("POST", CHAT, len(body)) + body)
        with trio.fail_after(300):
            while sum(len(session.tokens) for session in model.sessions) < 2 * len(b"user: Hello\nassistant:abc"):
                await trio.sleep(0.01)
    async with client:
        status, _, answer = await answer_of(client)
    assert (status, told[0].fields["ended"]) == (200 if stream else 503, "server_stopping")
    error = events_of(answer)[-1] if stream else json.loads(answer)
    assert error["error"]["code"] == "server_stopping" and "again" in error["error"]["message"]
    assert all(session.closed.is_set() for session in model.sessions)


async def test_a_server_that_stops_sends_nothing_behind_half_a_head() -> None:
    model, sent, asked = ScriptedModel(b"abc", ...), list[str](), trio.Event()

    async def send(message: Any) -> None:
        sent.append(message["type"])
        asked.set()
        await trio.sleep_forever()

    async def receive() -> Any:
        await trio.sleep_forever()

    used: Any = model
    answers = await prepare(used, ChatTemplate(), read_chat(json.dumps(HELLO).encode()))
    connection = respond.Connection(receive, send)
    responder = respond.Responder(answers, AnswerFormat("chat", "m", None), connection, model.events)
    with trio.fail_after(300):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(partial(responder.run, trio.CapacityLimiter(1), stream=True))
            await asked.wait()
            nursery.cancel_scope.cancel()
    assert sent == ["http.response.start"] and model.sessions[0].closed.is_set()


_UPGRADE = b"GET / HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: "


@pytest.mark.parametrize(
    "nonsense",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(range(256)),
        _UPGRADE + b"h2c\r\nHTTP2-Settings: !\r\n\r\n",
        _UPGRADE + b"websocket\r\nSec-WebSocket-Key: x\r\nSec-WebSocket-Version: 13\r\n\r\n" + bytes(range(256)),
        b"GET /" + b"a" * 100_000,
        b"GET /v1/models/%ff%0d%0a%00 HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer \xff\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: \xff\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    ],
    ids=["tls", "http2", "h2c", "websocket", "long", "letters", "chunks"],
)
async def test_nonsense_ends_only_its_connection(nonsense: bytes) -> None:
    async with open_site(ScriptedModel(b"abc")) as site:
        for _ in range(2):
            async with await site.open() as stream:
                with suppress(trio.BrokenResourceError), trio.move_on_after(0.2):
                    await stream.send_all(nonsense)
                    while await stream.receive_some():
                        pass
        assert (await site.post(CHAT, HELLO))[0] == 200


async def test_a_bug_of_ours_ends_the_server() -> None:
    async def fail(request: object) -> None:
        raise KeyError("a bug")

    with pytest.RaisesGroup(KeyError, flatten_subgroups=True):
        async with open_site(ScriptedModel(), app=lambda gateway: Starlette(routes=[Route("/", fail)])) as site:
            await site.ask("GET", "/")
            await trio.sleep_forever()


async def test_adapters_are_models_of_their_own() -> None:
    model = ScriptedModel(b"abc")
    model.adapters = ("poems",)
    async with open_site(model) as site:
        listed = json.loads((await site.ask("GET", "/v1/models"))[2])
        assert [(one["id"], one.get("parent")) for one in listed["data"]] == [("scripted", None), ("poems", "scripted")]
        assert json.loads((await site.ask("GET", "/v1/models/poems"))[2])["parent"] == "scripted"
        _, _, said = await site.post(TEXT, {**ONCE, "model": "poems"})
        assert said["model"] == "poems"
        status, _, refused = await site.post(TEXT, {**ONCE, "model": "prose"})
        assert (status, refused["error"]["code"]) == (404, "model_not_found")
