"""One request and its response over ASGI: the body within bounds, the answer whole or as a stream of events.

A client that goes away ends its sessions at once. A server that stops tells its clients.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import msgspec
import trio
from starlette.types import Message, Receive, Send

from peer.events import EventLog
from swarm.gateway.answer import AnswerPart, route_text
from swarm.gateway.choices import Answers, Told, Usage
from swarm.gateway.errors import ApiError
from swarm.gateway.ignored import ignored_header, ignored_text
from swarm.gateway.limits import BODY_BYTES_MAX
from swarm.web.listening import ENDING_S

BODY_S: Final = 10.0
_DISCARDED_BYTES_MAX: Final = 16 << 20
SEND_S: Final = 40.0
"""A client that takes nothing for this long is gone. The stream below gives up sooner, if it is TCP's own buffer."""
DISCONNECTED: Final = "disconnected"
STOPPING: Final = "server_stopping"
_RETRY_S: Final = 5.0
ROUTE_HEADER: Final = "X-Barnraise-Route"


class ClientGone(Exception):
    """The client has closed the connection."""


async def read_body(receive: Receive, take: Callable[[int], None]) -> bytes:
    """Return the body of a request; `take` receives each part's size in bytes, and may raise. Raises ApiError for one
    that is too large or slow, ClientGone."""
    too_large = ApiError(413, f"the body has more than {BODY_BYTES_MAX} bytes: send less", code="body_too_large")
    body, size = bytearray(), 0
    with trio.move_on_after(BODY_S):
        while True:
            message = await receive()
            if message["type"] != "http.request":
                raise ClientGone
            part = message.get("body", b"")
            size += len(part)
            if size <= BODY_BYTES_MAX:
                take(len(part))
                body += part
            if size > _DISCARDED_BYTES_MAX:
                raise too_large
            if not message.get("more_body", False):
                if size > BODY_BYTES_MAX:
                    raise too_large  # not sooner: most clients read no response while they send
                return bytes(body)
    raise ApiError(408, f"the body did not come within {BODY_S:.0f} s: send it at once", code="body_too_slow")


@dataclass(frozen=True)
class Connection:
    """The ASGI channel of one request, behind its body."""

    receive: Receive
    send: Send

    async def start(self, status: int, kind: str, headers: dict[str, str]) -> None:
        """Send the head of the response."""
        named = {"Content-Type": kind, "Cache-Control": "no-store", "X-Content-Type-Options": "nosniff", **headers}
        pairs = [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in named.items()]
        await self.send({"type": "http.response.start", "status": status, "headers": pairs})

    async def body(self, data: bytes, more: bool = False) -> bool:
        """Send a part of the body. Return False if the client takes nothing."""
        message: Message = {"type": "http.response.body", "body": data, "more_body": more}
        with trio.move_on_after(SEND_S) as limit:
            await self.send(message)
        return not limit.cancelled_caught

    async def json(self, status: int, value: Any, headers: dict[str, str] | None = None) -> None:
        """Send a whole response."""
        data = msgspec.json.encode(value)
        await self.start(status, "application/json", {"Content-Length": str(len(data)), **(headers or {})})
        await self.body(data)

    async def gone(self) -> None:
        """Wait until the client has closed the connection."""
        while (await self.receive())["type"] != "http.disconnect":
            pass


class ResponseWriter(Protocol):
    """The JSON of one response: whole, or as the events of a stream. `extras` are fields of Barnraise's own."""

    def whole(self, answers: Sequence[Sequence[AnswerPart]], usage: Usage, extras: dict[str, Any]) -> dict[str, Any]:
        """Return the response, of the parts of each answer."""

    def begin(self, index: int) -> list[dict[str, Any]]:
        """Return the events before the first part of an answer."""

    def chunks(self, index: int, part: AnswerPart) -> list[dict[str, Any]]:
        """Return the events of a part."""

    def end(self, usage: Usage, extras: dict[str, Any]) -> list[dict[str, Any]]:
        """Return the events behind all answers."""

    def error(self, error: ApiError) -> list[dict[str, Any]]:
        """Return the events that end a stream early."""

    def encode(self, event: dict[str, Any]) -> bytes:
        """Return an event as a stream has it."""

    @property
    def last(self) -> bytes:
        """What ends a stream that is whole."""


class Responder:
    """Answers one request."""

    def __init__(self, answers: Answers, form: ResponseWriter, connection: Connection, events: EventLog) -> None:
        self._answers, self._format, self._connection, self._events = answers, form, connection, events
        self._ended = DISCONNECTED
        self._begun = set[int]()
        """The answers that a stream has sent a part of."""
        self._is_gone = self._is_starting = False
        """Whether the client is gone; whether the head of a stream is being sent."""

    async def run(self, slots: trio.CapacityLimiter, *, stream: bool) -> None:
        """Generate and send. Returns early if the client goes away."""
        began = time.monotonic()
        outgoing, incoming = trio.open_memory_channel[Told](0)
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._watch, nursery.cancel_scope)
                nursery.start_soon(self._answers.run, slots, outgoing)
                if stream:
                    await self._stream(incoming)
                else:
                    await self._whole(incoming)
                nursery.cancel_scope.cancel()
        finally:
            is_open = self._ended == DISCONNECTED and not self._is_gone and not self._is_starting
            if is_open and trio.current_effective_deadline() == -math.inf:
                await self._stop()
            self._events.emit(
                "request_answered",
                ended=self._ended,
                seconds=round(time.monotonic() - began, 4),
                answers=self._answers.count,
                prompt_tokens=self._answers.usage.prompt,
                tokens=self._answers.usage.drawn,
                failovers=self._answers.failovers,
                ignored=ignored_text(self._answers.ignored),
            )

    async def _watch(self, scope: trio.CancelScope) -> None:
        await self._connection.gone()
        self._is_gone = True
        if self._ended == DISCONNECTED:  # else the response is out but for its end, which must not be cut
            scope.cancel()

    async def _whole(self, incoming: trio.MemoryReceiveChannel[Told]) -> None:
        parts: list[list[AnswerPart]] = [[] for _ in range(self._answers.count)]
        async for told in incoming:
            if isinstance(told, ApiError):
                self._ended = told.code or "error"
                await self._connection.json(told.status, told.body, told.headers)
                return
            parts[told[0]].append(told[1])
        self._ended = "done"
        body = self._format.whole(parts, self._answers.usage, self._extras())
        await self._connection.json(200, body, self._headers())

    async def _stream(self, incoming: trio.MemoryReceiveChannel[Told]) -> None:
        """Send parts as they come. The head waits for the first one: until then an error has a status of its own."""
        begun = self._begun
        async for told in incoming:
            if isinstance(told, ApiError):
                await self._fail(told)
                return
            if not begun:
                self._is_starting = True  # a cancelled head may be sent in part: nothing can follow it
                await self._connection.start(200, "text/event-stream", self._headers())
                self._is_starting = False
            index, part = told
            first = [] if index in begun else self._format.begin(index)  # before the chunks, as events are numbered
            begun.add(index)
            if not await self._connection.body(self._encoded([*first, *self._format.chunks(index, part)]), more=True):
                return
        self._ended = "done"
        last = self._format.end(self._answers.usage, self._extras())
        await self._connection.body(self._encoded(last) + self._format.last)

    def _encoded(self, events: Sequence[dict[str, Any]]) -> bytes:
        return b"".join(map(self._format.encode, events))

    async def _stop(self) -> None:
        """Send an error, as this process is about to end: the answer stays without its end."""
        message = "this gateway stops before the answer is complete: send the request again"
        with trio.CancelScope(deadline=trio.current_time() + ENDING_S, shield=True):
            await self._fail(ApiError(503, message, code=STOPPING, retry_s=_RETRY_S))

    async def _fail(self, error: ApiError) -> None:
        self._ended = error.code or "error"
        if self._begun:
            await self._connection.body(self._encoded(self._format.error(error)))
        else:
            await self._connection.json(error.status, error.body, error.headers)

    def _headers(self) -> dict[str, str]:
        return {ROUTE_HEADER: route_text(self._answers.route), **ignored_header(self._answers.ignored)}

    def _extras(self) -> dict[str, Any]:
        return {"barnraise": {"route": route_text(self._answers.route), "failovers": self._answers.failovers}}
