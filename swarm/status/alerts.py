"""Alerts: conditions that have held for their time, from when they were first seen until they are gone."""

from __future__ import annotations

from typing import Final

from msgspec.structs import replace

from swarm.status.alert_rules import blindness, conditions
from swarm.status.state import Alert, MonitorState
from swarm.status.verdict import Condition

GRAVITY: Final = {"critical": 0, "warning": 1, "info": 2}
ALERTS_MAX: Final = 100


class Alerts:
    """The conditions that hold, and since when."""

    def __init__(self) -> None:
        self._since: dict[tuple[str, str], float] = {}

    def on(self, state: MonitorState, now: float) -> MonitorState:
        """Return the state with its alerts. Where the last reading failed, those of the one before stand: nothing says
        that they are over."""
        unread = bool(state.monitor.failure)
        found = {(one.name, one.subject): one for one in (blindness(state, now) if unread else conditions(state))}
        lasting = [alert for alert in state.alerts if unread and (alert.name, alert.subject) not in found]
        before = self._since
        self._since = {key: before.get(key, now) for key in (*found, *(before if unread else ()))}
        due = [self._alert(key, one) for key, one in found.items() if now - self._since[key] >= one.after_s]
        return replace(state, alerts=tuple(sorted((*due, *lasting), key=_order)[:ALERTS_MAX]))

    def _alert(self, key: tuple[str, str], found: Condition) -> Alert:
        return Alert(
            name=found.name,
            subject=found.subject,
            severity=found.severity,
            text=found.text,
            remedy=found.remedy,
            basis=found.basis,
            since=self._since[key],
        )


def _order(alert: Alert) -> tuple[int, float, str, str]:
    return GRAVITY[alert.severity], alert.since, alert.name, alert.subject
