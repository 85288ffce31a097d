"""Origins: the scheme, host and port of a page, as a browser sends them in the header Origin."""

from __future__ import annotations

import re
from typing import Final

from peer.errors import ConfigError
from peer.plain_text import plain
from swarm.web.own_host import is_host

EVERY: Final = "*"
_ORIGIN: Final = re.compile(r"[a-z][a-z0-9+.-]*://([^/?#@\s]+)")
_DEFAULT_PORTS: Final = {"http": ":80", "https": ":443"}


def read_origin(text: str) -> str:
    """Return an origin as browsers write it, or `EVERY`. Raises ConfigError."""
    origin = text.lower()
    found = _ORIGIN.fullmatch(origin)
    if origin != EVERY and (found is None or "*" in origin or not origin.isascii() or not is_host(found[1])):
        raise ConfigError(
            f"--allow-origin {plain(text)} is no origin: write scheme, host and port like https://app.example or"
            " http://localhost:3000, or * for all"
        )
    return origin.removesuffix(_DEFAULT_PORTS.get(origin.partition("://")[0], ":"))
