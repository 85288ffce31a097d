"""The application: the page, the state as JSON and as a stream of it, metrics, and whether this monitor itself is well.

    GET  /                  the page
    GET  /api/v1/state      the state
    GET  /api/v1/stream     each new state, as server-sent events
    GET  /api/v1/history    ?span=hour|day|all&stage=K: what is remembered of that time
    GET  /metrics           the state for Prometheus
    GET  /healthz           200 if the last reading was a success and is fresh, else 503

It changes nothing, so there are no other methods. Without a token requests must name this machine as their host. With
one they bring it as `Authorization: Bearer TOKEN`, or in the page's own cookie, which `/?token=TOKEN` sets.
"""

from __future__ import annotations

import hmac
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Final

import msgspec
import trio
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from peer.plain_text import plain
from swarm.monitor.collector import MonitorCollector
from swarm.monitor.history.memory import SPANS, History
from swarm.monitor.metrics import CONTENT_TYPE, metrics_text
from swarm.status.state import MonitorState
from swarm.web.own_host import names_this_machine
from swarm.web.page_files import page_routes
from swarm.web.places import keep_place

FRESH_S: Final = 60.0
STREAMS_MAX: Final = 64
BEAT_S: Final = 15.0
_PATH_CHARS_MAX: Final = 100
COOKIE: Final = "barnraise_monitor"
_PAGE: Final = Path(__file__).parent / "page"
_NO_STORE: Final = {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"}


class Access:
    """The middleware that answers those that may look, and all at `/healthz`, since it tells nothing of the run."""

    def __init__(self, app: ASGIApp, token: str = "", host: str = "127.0.0.1") -> None:
        """`token`: empty for this machine's programs alone; `host`: the address that is listened at."""
        self._app, self._token, self._host = app, token, host

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] != "/healthz":
            request = Request(scope)
            given = request.query_params.get("token")
            if given is not None and self._token and self._is_token(given):
                response: Response = RedirectResponse("/", 303)  # so that the token is in no address and no history
                response.set_cookie(COOKIE, given, httponly=True, samesite="strict")
                await response(scope, receive, send)
                return
            if not self._admits(request):
                await self._refusal()(scope, receive, send)
                return
            keep_place(scope)
        await self._app(scope, receive, send)

    def _admits(self, request: Request) -> bool:
        if not self._token:
            return names_this_machine(request.headers.get("host", ""), self._host)
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        return self._is_token(given.strip() if scheme.lower() == "bearer" else request.cookies.get(COOKIE, ""))

    def _is_token(self, given: str) -> bool:
        """Compare in a time that does not tell how much is right."""
        return hmac.compare_digest(given.encode("utf-8", "replace"), self._token.encode())

    def _refusal(self) -> Response:
        if self._token:
            why = (
                "this monitor needs its token: open the address that it has printed, or send Authorization: Bearer"
                " TOKEN"
            )
            return JSONResponse({"error": why}, 401, _NO_STORE | {"WWW-Authenticate": "Bearer"})
        return JSONResponse(
            {"error": "the host of this request is not this machine's own name: ask for 127.0.0.1"}, 403
        )


def monitor_app(collector: MonitorCollector, history: History, token: str, host: str) -> Starlette:
    """Return the application for those that `Access` lets in."""
    streams = trio.CapacityLimiter(STREAMS_MAX)

    async def state(request: Request) -> Response:
        return Response(encoded(collector.state), media_type="application/json", headers=_NO_STORE)

    async def remembered(request: Request) -> Response:
        span, stage = request.query_params.get("span", "hour"), request.query_params.get("stage", "0")
        named = next((name for name in SPANS if name == span), None)
        stages = max(1, len(collector.chains))
        if named is None or stage not in map(str, range(stages)):
            error = f"there is no such history: span is one of {', '.join(SPANS)}, and stage is 0 to {stages - 1}"
            return JSONResponse({"error": error}, 400, _NO_STORE)
        return Response(
            msgspec.json.encode(await history.view(named, int(stage))), media_type="application/json", headers=_NO_STORE
        )

    async def metrics(request: Request) -> Response:
        text = metrics_text(collector.state, collector.chains, collector.counts)
        return Response(text, headers={**_NO_STORE, "Content-Type": CONTENT_TYPE})

    async def health(request: Request) -> Response:
        watch = collector.state.monitor
        age_s = None if watch.last_success is None else time.time() - watch.last_success
        well = age_s is not None and age_s <= FRESH_S
        body = {"status": "ok" if well else "no recent reading of the run", "age_s": age_s}
        return JSONResponse(body, 200 if well else 503, _NO_STORE)

    async def stream(request: Request) -> Response:
        try:
            streams.acquire_on_behalf_of_nowait(request)
        except trio.WouldBlock:
            return JSONResponse({"error": f"{STREAMS_MAX} pages are open: close one"}, 503, _NO_STORE)
        return StreamingResponse(
            _states(collector, streams, request), media_type="text/event-stream", headers=_NO_STORE
        )

    async def refuse(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        path = plain(request.scope["path"], _PATH_CHARS_MAX)
        return JSONResponse({"error": f"{path} is not served here: see /"}, error.status_code, _NO_STORE)

    routes = [
        Route("/api/v1/state", state),
        Route("/api/v1/stream", stream),
        Route("/api/v1/history", remembered),
        Route("/metrics", metrics),
        Route("/healthz", health),
        *page_routes(_PAGE),
    ]
    access = Middleware(Access, token=token, host=host)
    return Starlette(routes=routes, exception_handlers={HTTPException: refuse}, middleware=[access])


def encoded(state: MonitorState) -> bytes:
    """Return the state as JSON; NaN and infinity are null."""
    return msgspec.json.encode(state)


async def _states(collector: MonitorCollector, streams: trio.CapacityLimiter, request: Request) -> AsyncIterator[bytes]:
    """Yield the state, and each later one; a comment now and then finds out whether the page is still there."""
    try:
        shown = collector.state
        yield b"data: " + encoded(shown) + b"\n\n"
        while True:
            with trio.move_on_after(BEAT_S):
                await collector.changed()
            if collector.state is shown:
                yield b": still here\n\n"
                continue
            shown = collector.state
            yield b"data: " + encoded(shown) + b"\n\n"
    finally:
        streams.release_on_behalf_of(request)
