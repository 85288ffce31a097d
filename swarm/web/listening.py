"""The web server: where it listens, and its connections. An error of ours ends it, where hypercorn's own continues."""

from __future__ import annotations

import errno
import ipaddress
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import trio
from hypercorn.config import Config
from hypercorn.logging import Logger
from hypercorn.trio.worker_context import WorkerContext
from hypercorn.utils import wrap_app
from starlette.applications import Starlette

from peer.errors import ConfigError, ResourceError
from swarm.web.connection import BoundedStream, Door, HttpConnection
from swarm.web.places import ClientPlaces

IDLE_S: Final = 15.0
"""How long a connection may stay without a request, or with half of its head."""
ENDING_S: Final = 1.0
"""How long the connections may take to end by themselves once the server stops."""
_HEAD_BYTES_MAX: Final = 32 << 10
_BACKLOG: Final = 1024
_PORT_MAX: Final = 65535


@dataclass(frozen=True)
class ListenAddress:
    """Where to listen."""

    host: str
    """An IP address, or "localhost"."""
    port: int
    """0: any that is free."""

    @classmethod
    def parse(cls, text: str) -> ListenAddress:
        """Read HOST:PORT. Raises ConfigError."""
        host, colon, port = text.rpartition(":")
        bare = host.removeprefix("[").removesuffix("]") if host.startswith("[") else host
        if (
            not colon
            or not port.isascii()
            or not port.isdigit()
            or len(port) > 5
            or int(port) > _PORT_MAX
            or not _is_host(bare)
        ):
            raise ConfigError(f"--listen {text} is no IP address and port: write one like 127.0.0.1:8080 or [::1]:8080")
        return cls(bare, int(port))

    @property
    def is_loopback(self) -> bool:
        return self.host == "localhost" or ipaddress.ip_address(self.host).is_loopback

    @property
    def name(self) -> str:
        """The host as in a URL."""
        return f"[{self.host}]" if ":" in self.host else self.host


def _is_host(text: str) -> bool:
    if text == "localhost":
        return True
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


async def serve_http(app: Starlette, address: ListenAddress, listening: Callable[[str], None]) -> None:
    """Serve until cancelled; then end all connections, after `ENDING_S` at the latest. `listening` gets the URL. Raises
    ResourceError."""
    listener = trio.SocketListener(_listen(address))
    port = listener.socket.getsockname()[1]
    listening(f"http://{address.name}:{port}")
    server = _Server(app)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(server.close_when_cancelled)
        await trio.serve_listeners(server.handle, [listener])


def _listen(address: ListenAddress) -> Any:
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    opened = socket.socket(family, socket.SOCK_STREAM)
    try:
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        opened.bind(("127.0.0.1" if address.host == "localhost" else address.host, address.port))
        opened.listen(_BACKLOG)
    except OSError as error:
        opened.close()
        why = "another program listens there" if error.errno == errno.EADDRINUSE else error.strerror
        raise ResourceError(
            f"cannot listen at {address.name}:{address.port} ({why}): choose another address with --listen"
        ) from error
    return trio.socket.from_stdlib_socket(opened)


class _Server:
    """The connections of one application."""

    def __init__(self, app: Starlette) -> None:
        self._config = Config()
        self._config.logger_class = _BugLog
        self._config.errorlog = None
        self._config.include_server_header = False
        self._config.keep_alive_timeout = IDLE_S
        self._config.h11_max_incomplete_size = _HEAD_BYTES_MAX
        app.router.redirect_slashes = False  # a redirect would lead to the host that the request names
        self._app = wrap_app(Door(app), self._config.wsgi_max_body_size, "asgi")  # type: ignore[arg-type]
        self._log = self._config.log
        assert isinstance(self._log, _BugLog)
        self._context = WorkerContext(None)
        self._places = ClientPlaces()

    async def handle(self, stream: trio.SocketStream) -> None:
        """Serve one connection."""
        try:
            ip = stream.socket.getpeername()[0]
        except OSError:
            return  # it is gone
        place = self._places.take(ip, stream.socket.close)
        if place is None:
            return  # trio closes it
        try:
            await HttpConnection(self._app, self._config, self._context, BoundedStream(stream), self._places, place)
        except Exception:  # the edge to clients: what one sends may find a fault in the library
            if self._log.found_bug:
                raise
        finally:
            self._places.leave(place)

    async def close_when_cancelled(self) -> None:
        """End all connections in the end, those too whose clients read nothing: hypercorn shields its writes."""
        try:
            await trio.sleep_forever()
        finally:
            with trio.CancelScope(shield=True):
                await self._places.empty(ENDING_S)
            self._places.end_all()


class _BugLog(Logger):
    """A log that writes nothing, and re-raises a handler's exception: our own bug ends this process."""

    found_bug = False

    async def exception(self, message: str, *args: Any, **kwargs: Any) -> None:
        self.found_bug = True
        raise  # called while it is handled
