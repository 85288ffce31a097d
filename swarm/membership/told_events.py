"""Events that a peer reports to others about itself: phases, rounds and troubles, for a monitor's log.

A peer keeps the last thousand of them, numbered. They are claims of that peer. Only the events and fields leave the
machine that the catalogue (`peer.catalogue`) says are `told`.
"""

from __future__ import annotations

import secrets
import threading
from collections import deque
from itertools import islice
from typing import Annotated, Final

import msgspec

from peer.bounds import NUMBERS_END, Name, Number, Text, UnixTime
from peer.catalogue.reading import CATALOGUE
from peer.events import Event
from peer.net.host import Host
from peer.net.method import Call, Method
from peer.net.wire import HEADER_BYTES

KEPT_MAX: Final = 1000
PAGE_MAX: Final = 64
PAGE_BYTES: Final = HEADER_BYTES - (4 << 10)  # room for the rest of a header, and for the longest event
FIELDS_MAX: Final = 8
_TEXT_CHARS: Final = 128

Value = (
    bool
    | Annotated[int, msgspec.Meta(ge=-NUMBERS_END, le=NUMBERS_END)]
    | Annotated[float, msgspec.Meta(ge=-1e18, le=1e18)]
    | Text
    | None
)


class ToldEvent(msgspec.Struct, frozen=True):
    """One event as it is reported."""

    at: UnixTime
    name: Name
    fields: Annotated[dict[Name, Value], msgspec.Meta(max_length=FIELDS_MAX)]


class AskEvents(msgspec.Struct, frozen=True):
    """A request for the events after a cursor."""

    session: Name = ""
    """Of the answer that the cursor is from: each process numbers its own. Empty: from the oldest one."""
    after: Number = 0
    """The `last` of that answer."""


class EventPage(msgspec.Struct, frozen=True):
    """Events in order; the next request continues after them."""

    session: Name
    events: Annotated[tuple[ToldEvent, ...], msgspec.Meta(max_length=PAGE_MAX)]
    last: Number
    """The number of the last of them; without any, of the last event there was."""
    lost: Number = 0
    """How many events after the cursor are no longer kept."""


EVENTS: Final = Method("events.since", AskEvents, EventPage, access="client")


class ToldEvents:
    """The last reported events of this process. Thread-safe."""

    def __init__(self) -> None:
        self._session = secrets.token_hex(8)
        self._kept: deque[ToldEvent] = deque(maxlen=KEPT_MAX)
        self._last = 0  # the number of the last one
        self._lock = threading.Lock()

    def note(self, event: Event) -> None:
        """Keep an event if it is one that is reported."""
        kind = CATALOGUE.get(event.name)
        if kind is None or kind.told is None:
            return
        fields = {name: _cut(event.fields[name]) for name in kind.told if name in event.fields}
        with self._lock:
            self._kept.append(ToldEvent(event.at, event.name, fields))
            self._last += 1

    def since(self, asked: AskEvents) -> EventPage:
        """Return the next page after the cursor."""
        with self._lock:
            first = self._last - len(self._kept)  # the number of the last one that is kept no more
            begins = asked.after if asked.session == self._session else 0
            begins = min(begins, self._last)
            skipped = max(begins, first) - first
            page: list[ToldEvent] = []
            room = PAGE_BYTES
            for event in islice(self._kept, skipped, skipped + PAGE_MAX):
                room -= len(msgspec.msgpack.encode(event))
                if room < 0:
                    break
                page.append(event)
            return EventPage(self._session, tuple(page), first + skipped + len(page), max(0, first - begins))


def serve_events(host: Host) -> None:
    """Tell clients and members of this host's events from now on."""
    told = ToldEvents()

    async def on_ask(call: Call[AskEvents]) -> EventPage:
        return told.since(call.body)

    host.rpc.register(EVENTS, on_ask)
    host.events.subscribe(told.note)


def _cut(value: object) -> Value:
    """Return a field as a message may carry it: short texts, bounded numbers, and lists as their length."""
    if isinstance(value, str):
        return value[:_TEXT_CHARS]
    if isinstance(value, int):
        return max(-NUMBERS_END, min(NUMBERS_END, value)) if not isinstance(value, bool) else value
    if isinstance(value, float):
        return value if abs(value) <= 1e18 else None
    return len(value) if isinstance(value, list | dict) else None
