"""Pages of other sites in a browser (CORS), and the methods that each path has."""

from __future__ import annotations

import json

import pytest

from peer.errors import ConfigError
from swarm.gateway.limits import ApiKeys, key_hash
from swarm.web.origins import read_origin
from tests.swarm.gateway.scripted import ScriptedModel, Site, open_site

CHAT = "/v1/chat/completions"
HELLO = {"model": "scripted", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 2, "vendor": 1}
KEYS = ApiKeys({key_hash("sk-a"): "a"})
KEY = {"Authorization": "Bearer sk-a"}
PAGE = "https://app.example"
ALLOWED = "access-control-allow-origin"


async def preflight(site: Site, origin: str) -> tuple[int, dict[str, str], bytes]:
    """Ask for leave as a browser does, without the key."""
    asked = {"Access_Control_Request_Method": "POST", "Access_Control_Request_Headers": "authorization,x-stainless-os"}
    return await site.ask("OPTIONS", CHAT, b"", Origin=origin, **asked)


async def test_a_page_of_a_named_origin_may_ask_and_read_the_headers() -> None:
    async with open_site(ScriptedModel(b"abc"), KEYS, origins=(PAGE, "http://localhost:3000")) as site:
        for origin in (PAGE, "http://localhost:3000"):
            status, headers, _ = await preflight(site, origin)
            assert (status, headers[ALLOWED]) == (200, origin) and "POST" in headers[
                "access-control-allow-methods"
            ].upper()
            assert headers["access-control-allow-headers"] == "authorization,x-stainless-os"
            assert headers["vary"].startswith("origin")
            for stream in (False, True):
                status, headers, _ = await site.post(CHAT, {**HELLO, "stream": stream}, Origin=origin, **KEY)
                assert (status, headers[ALLOWED], headers["vary"]) == (200, origin, "origin")
                assert "x-barnraise-ignored, x-barnraise-route" in headers["access-control-expose-headers"]
                assert headers["x-barnraise-ignored"] == "vendor"
        status, headers, _ = await site.post(CHAT, HELLO, Origin=PAGE)
        assert (status, headers[ALLOWED]) == (401, PAGE), "the page can read why"


async def test_a_page_of_another_origin_may_not() -> None:
    async with open_site(ScriptedModel(b"abc"), KEYS, origins=(PAGE,)) as site:
        for origin in ("https://evil.example", f"{PAGE}.evil.example", "http://app.example", f"{PAGE}:8443", "null"):
            status, headers, _ = await preflight(site, origin)
            assert status == 400 and ALLOWED not in headers
            _, headers, _ = await site.post(CHAT, HELLO, Origin=origin, **KEY)
            assert ALLOWED not in headers and headers["vary"] == "origin"
        _, headers, _ = await site.post(CHAT, HELLO, **KEY)
        assert ALLOWED not in headers and headers["vary"] == "origin"


async def test_all_origins_may_if_the_operator_says_so_and_none_if_no_origin_is_named() -> None:
    for origins, allowed in ((("*",), "*"), ((), None)):
        async with open_site(ScriptedModel(b"abc"), KEYS, origins=origins) as site:
            status, headers, _ = await preflight(site, PAGE)
            assert (status, headers.get(ALLOWED)) == (200 if origins else 204, allowed)
            _, headers, _ = await site.post(CHAT, HELLO, Origin=PAGE, **KEY)
            assert headers.get(ALLOWED) == allowed and ("vary" in headers) == bool(origins)
            assert any(name.startswith("access-control") for name in headers) == bool(origins)


async def test_without_keys_a_preflight_does_not_get_around_the_name_of_the_host() -> None:
    async with open_site(ScriptedModel(b"abc"), origins=(PAGE,)) as site:
        status, headers, _ = await site.post(CHAT, HELLO, Host="evil.example", Origin="http://evil.example")
        assert status == 403 and ALLOWED not in headers


@pytest.mark.parametrize(
    ("text", "origin"),
    [
        ("*", "*"),
        ("https://App.Example", "https://app.example"),
        ("https://app.example:443", "https://app.example"),
        ("http://[::1]:3000", "http://[::1]:3000"),
        ("http://localhost:80", "http://localhost"),
        ("vscode-webview://1a2b", "vscode-webview://1a2b"),
    ],
)
def test_origins_are_written_as_browsers_write_them(text: str, origin: str) -> None:
    assert read_origin(text) == origin


@pytest.mark.parametrize(
    "text",
    ["", "app.example", "https://", "https://a/", "https://a/b", "https://*.a", "**", "https://a b", "null", "é"],
)
def test_what_is_no_origin_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--allow-origin"):
        read_origin(text)


# -- methods -----------------------------------------------------------------------------------------------------------


async def test_every_path_says_its_methods_without_a_key_and_a_head_has_no_body() -> None:
    async with open_site(ScriptedModel(b"abc"), KEYS) as site:
        for path in ("/", "/healthz", "/v1/models", "/v1/models/scripted", "/chat.js"):
            status, headers, body = await site.ask("OPTIONS", path)
            assert (status, headers["allow"], body) == (204, "get, head, options", b"")
            whole = await site.ask("GET", path, b"", **KEY)
            status, headers, body = await site.ask("HEAD", path, b"", **KEY)
            assert (status, headers["content-length"], body) == (200, whole[1]["content-length"], b"")
        for path in (CHAT, "/v1/completions"):
            status, headers, body = await site.ask("OPTIONS", path)
            assert (status, headers["allow"], body) == (204, "options, post", b"")
            status, headers, body = await site.ask("HEAD", path, b"", **KEY)
            assert (status, headers["allow"], body) == (405, "options, post", b"")
        assert (await site.ask("HEAD", "/v1/models"))[0] == 401
        status, _, body = await site.ask("OPTIONS", "/v1/embeddings")
        assert status == 404 and json.loads(body)["error"]["message"]
