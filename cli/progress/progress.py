"""Folds the events of one or several peers into a `ViewState`; `cli.views` draws it.

This is the one place where a view meets an event. Whatever a field holds, the peer whose view it is goes on.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from cli.progress.facts import Fields
from cli.progress.groups import GROUP_EVENTS
from cli.progress.peers import PEER_EVENTS
from cli.progress.pipeline import PIPELINE_EVENTS
from cli.progress.state import ViewState
from peer.plain_text import plain

_HANDLERS: Final = {**PEER_EVENTS, **GROUP_EVENTS, **PIPELINE_EVENTS}


@dataclass
class Progress(ViewState):
    """A view's state that follows events. Feed it with `apply`."""

    odd: set[str] = field(default_factory=set)
    """The names of events that could not be shown."""

    def apply(self, name: str, event: str, at: float, fields: Fields) -> None:
        """Take in one event of the peer called `name`, its texts as plain ones. Unknown events are ignored, and so is
        one whose fields are not what it should have, with a note the first time."""
        row = self.row(plain(name))
        handler = _HANDLERS.get(event)
        if handler is None:
            return
        try:
            handler(self, row, at, _plain_fields(fields))
        except OSError:
            raise  # the terminal is gone
        except Exception as error:  # noqa: BLE001  a fault of a view must not end the peer
            if event not in self.odd:
                self.odd.add(event)
                what = plain(f"{type(error).__name__}: {error}")
                self.note(f"{row.name}: its event {event!r} cannot be shown ({what}); it goes on without")


def _plain_fields(fields: Fields) -> Fields:
    """Return the fields with plain texts. Raises ValueError for a stage that is none: rows and groups have it as a
    key."""
    stage = fields.get("stage")
    if stage is not None and (not isinstance(stage, int) or isinstance(stage, bool)):
        raise ValueError(f"{stage!r} is no stage")
    return {key: plain(value) if isinstance(value, str) else value for key, value in fields.items()}
