"""The application: OpenAI's paths, a chat page, and whether all blocks are served.

    GET  /                        the chat page
    GET  /healthz                 200 if every block of the model has a server, else 503
    GET  /v1/models               the model
    POST /v1/chat/completions     an answer to a conversation
    POST /v1/completions          the continuation of a text
    POST /v1/responses            an answer to a conversation, as items

Without a key only a machine's own programs may ask, and a page of another site is not one of them: requests must name
this machine as their host, and their body as JSON, which a browser sends across sites only after asking for leave. That
leave (CORS) has the pages of the origins that the operator has named, and no other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import trio
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from peer.errors import ConfigError
from swarm.gateway.asks import GenerationAsk, read_chat, read_completion
from swarm.gateway.choices import SESSIONS_MAX, prepare
from swarm.gateway.errors import ApiError
from swarm.gateway.ignored import IGNORED_HEADER
from swarm.gateway.limits import ApiKeys, Quotas
from swarm.gateway.openai import AnswerFormat, Kind
from swarm.gateway.respond import ROUTE_HEADER, ClientGone, Connection, Responder, ResponseWriter, read_body
from swarm.gateway.responses.events import ResponseFormat
from swarm.gateway.responses.request import read_response
from swarm.gateway.template import ChatTemplate
from swarm.inference.client import ModelClient
from swarm.inference.route import uncovered
from swarm.web.own_host import names_this_machine
from swarm.web.page_files import page_routes
from swarm.web.places import keep_place, let_in

_PAGE: Final = Path(__file__).parent / "page"


@dataclass(frozen=True)
class Gateway:
    """The backend that answers requests."""

    model: ModelClient
    template: ChatTemplate
    keys: ApiKeys
    quotas: Quotas
    host: str = "127.0.0.1"
    """The address that is listened at."""
    origins: tuple[str, ...] = ()
    """Of the pages of other sites that may use it (`swarm.web.origins`)."""

    def admit(self, request: Request) -> str:
        """Return the name of the key of a request. Raises ApiError."""
        if not self.keys.needed:
            host = request.headers.get("host", "").lower()
            if not names_this_machine(host, self.host):
                raise ApiError(403, f"{host!r} is not this machine's own name: ask for 127.0.0.1", code="foreign_host")
        name = self.keys.holder(request.headers.get("authorization", ""))
        let_in(request.scope)
        return name


class GenerationEndpoint:
    """One of the paths that generate."""

    def __init__(
        self,
        gateway: Gateway,
        read: Callable[[bytes], GenerationAsk],
        form: Callable[[GenerationAsk, ModelClient], ResponseWriter],
        slots: trio.CapacityLimiter,
    ) -> None:
        """`read`: the body. `form`: returns what writes the response of a model."""
        self._gateway, self._read, self._form, self._slots = gateway, read, form, slots

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope)
        name = self._gateway.admit(request)
        if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
            raise ApiError(415, "the body is not declared as JSON: send Content-Type: application/json")
        with suppress(ClientGone):
            with self._gateway.quotas.body(name) as take:
                body = await read_body(receive, take)
            with self._gateway.quotas.one(name):  # not sooner: a body that never comes holds no slot
                keep_place(scope)
                await self._answer(self._read(body), Connection(receive, send))

    async def _answer(self, ask: GenerationAsk, connection: Connection) -> None:
        model = _named(self._gateway.model, ask.model)
        answers = await prepare(model, self._gateway.template, ask)
        responder = Responder(answers, self._form(ask, model), connection, model.client.host.events)
        await responder.run(self._slots, stream=ask.stream)


def _form(kind: Kind, ask: GenerationAsk, model: ModelClient) -> ResponseWriter:
    hidden = frozenset[int]() if ask.special else model.special
    return AnswerFormat(kind, model.name, ask.logprobs, hidden, ask.include_usage)


def gateway_app(gateway: Gateway) -> Starlette:
    """Return the application."""
    slots = trio.CapacityLimiter(SESSIONS_MAX)
    model = gateway.model

    async def list_models(request: Request) -> Response:
        gateway.admit(request)
        return JSONResponse({"object": "list", "data": [_model_card(model.named(name)) for name in model.names]})

    async def show_model(request: Request) -> Response:
        gateway.admit(request)
        return JSONResponse(_model_card(_named(model, request.path_params["name"])))

    async def health(request: Request) -> Response:
        await model.servers.refresh()
        missing = uncovered(model.servers.view())
        body = {"status": "blocks are missing" if missing else "ok", "missing": missing}
        return JSONResponse(body, 503 if missing else 200, {"Cache-Control": "no-store"})

    def generation(
        read: Callable[[bytes], GenerationAsk], form: Callable[[GenerationAsk, ModelClient], ResponseWriter]
    ) -> GenerationEndpoint:
        return GenerationEndpoint(gateway, read, form, slots)

    routes = [
        Route("/healthz", health),
        Route("/v1/models", list_models),
        Route("/v1/models/{name:path}", show_model),
        Route("/v1/chat/completions", generation(read_chat, partial(_form, "chat")), methods=["POST"]),
        Route("/v1/completions", generation(read_completion, partial(_form, "text")), methods=["POST"]),
        Route("/v1/responses", generation(read_response, ResponseFormat), methods=["POST"]),
        *page_routes(_PAGE),
    ]
    handlers = {ApiError: _refuse, HTTPException: _refuse_path, 500: _fail}
    return Starlette(routes=routes, middleware=_cors(gateway.origins), exception_handlers=handlers)


def _cors(origins: Sequence[str]) -> list[Middleware]:
    """Return what answers the preflights of those origins, and marks the responses to them; nothing for none."""
    exposed = (IGNORED_HEADER, ROUTE_HEADER, "Retry-After")
    methods = ("GET", "HEAD", "POST")
    every: Any = CORSMiddleware
    more = {"allow_origins": origins, "allow_methods": methods, "allow_headers": ("*",), "expose_headers": exposed}
    return [Middleware(every, **more)] if origins else []


def _named(model: ModelClient, name: str) -> ModelClient:
    """Return the client of the model or adapter that a request names. Raises ApiError."""
    try:
        return model.named(name)
    except ConfigError as error:
        raise ApiError(404, str(error), code="model_not_found", param="model") from error


def _model_card(model: ModelClient) -> dict[str, Any]:
    manifest = model.manifest
    return {
        "id": model.name,
        "object": "model",
        "created": manifest.created_at,
        "owned_by": manifest.authority,
        "context_length": manifest.model.max_seq_len,
        **({} if model.adapter is None else {"parent": manifest.name}),
    }


async def _refuse(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return JSONResponse(error.body, error.status, error.headers)


async def _refuse_path(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    headers = dict(error.headers or {})
    if error.status_code == 405:
        headers["Allow"] = ", ".join(sorted({*headers["Allow"].split(", "), "OPTIONS"}))
        if request.method == "OPTIONS":
            return Response(None, 204, headers)
    told = ApiError(error.status_code, f"{request.method} {request.scope['path']} is not served here: see /v1/models")
    return JSONResponse(told.body, told.status, headers)


async def _fail(request: Request, error: Exception) -> Response:
    return JSONResponse(ApiError(500, "a bug ended this request: tell the operator").body, 500)
