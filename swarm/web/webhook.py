"""Notifies an operator's web service of events that need attention (`--notify URL` of coordinator and monitor)."""

from __future__ import annotations

import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from http.client import HTTPException
from typing import Any, Final

import msgspec
import trio

from peer.errors import ConfigError

POST_S: Final = 10.0
WAITING_MAX: Final = 64


class Webhook:
    """POSTs small JSON objects to an address, one after the other, and follows no redirect. A failure is passed to
    `on_failure(event, reason)`, and nothing more."""

    def __init__(self, url: str, on_failure: Callable[[str, str], None]) -> None:
        check_url(url)
        self._url, self._on_failure = url, on_failure
        self._send, self._receive = trio.open_memory_channel[Mapping[str, Any]](WAITING_MAX)
        self._opener = urllib.request.build_opener(_NoRedirects)

    def send(self, notice: Mapping[str, Any]) -> None:
        """Have an object posted; its `event` names what it is about."""
        try:
            self._send.send_nowait(notice)
        except trio.WouldBlock:
            self._on_failure(notice["event"], "too many events wait")

    async def run(self) -> None:
        """Post until cancelled."""
        async for notice in self._receive:
            body = msgspec.json.encode(notice)
            try:
                # The stubs of trio_typing are of an older trio.
                await trio.to_thread.run_sync(self._post, body, abandon_on_cancel=True)  # type: ignore[call-arg]
            except (OSError, HTTPException, ValueError) as error:
                self._on_failure(notice["event"], str(error))

    def _post(self, body: bytes) -> None:
        request = urllib.request.Request(self._url, body, {"Content-Type": "application/json"}, method="POST")
        try:
            self._opener.open(request, timeout=POST_S).close()
        except urllib.error.HTTPError as error:  # an answer, which is open
            error.close()
            raise


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """The address that the operator gave, and no other."""

    def redirect_request(self, *answer: Any) -> None:
        return None


def check_url(url: str) -> None:
    """Raise ConfigError unless that is an http(s) URL."""
    if not url.startswith(("http://", "https://")) or not url.isprintable() or " " in url:
        raise ConfigError(f"--notify {url} is not an address to POST to: give an http:// or https:// URL")
