"""A model whose answers are written down, behind a real web server on 127.0.0.1, and what a client sees of it."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from copy import copy
from types import SimpleNamespace
from typing import Any

import trio

from peer.errors import ConfigError
from peer.events import Event, EventLog
from peer.ipc.sampling_options import Sampling
from peer.model.text.rules import TextRules
from peer.worker.text_client import ModelText
from swarm.gateway.app import Gateway, gateway_app
from swarm.gateway.limits import ApiKeys, Quotas
from swarm.gateway.template import open_template
from swarm.inference.drawing import Drawing
from swarm.inference.messages import PromptLogprobs, TokenDrawn
from swarm.inference.route import Hop, RouteView
from swarm.web.listening import ListenAddress, serve_http

CONTEXT = 200


class ScriptedSession:
    """Says bytes, then an error or nothing; behind `...` it waits until it is closed, at an event until it is set."""

    def __init__(self, script: Sequence[Any], sampling: Sampling) -> None:
        self.tokens: list[int] = []
        self.route = (Hop("peer-a", 0, 3), Hop("peer-b", 3, 6))
        self.failovers = 0
        self.sampling = sampling
        self.closed = trio.Event()
        self._script = script
        self.drawing = Drawing(sampling, (), 256)

    async def generate(self, prompt: Sequence[int], count: int) -> AsyncGenerator[TokenDrawn, None]:
        self.tokens += prompt
        if (scores := self.drawing.scores).is_asked:
            scores.begin(len(prompt))
            best = tuple((token, -1.0 - token) for token in range(self.sampling.logprobs))
            scored = tuple((-100.0 - token, best) for token in prompt[1:])
            assert len(prompt) == 1 or scores.take(PromptLogprobs(bytes(16), 0, 1, scored))
        said = [one for part in self._script for one in (part if isinstance(part, bytes) else [part])]
        for one in said[: max(1, count)]:
            await trio.lowlevel.checkpoint()
            if isinstance(one, Exception):
                raise one
            if one is ...:
                await trio.sleep_forever()
            if isinstance(one, trio.Event):
                await one.wait()
                continue
            yield TokenDrawn(bytes(16), 0, len(self.tokens), one, -0.5, ((one, -0.5), (0, -1.5), (1, -2.5)))
            self.tokens.append(one)

    def close(self) -> None:
        self.closed.set()


class ScriptedModel:
    """What the gateway uses of `swarm.inference.client.ModelClient`."""

    def __init__(self, *script: Any, text: TextRules | None = None, blocks: int = 0, special: bytes = b"") -> None:
        sizes = SimpleNamespace(vocab_size=256, max_seq_len=CONTEXT, layers=blocks)
        self.manifest = SimpleNamespace(
            name="scripted", run_id="r" * 32, created_at=1, authority="founder", model=sizes, text=text or TextRules()
        )
        self.text = ModelText()
        self.special = frozenset(special)
        self.events = EventLog()
        self.client = SimpleNamespace(host=SimpleNamespace(events=self.events))
        self.server_flows = SimpleNamespace(remove=lambda session: None)
        self.servers = self
        self.sessions: list[ScriptedSession] = []
        self.script = script
        self.adapters: tuple[str, ...] = ()
        self.adapter: str | None = None

    @property
    def name(self) -> str:
        return self.adapter or self.manifest.name

    @property
    def names(self) -> tuple[str, ...]:
        return (self.manifest.name, *self.adapters)

    def named(self, name: str) -> ScriptedModel:
        if name not in (*self.names, self.manifest.run_id):
            raise ConfigError(f"the model {name!r} is not served here: ask for {self.manifest.name!r}")
        found = copy(self)
        found.adapter = name if name in self.adapters else None
        return found

    def session(self, sampling: Sampling, grammar: Any = None) -> ScriptedSession:
        self.sessions.append(ScriptedSession(self.script, sampling))
        return self.sessions[-1]

    async def refresh(self) -> None:
        await trio.lowlevel.checkpoint()

    def view(self) -> RouteView:
        return RouteView(self.manifest.model.layers, {}, 0.0, lambda peer: None)


class Site:
    """The server under test."""

    def __init__(self, url: str) -> None:
        self.host, port = url.removeprefix("http://").split(":")
        self.port = int(port)
        self.events: list[Event] = []

    async def ended(self) -> object:
        """Wait for the first request to end; return how."""
        with trio.fail_after(300):
            while not self.events:
                await trio.sleep(0.01)
        return self.events[0].fields["ended"]

    async def open(self) -> trio.SocketStream:
        return await trio.open_tcp_stream(self.host, self.port)

    async def ask(self, method: str, path: str, body: bytes = b"", **headers: str) -> tuple[int, dict[str, str], bytes]:
        """Send a request on a connection of its own; return status, headers and body."""
        async with await self.open() as stream:
            await stream.send_all(self.head(method, path, len(body), **headers) + body)
            return await answer_of(stream)

    async def post(self, path: str, value: Any, **headers: str) -> tuple[int, dict[str, str], Any]:
        status, found, body = await self.ask("POST", path, json.dumps(value).encode(), **headers)
        return status, found, json.loads(body) if found["content-type"] == "application/json" else body

    def head(self, method: str, path: str, length: int, **headers: str) -> bytes:
        named = {
            "Host": f"127.0.0.1:{self.port}",
            "Content-Type": "application/json",
            "Content-Length": str(length),
            "Connection": "close",
        } | {name.replace("_", "-"): value for name, value in headers.items()}
        lines = [f"{method} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in named.items())]
        return "\r\n".join([*lines, "", ""]).encode()


async def answer_of(stream: trio.SocketStream, begin: bytes = b"") -> tuple[int, dict[str, str], bytes]:
    """Read a whole response, whose end is that of the connection. `begin`: what was read of it before."""
    data = bytearray(begin)
    with trio.fail_after(300):
        while more := await stream.receive_some():
            data += more
    head, _, body = bytes(data).partition(b"\r\n\r\n")
    first, *lines = head.decode().split("\r\n")
    headers = dict(line.lower().split(": ", 1) for line in lines)
    if headers.get("transfer-encoding") == "chunked":
        body = _joined(body)
    return int(first.split()[1]), headers, body


def _joined(chunked: bytes) -> bytes:
    whole = b""
    while chunked:
        size, _, rest = chunked.partition(b"\r\n")
        whole, chunked = whole + rest[: int(size, 16)], rest[int(size, 16) + 2 :]
    return whole


def events_of(body: bytes) -> list[Any]:
    """Return the events of a stream; the last is "[DONE]" if it is whole."""
    told = [line.removeprefix("data: ") for line in body.decode().split("\n\n") if line]
    return [line if line == "[DONE]" else json.loads(line) for line in told]


@asynccontextmanager
async def open_site(
    model: ScriptedModel,
    keys: ApiKeys | None = None,
    quotas: Quotas | None = None,
    app: Callable[[Gateway], Any] = gateway_app,
    origins: tuple[str, ...] = (),
    parser: str = "auto",
) -> AsyncIterator[Site]:
    """Serve a scripted model inside the block."""
    urls = list[str]()
    async with open_template(model.manifest.text, parser=parser) as template, trio.open_nursery() as nursery:
        used: Any = model
        gateway = Gateway(used, template, keys or ApiKeys(), quotas or Quotas(None, 16), origins=origins)
        listening = trio.Event()

        def tell(url: str) -> None:
            urls.append(url)
            listening.set()

        nursery.start_soon(serve_http, app(gateway), ListenAddress("127.0.0.1", 0), tell)
        await listening.wait()
        site = Site(urls[0])
        with model.events.subscribed(site.events.append):
            yield site
        nursery.cancel_scope.cancel()
