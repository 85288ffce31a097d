"""A page: files of our own in one folder, which ask no other machine for anything."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

_KINDS: Final = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
}
_HEADERS: Final = {
    "Content-Security-Policy": "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


def page_routes(folder: Path) -> list[Route]:
    """Return the routes of the files in `folder`, read once; index.html is at /."""
    return [_route(path) for path in sorted(folder.iterdir()) if path.suffix in _KINDS]


def _route(path: Path) -> Route:
    content, kind = path.read_bytes(), _KINDS[path.suffix]

    async def serve(request: Request) -> Response:
        return Response(content, headers=_HEADERS, media_type=kind)

    return Route("/" if path.name == "index.html" else f"/{path.name}", serve)
