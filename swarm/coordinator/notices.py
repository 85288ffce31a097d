"""What a coordinator tells the operator's web service: the events that call for the operator."""

from __future__ import annotations

from typing import Final

from peer.events import Event, EventLog
from swarm.web.webhook import Webhook

NOTIFIED: Final = frozenset({"quorum_lost", "run_completed", "second_process"})
"""None of them can be caused by a member's claim alone."""


class Notices:
    """POSTs a small JSON object for each event of `NOTIFIED`: its fields, its name as `event`, its Unix time as `at`,
    and the run's id and name. A failure is an event, `notify_failed`, and nothing more."""

    def __init__(self, url: str, run_id: str, name: str, events: EventLog) -> None:
        self._run, self._events = {"run_id": run_id, "run": name}, events
        self._webhook = Webhook(url, lambda about, reason: events.emit("notify_failed", about=about, reason=reason))

    async def run(self) -> None:
        """Notify until cancelled."""
        with self._events.subscribed(self._note):
            await self._webhook.run()

    def _note(self, event: Event) -> None:
        if event.name in NOTIFIED:
            self._webhook.send({"event": event.name, "at": round(event.at, 3), **self._run, **event.fields})
