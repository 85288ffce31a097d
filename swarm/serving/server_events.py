"""The events of a server about its load: a change a second at most, and none while nothing changes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import trio

from peer.catalogue.serving import LoadChanged
from peer.events import EventLog
from swarm.inference.record import ServerRecord

TELL_S: Final = 1.0


async def tell_load(events: EventLog, look: Callable[[], tuple[ServerRecord, int]]) -> None:
    """Emit `load_changed` where the record or the number of clients that `look` returns has changed, until
    cancelled."""
    told: LoadChanged | None = None
    while True:
        record, clients = look()
        load = LoadChanged(
            sessions=record.sessions,
            clients=clients,
            waiting_tokens=record.waiting_tokens,
            tokens=record.tokens,
            pages=record.pages,
            pages_free=record.pages_free,
            step_ms=record.step_ms,
        )
        if load != told:
            told = load
            events.emit(load)
        await trio.sleep(TELL_S)
