"""The chat page: files of our own, which ask no other machine for anything."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

_FOLDER: Final = Path(__file__).parent / "page"
_KINDS: Final = {
    "index.html": "text/html; charset=utf-8",
    "chat.js": "text/javascript; charset=utf-8",
    "chat.css": "text/css; charset=utf-8",
    "icon.svg": "image/svg+xml",
}
_HEADERS: Final = {
    "Content-Security-Policy": "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


def page_routes() -> list[Route]:
    """Return the routes of the page's files, read once."""
    return [_route("/" if name == "index.html" else f"/{name}", name) for name in _KINDS]


def _route(path: str, name: str) -> Route:
    content = (_FOLDER / name).read_bytes()

    async def serve(request: Request) -> Response:
        return Response(content, headers=_HEADERS, media_type=_KINDS[name])

    return Route(path, serve)
