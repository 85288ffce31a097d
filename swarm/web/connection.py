"""One connection: hypercorn's HTTP/1.1 and nothing else, with bounds on what a client can hold.

hypercorn also speaks HTTP/2 and websockets, which no setting turns off, and on which a client that is silent, or takes
nothing, is never given up. It waits for one that reads nothing until it reads. So it gets no such protocol, and streams
that give up.
"""

from __future__ import annotations

from typing import Any, Final

import h11
import trio
from hypercorn.config import Config
from hypercorn.events import Closed, Event, Updated
from hypercorn.protocol.h11 import H11Protocol
from hypercorn.trio.task_group import TaskGroup
from hypercorn.trio.tcp_server import TCPServer
from hypercorn.trio.worker_context import WorkerContext
from hypercorn.typing import AppWrapper, ConnectionState
from hypercorn.utils import parse_socket_addr
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from swarm.web.own_host import is_host
from swarm.web.places import ClientPlace, ClientPlaces

SEND_S: Final = 30.0
_VERSIONS: Final = (b"1.0", b"1.1")
_CLOSE: Final = {"Connection": "close"}


class BoundedStream:
    """A TCP stream whose writes end after a while, taken or not."""

    def __init__(self, stream: trio.SocketStream) -> None:
        self._stream = stream

    @property
    def socket(self) -> Any:
        return self._stream.socket

    async def send_all(self, data: bytes) -> None:
        with trio.move_on_after(SEND_S) as limit:
            try:
                await self._stream.send_all(data)
            except trio.BusyResourceError:  # hypercorn sends one thing at a time: it is closing, which no app foresees
                raise trio.BrokenResourceError from None
        if limit.cancelled_caught:
            self.socket.close()
            raise trio.BrokenResourceError

    async def receive_some(self, most: int) -> bytes | bytearray:
        return await self._stream.receive_some(most)

    async def send_eof(self) -> None:
        await self._stream.send_eof()

    async def aclose(self) -> None:
        await self._stream.aclose()


class HttpConnection(TCPServer):
    """Reading and sending on one connection, and the times when it rests."""

    def __init__(
        self,
        app: AppWrapper,
        config: Config,
        context: WorkerContext,
        stream: BoundedStream,
        places: ClientPlaces,
        place: ClientPlace,
    ) -> None:
        super().__init__(app, config, context, {}, stream)  # type: ignore[arg-type]
        self._places, self._place = places, place

    async def run(self) -> None:
        """Serve until the client or a deadline ends it."""
        try:
            socket = self.stream.socket  # type: ignore[attr-defined]
            client = parse_socket_addr(socket.family, socket.getpeername())
            server = parse_socket_addr(socket.family, socket.getsockname())
            state = ConnectionState(self._place.state)
            async with TaskGroup() as tasks:
                self._task_group = tasks
                self.protocol = _Http1(  # type: ignore[assignment]
                    self.app, self.config, self.context, tasks, state, False, client, server, self.protocol_send
                )
                await self.idle_task.restart(tasks, self._idle_timeout)
                await self._read_data()
        except OSError:
            pass
        finally:
            await self._close()

    async def protocol_send(self, event: Event) -> None:
        """Take what the protocol has to send or to say."""
        if isinstance(event, Updated) and event.idle:
            self._places.rest(self._place)
        await super().protocol_send(event)


class _Http1(H11Protocol):
    """HTTP/1.1 that stays HTTP/1.1: a request to switch to another protocol is answered as if it did not ask."""

    async def _check_protocol(self, event: h11.Request) -> None:
        pass  # hypercorn leaves for HTTP/2 here

    async def _create_stream(self, request: h11.Request) -> None:
        if request.http_version not in _VERSIONS:
            await self._send_error_response(505)
            await self.send(Closed())
            return
        headers = [(name, value) for name, value in request.headers if name != b"upgrade"]
        await super()._create_stream(
            h11.Request(
                method=request.method, target=request.target, headers=headers, http_version=request.http_version
            )
        )


class Door:
    """The application, for requests that are well formed. Data that it sends on a connection that its client has spoilt
    is lost."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        lost = False

        async def send_if_possible(message: Message) -> None:
            nonlocal lost
            if not lost:  # hypercorn takes no body of a response whose head it has not taken
                try:
                    await send(message)
                except h11.ProtocolError:
                    lost = True

        await (_refusal(scope) or self._app)(scope, receive, send_if_possible)


def _refusal(scope: Scope) -> PlainTextResponse | None:
    """Return the answer to a request that no application is to see; a malformed Host ends some of their libraries."""
    hosts = [value.decode("latin-1") for name, value in scope["headers"] if name == b"host"]
    if not all(map(is_host, hosts)):
        return PlainTextResponse("the header Host names no host: send a name or an IP address", 400, _CLOSE)
    if not scope["path"].startswith("/"):
        return PlainTextResponse("the path begins with no slash: send one like /healthz", 400, _CLOSE)
    return None
