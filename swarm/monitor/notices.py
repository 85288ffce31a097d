"""What a monitor tells a person's web service (`peer monitor --notify URL`): verdicts that change, and alerts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import trio

from swarm.monitor.collector import MonitorCollector
from swarm.status.state import Alert, MonitorState
from swarm.web.webhook import Webhook

SETTLED_S: Final = 20.0
"""A verdict that lasts for less is not sent: near a threshold it may flap."""


class MonitorNotices:
    """POSTs a small JSON object for each verdict that has settled and differs from the one sent before (the first one
    only if something is wrong), and when an alert begins and ends. `on_failure(event, reason)`: what could not be
    sent."""

    def __init__(self, url: str, collector: MonitorCollector, on_failure: Callable[[str, str], None]) -> None:
        self._collector = collector
        self._webhook = Webhook(url, on_failure)
        self._told = self._seen = ("good", "healthy")
        self._since = 0.0
        self._alerts: dict[tuple[str, str], Alert] = {}

    async def run(self) -> None:
        """Notify until cancelled."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._webhook.run)
            while True:
                self.note(await self._collector.changed())

    def note(self, state: MonitorState) -> None:
        """Take the next state."""
        verdict = (state.verdict.level, state.verdict.word)
        now = self._collector.now
        if verdict != self._seen:
            self._seen, self._since = verdict, now
        if verdict != self._told and now - self._since >= SETTLED_S:
            self._told = verdict
            level, word, reason, remedy = *verdict, state.verdict.reason, state.verdict.remedy
            self._send(state, "verdict", level=level, word=word, reason=reason, remedy=remedy)
        alerts = {(alert.name, alert.subject): alert for alert in state.alerts}
        for key in alerts.keys() - self._alerts.keys():
            self._send(state, "alert", **_told_of(alerts[key]))
        for key in self._alerts.keys() - alerts.keys():
            self._send(state, "alert_over", **_told_of(self._alerts[key]))
        self._alerts = alerts

    def _send(self, state: MonitorState, event: str, **fields: Any) -> None:
        about = {"event": event, "at": round(self._collector.now, 3), "run_id": state.run_id, "run": state.name}
        self._webhook.send(about | fields)


def _told_of(alert: Alert) -> dict[str, Any]:
    return {
        "alert": alert.name,
        "subject": alert.subject,
        "severity": alert.severity,
        "text": alert.text,
        "remedy": alert.remedy,
    }
