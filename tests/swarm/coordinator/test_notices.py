"""`peer coordinate --notify`: a web service is told of what calls for the operator."""

from __future__ import annotations

import socket

import pytest
import trio
import trio.testing

from peer.errors import ConfigError
from peer.events import Event, EventLog
from swarm.coordinator.coordinator import notify
from swarm.web.webhook import check_url
from tests.swarm.coordinator.web_service import Service, serve


async def failure_of(url: str) -> Event:
    """Return what is told where the service at that URL fails."""
    log, failed = EventLog(), trio.Event()
    seen: list[Event] = []

    def note(event: Event) -> None:
        if event.name == "notify_failed":
            seen.append(event)
            failed.set()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(notify, url, "id", "a run", log)
        with log.subscribed(note), trio.fail_after(300):
            await trio.testing.wait_all_tasks_blocked()
            log.emit("run_completed", round=4)
            await failed.wait()
        nursery.cancel_scope.cancel()
    return seen[0]


async def test_a_service_is_told_of_what_calls_for_the_operator() -> None:
    log, service = EventLog(), Service()
    with serve(service):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(notify, service.url, "run's id", "a run", log)
            await trio.testing.wait_all_tasks_blocked()
            log.emit("head_seen", round=3, members=2)
            log.emit("quorum_lost", round=3, reason="too few voters answer", away=["peer"], stage=1)
            log.emit("member_unsaved", peer="peer", name="a", reason="cannot write its disk")
            log.emit("second_process", ip="192.0.2.1")
            log.emit("run_completed", round=4)
            with trio.fail_after(300):
                for _ in range(3):
                    await trio.to_thread.run_sync(service.came.acquire)
            nursery.cancel_scope.cancel()
    first, second, last = service.told
    assert first["at"] > 1e9 and first == {
        "at": first["at"], "event": "quorum_lost", "run_id": "run's id", "run": "a run",
        "round": 3, "reason": "too few voters answer", "away": ["peer"], "stage": 1,
    }  # fmt: skip
    assert (second["event"], second["ip"]) == ("second_process", "192.0.2.1")
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
