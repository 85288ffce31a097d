"""What a peer tells others of its own events: which, how much of them, and page by page."""

from __future__ import annotations

from contextlib import AsyncExitStack
from pathlib import Path

import msgspec
import pytest

from peer.catalogue.reading import CATALOGUE
from peer.events import Event, EventLog
from peer.identity import Identity
from peer.net.host import open_host
from peer.net.wire import HEADER_BYTES
from swarm.membership.told_events import (
    EVENTS,
    KEPT_MAX,
    PAGE_MAX,
    AskEvents,
    EventPage,
    ToldEvents,
    serve_events,
)

SOON = 30.0


def read_all(told: ToldEvents, cursor: AskEvents | None = None) -> tuple[list[int], EventPage, int]:
    """Return the rounds of all events behind a cursor, the last page, and how many were lost."""
    rounds: list[int] = []
    lost = 0
    page = told.since(cursor or AskEvents())
    while True:
        rounds += [int(str(event.fields["round"])) for event in page.events]
        lost += page.lost
        if not page.events:
            return rounds, page, lost
        page = told.since(AskEvents(page.session, page.last))


def note(told: ToldEvents, number: int) -> None:
    told.note(Event(1.0, "round_empty", {"round": number, "members": 2}))


def test_events_are_read_in_pages_and_once() -> None:
    told = ToldEvents()
    assert read_all(told)[0] == []
    for number in range(100):
        note(told, number)
    rounds, page, lost = read_all(told)
    assert rounds == [*range(100)] and lost == 0
    note(told, 100)
    assert read_all(told, AskEvents(page.session, page.last))[0] == [100]
    assert read_all(told, AskEvents("another process", page.last))[0] == [*range(101)], "numbers begin anew"
    assert read_all(told, AskEvents(page.session, 1 << 50))[0] == [], "a cursor that was never given"


def test_what_is_kept_no_more_is_counted() -> None:
    told = ToldEvents()
    first = told.since(AskEvents())
    for number in range(KEPT_MAX + 25):
        note(told, number)
    rounds, _, lost = read_all(told, AskEvents(first.session, 5))
    assert rounds == [*range(25, KEPT_MAX + 25)] and lost == 20


def test_only_named_events_and_fields_leave_the_machine() -> None:
    told = ToldEvents()
    told.note(Event(1.0, "contact_failed", {"address": "/ip4/10.0.0.7/tcp/1", "reason": "no"}))
    told.note(Event(2.0, "worker_failed", {"round": 3, "reason": "/home/ada/data/text.txt cannot be read"}))
    [event] = told.since(AskEvents()).events
    assert (event.name, event.fields) == ("worker_failed", {"round": 3})


@pytest.mark.parametrize(
    "value", ["é" * 1000, 1 << 70, -(1 << 70), 1e300, float("nan"), True, None, ["a", "b"], {"a": 1}]
)
def test_any_field_makes_a_message(value: object) -> None:
    told = ToldEvents()
    told.note(Event(1.0, "round_empty", {"round": value}))  # type: ignore[dict-item]
    page = told.since(AskEvents())
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(page), type=EventPage) == page


def test_the_longest_page_fits_into_a_header() -> None:
    told = ToldEvents()
    name, fields = max(((name, kind.told or ()) for name, kind in CATALOGUE.items()), key=lambda one: len(one[1]))
    for _ in range(PAGE_MAX):
        told.note(Event(1.0, name, dict.fromkeys(fields, "😀" * 200)))
    page, read = told.since(AskEvents()), 0
    while page.events:
        assert len(msgspec.msgpack.encode(page)) < HEADER_BYTES - 1024
        read += len(page.events)
        page = told.since(AskEvents(page.session, page.last))
    assert read == PAGE_MAX


async def test_a_client_reads_the_events_of_a_host(tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        log = EventLog(tmp_path / "events.jsonl")
        host = await stack.enter_async_context(open_host(identity=Identity.generate(), events=log))
        other = await stack.enter_async_context(open_host(identity=Identity.generate(), events=EventLog()))
        serve_events(host)
        await other.connect_address(host.addresses[0], timeout_s=SOON)
        log.emit("round_empty", round=7, members=3)
        page = (await other.rpc.call(host.peer_id, EVENTS, AskEvents(), timeout_s=SOON)).body
        assert [(event.name, event.fields) for event in page.events] == [("round_empty", {"round": 7, "members": 3})]
