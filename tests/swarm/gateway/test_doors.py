"""What clients send that want a place, a slot or the end of the server: raw bytes on real sockets."""

from __future__ import annotations

import json
from contextlib import AsyncExitStack, suppress

import pytest
import trio

from swarm.gateway import respond
from swarm.gateway.limits import BODY_BYTES_MAX, ApiKeys, Quotas, key_hash
from swarm.web import places
from tests.swarm.gateway.scripted import ScriptedModel, Site, answer_of, open_site

CHAT = "/v1/chat/completions"
HELLO = {"model": "scripted", "messages": [{"role": "user", "content": "Hello"}]}
KEYS = ApiKeys({key_hash("sk-a"): "a"})
KEY = {"Authorization": "Bearer sk-a"}
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
NO_WINDOW = b"\0\0\x06\x04\0\0\0\0\0\0\x04\0\0\0\0"


async def sent(site: Site, data: bytes) -> bytes:
    """Send that on a connection of its own; return all that comes back."""
    back = bytearray()
    async with await site.open() as stream:
        await stream.send_all(data)
        with trio.fail_after(300), suppress(trio.BrokenResourceError):  # where not all was read
            while more := await stream.receive_some():
                back += more
    return bytes(back)


async def test_http2_is_not_spoken() -> None:
    async with open_site(ScriptedModel(b"abc"), KEYS) as site:
        assert (await sent(site, PREFACE + NO_WINDOW)).startswith(b"HTTP/1.1 505 ")
        for upgrade in ("h2c", "websocket"):
            asked = f"Connection: Upgrade, close\r\nUpgrade: {upgrade}\r\nHTTP2-Settings: AAMAAABk\r\n"
            answer = await sent(site, f"GET /healthz HTTP/1.1\r\nHost: a\r\n{asked}\r\n".encode())
            assert answer.startswith(b"HTTP/1.1 200 ") and b"upgrade" not in answer.lower()


@pytest.mark.parametrize("host", ["[", "]", "[::1", "[1.2.3.4]", "[::::]:80", "a/b", "a b", "a:b", "a@b?c#d", "é"])
async def test_a_malformed_host_is_refused(host: str) -> None:
    async with open_site(ScriptedModel(b"abc"), KEYS) as site:
        for path in ("/nowhere", "/healthz/", "/v1/models", "/"):
            head = f"GET {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n"
            assert (await sent(site, head.encode())).startswith(b"HTTP/1.1 400 ")
        assert (await site.post(CHAT, HELLO, **KEY))[0] == 200


@pytest.mark.parametrize(
    ("target", "status"),
    [("http://[/", 400), ("*", 400), ("[", 400), ("?a", 400), ("//[", 404), ("/%5b%00%ff", 404), ("/[?[", 404)],
)
async def test_an_odd_path_ends_no_server(target: str, status: int) -> None:
    async with open_site(ScriptedModel(b"abc"), KEYS) as site:
        back = await sent(site, f"GET {target} HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n".encode())
        assert back.startswith(f"HTTP/1.1 {status} ".encode())
        assert (await site.ask("GET", "/healthz"))[0] == 200


async def test_no_redirect_leads_to_the_host_of_a_request() -> None:
    async with open_site(ScriptedModel(b"abc")) as site:
        for path in ("/healthz/", "/v1/models/", "/chat.js/"):
            status, headers, _ = await site.ask("GET", path, Host="elsewhere.example")
            assert status in (403, 404) and "location" not in headers


async def test_silent_connections_give_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(places, "CONNECTIONS_MAX", 8)
    model = ScriptedModel(b"abc", ...)
    async with open_site(model, KEYS, Quotas(None, 64)) as site, AsyncExitStack() as stack:
        stream = await stack.enter_async_context(await site.open())
        body = json.dumps({**HELLO, "stream": True}).encode()
        await stream.send_all(site.head("POST", CHAT, len(body), **KEY) + body)
        assert (await stream.receive_some()).startswith(b"HTTP/1.1 200 ")
        opened = [await stack.enter_async_context(await site.open()) for _ in range(20)]
        for one in opened[10:]:
            await one.send_all(b"GET /healthz HTTP/1.1\r\nHost:")
        assert (await site.ask("GET", "/v1/models", Authorization="Bearer sk-a"))[0] == 200
        with trio.fail_after(300):
            assert await opened[0].receive_some() == b"", "the oldest was closed"
        assert not model.sessions[0].closed.is_set(), "what is being answered keeps its place"


async def test_bodies_that_never_come_hold_no_slot() -> None:
    async with open_site(ScriptedModel(b"abc"), KEYS, Quotas(None, 2)) as site, AsyncExitStack() as stack:
        for key in [KEY, KEY, KEY, {}]:
            stream = await stack.enter_async_context(await site.open())
            await stream.send_all(site.head("POST", CHAT, 100, **key) + b"{")
        status, _, _ = await answer_of(stream)
        assert status == 401, "told before its body has come"
        assert (await site.post(CHAT, HELLO, **KEY))[0] == 200


async def test_bodies_of_a_key_hold_so_many_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(respond, "BODY_S", 3000.0)  # on a busy machine half a body may take its whole time
    async with open_site(ScriptedModel(b"abc"), KEYS, Quotas(None, 1)) as site, await site.open() as first:
        half = b" " * (BODY_BYTES_MAX - 10)
        await first.send_all(site.head("POST", CHAT, BODY_BYTES_MAX, **KEY) + half)
        with trio.fail_after(300):
            while (await site.post(CHAT, HELLO, **KEY))[0] == 200:  # until the other body has come
                pass
        await first.aclose()
        with trio.fail_after(300):
            while (await site.post(CHAT, HELLO, **KEY))[0] == 429:  # until that is known there
                pass
