"""Pages from a web server that this machine's user has named: the files of the data set's folder, read in ranges.

It is asked where no member delivers a page. Its bytes are compared with the hashes as those of a member are.
"""

from __future__ import annotations

import time
import urllib.error
import urllib.request
from functools import partial
from http.client import HTTPException, HTTPResponse
from pathlib import Path
from typing import Final

import trio

from peer.config import PagesConfig
from peer.data.pages.folder import INDEX, BuiltPages, fault_of
from peer.data.pages.index import PageIndex
from peer.errors import ConfigError, NetworkError

ANSWER_S: Final = 20.0
WHOLE_S: Final = 120.0  # of one page, on a slow link
_PIECE_BYTES: Final = 1 << 18
_PARTIAL: Final = 206


class Mirror:
    """The folder of a data set behind a URL."""

    def __init__(self, url: str, wanted: PagesConfig) -> None:
        """Raises ConfigError for what is no http(s) URL."""
        check_mirror(url)
        self._url, self._wanted = url.rstrip("/"), wanted
        self._opener = urllib.request.OpenerDirector()  # http and https alone, also after redirects
        for handler in (
            urllib.request.HTTPHandler,
            urllib.request.HTTPSHandler,
            urllib.request.HTTPRedirectHandler,
            urllib.request.HTTPDefaultErrorHandler,
            urllib.request.HTTPErrorProcessor,
        ):
            self._opener.add_handler(handler())

    async def fetch_index(self) -> bytes:
        """Return the index, unchecked. Raises NetworkError."""
        return await self._read(INDEX, 0, self._wanted.index_bytes)

    async def fetch_page(self, index: PageIndex, page: int) -> bytes:
        """Return a page. Raises NetworkError, also for other bytes than those of the page."""
        place = BuiltPages(Path(), index).find(page)
        data = await self._read(place.path.name, place.offset, index.page_bytes(page))
        if fault := await trio.to_thread.run_sync(partial(fault_of, index, page, data)):
            raise NetworkError(f"what {self._url}/{place.path.name} holds {fault}: name another --data-url")
        return data

    async def _read(self, name: str, offset: int, size_bytes: int) -> bytes:
        read = partial(self._read_blocking, f"{self._url}/{name}", offset, size_bytes)
        try:
            # The stubs of trio_typing are of an older trio.
            return await trio.to_thread.run_sync(read, abandon_on_cancel=True)  # type: ignore[call-arg]
        except (OSError, HTTPException, ValueError) as error:
            raise NetworkError(f"{self._url}/{name} cannot be read ({error}): check --data-url") from error

    def _read_blocking(self, url: str, offset: int, size_bytes: int) -> bytes:
        wanted = {"Range": f"bytes={offset}-{offset + size_bytes - 1}"}
        request = urllib.request.Request(url, headers=wanted)
        try:
            answer = self._opener.open(request, timeout=ANSWER_S)
        except urllib.error.HTTPError as error:  # an answer, which is open
            error.close()
            raise
        if answer is None:
            raise ValueError("it is no http address")
        with answer:
            return _whole(answer, offset, size_bytes)


def _whole(answer: HTTPResponse, offset: int, size_bytes: int) -> bytes:
    """Read so many bytes of an answer. Raises OSError, ValueError."""
    if offset and answer.status != _PARTIAL:
        raise ValueError("the server does not answer ranges")
    until, data = time.monotonic() + WHOLE_S, bytearray()
    while len(data) < size_bytes:
        piece = answer.read1(min(_PIECE_BYTES, size_bytes - len(data)))
        if not piece:
            raise ValueError(f"it ends after {offset + len(data)} bytes")
        if time.monotonic() > until:
            raise TimeoutError(f"{len(data)} of {size_bytes} bytes came in {WHOLE_S:g} s")
        data += piece
    return bytes(data)


def check_mirror(url: str) -> None:
    """Raise ConfigError unless that is an http(s) URL."""
    if not url.startswith(("http://", "https://")) or not url.isprintable() or " " in url:
        raise ConfigError(f"--data-url {url} is no address of a web server: give an http:// or https:// URL")
