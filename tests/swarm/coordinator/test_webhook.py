"""`peer coordinate --notify`: a web service is told of what calls for a person."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import msgspec
import pytest
import trio
import trio.testing

from peer.errors import ConfigError
from peer.events import Event, EventLog
from swarm.coordinator.webhook import Webhook, check_url


@dataclass
class Service:
    """A web service that notes what it is told. `status`: what it answers."""

    status: int = 204
    url: str = ""
    told: list[dict[str, Any]] = field(default_factory=list)
    came: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))


@contextmanager
def serve(service: Service) -> Iterator[None]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert self.headers["Content-Type"] == "application/json"
            body = self.rfile.read(int(self.headers["Content-Length"]))
            service.told.append(msgspec.json.decode(body))
            self.send_response(service.status)
            if service.status == 302:
                self.send_header("Location", "/elsewhere")
            self.end_headers()
            service.came.release()

        def log_message(self, *arguments: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        service.url = f"http://127.0.0.1:{server.server_port}/hook"
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield
        finally:
            server.shutdown()
            thread.join()


async def failure_of(url: str) -> Event:
    """Return what is told where the service at that URL fails."""
    log, failed = EventLog(), trio.Event()
    seen: list[Event] = []

    def note(event: Event) -> None:
        if event.name == "notify_failed":
            seen.append(event)
            failed.set()

    async with trio.open_nursery() as nursery:
        hook = Webhook(url, "id", "a run", log)
        nursery.start_soon(hook.run)
        with log.subscribed(note), trio.fail_after(60):
            await trio.testing.wait_all_tasks_blocked()
            log.emit("run_completed", round=4)
            await failed.wait()
        nursery.cancel_scope.cancel()
    return seen[0]


async def test_a_service_is_told_of_what_calls_for_a_person() -> None:
    log, service = EventLog(), Service()
    with serve(service):
        async with trio.open_nursery() as nursery:
            hook = Webhook(service.url, "run's id", "a run", log)
            nursery.start_soon(hook.run)
            await trio.testing.wait_all_tasks_blocked()
            log.emit("head_seen", round=3, members=2)
            log.emit("quorum_lost", round=3, reason="too few voters answer", away=["peer"], stage=1)
            log.emit("run_completed", round=4)
            with trio.fail_after(60):
                for _ in range(2):
                    await trio.to_thread.run_sync(service.came.acquire)
            nursery.cancel_scope.cancel()
    first, last = service.told
    assert first["at"] > 1e9 and first == {
        "at": first["at"], "event": "quorum_lost", "run_id": "run's id", "run": "a run",
        "round": 3, "reason": "too few voters answer", "away": ["peer"], "stage": 1,
    }  # fmt: skip
    assert (last["event"], last["round"]) == ("run_completed", 4)


@pytest.mark.parametrize("status", [302, 500])
async def test_an_answer_that_is_none_is_told(status: int) -> None:
    service = Service(status)
    with serve(service):
        event = await failure_of(service.url)
    assert event.fields["about"] == "run_completed" and str(status) in str(event.fields["reason"])
    assert len(service.told) == 1, "the request goes nowhere else"


async def test_a_service_that_is_away_is_told() -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    event = await failure_of(f"http://127.0.0.1:{port}/")
    assert "refused" in str(event.fields["reason"])


@pytest.mark.parametrize("url", ["file:///etc/passwd", "ftp://host/", "example.com", "https://a b", "http://a\n"])
def test_only_web_addresses(url: str) -> None:
    with pytest.raises(ConfigError, match="give an http:// or https:// URL"):
        check_url(url)
