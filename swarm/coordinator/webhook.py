"""Tells a person's web service of events that call for a person (`peer coordinate --notify URL`)."""

from __future__ import annotations

import urllib.error
import urllib.request
from http.client import HTTPException
from typing import Any, Final

import msgspec
import trio

from peer.errors import ConfigError
from peer.events import Event, EventLog

NOTIFIED: Final = frozenset({"quorum_lost", "start_not_bound", "run_completed"})
POST_S: Final = 10.0
WAITING_MAX: Final = 64


class Webhook:
    """POSTs a small JSON object for each event of `NOTIFIED`: its fields, its name as `event`, its Unix time as `at`,
    and the run's id and name. A failure is an event, `notify_failed`, and nothing more."""

    def __init__(self, url: str, run_id: str, name: str, events: EventLog) -> None:
        check_url(url)
        self._url, self._run, self._events = url, {"run_id": run_id, "run": name}, events
        self._send, self._receive = trio.open_memory_channel[Event](WAITING_MAX)
        self._opener = urllib.request.build_opener(_NoRedirects)

    async def run(self) -> None:
        """Notify until cancelled."""
        with self._events.subscribed(self._note):
            async for event in self._receive:
                body = msgspec.json.encode({"event": event.name, "at": round(event.at, 3), **self._run, **event.fields})
                try:
                    # The stubs of trio_typing are of an older trio.
                    await trio.to_thread.run_sync(self._post, body, abandon_on_cancel=True)  # type: ignore[call-arg]
                except (OSError, HTTPException, ValueError) as error:
                    self._events.emit("notify_failed", about=event.name, reason=str(error))

    def _note(self, event: Event) -> None:
        if event.name in NOTIFIED:
            try:
                self._send.send_nowait(event)
            except trio.WouldBlock:
                self._events.emit("notify_failed", about=event.name, reason="too many events wait")

    def _post(self, body: bytes) -> None:
        request = urllib.request.Request(self._url, body, {"Content-Type": "application/json"}, method="POST")
        try:
            self._opener.open(request, timeout=POST_S).close()
        except urllib.error.HTTPError as error:  # an answer, which is open
            error.close()
            raise


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """The address that a person gave, and no other."""

    def redirect_request(self, *answer: Any) -> None:
        return None


def check_url(url: str) -> None:
    """Raise ConfigError unless that is an http(s) URL."""
    if not url.startswith(("http://", "https://")) or not url.isprintable() or " " in url:
        raise ConfigError(f"--notify {url} is not an address to POST to: give an http:// or https:// URL")
