"""Folds the events of one or several peers into a `ViewState`; `cli.views.table` shows it."""

from __future__ import annotations

from typing import Final

from cli.views.facts import Fields
from cli.views.group_progress import GROUP_EVENTS
from cli.views.peer_progress import PEER_EVENTS
from cli.views.pipeline_progress import PIPELINE_EVENTS
from cli.views.state import ViewState
from peer.plain_text import plain

_HANDLERS: Final = {**PEER_EVENTS, **GROUP_EVENTS, **PIPELINE_EVENTS}


class Progress(ViewState):
    """A view's state that follows events. Feed it with `apply`."""

    def apply(self, name: str, event: str, at: float, fields: Fields) -> None:
        """Take in one event of the peer called `name`, its texts as plain ones. Unknown events are ignored."""
        row = self.row(plain(name))
        handler = _HANDLERS.get(event)
        if handler is not None:
            shown = {key: plain(value) if isinstance(value, str) else value for key, value in fields.items()}
            handler(self, row, at, shown)
