"""Folds the events of one or several peers into a `ViewState`; `cli.views` draws it.

This is the one place where a view meets an event. Whatever a field holds, the peer whose view it is goes on.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from cli.progress.groups import GROUP_EVENTS
from cli.progress.peers import IN_LOG_ONLY, PEER_EVENTS
from cli.progress.state import ViewState
from peer.catalogue.reading import happening
from peer.plain_text import plain

_HANDLERS: Final = {**PEER_EVENTS, **GROUP_EVENTS}
_NOTE_CHARS_MAX: Final = 2048  # the account of a corpus is long


@dataclass
class Progress(ViewState):
    """A view's state that follows events. Feed it with `apply`."""

    odd: set[str] = field(default_factory=set)
    """The names of events that could not be shown."""

    def apply(self, name: str, event: str, at: float, fields: Mapping[str, Any]) -> None:
        """Take in one event of the peer called `name`, its texts as plain ones. Events that are not in the catalogue
        are ignored, and so is one whose fields are not what it should have, with a note the first time."""
        peer = self.peer(plain(name))
        try:
            found = happening(event, plain_fields(fields))
            if found is None:
                return
            handler = _HANDLERS.get(type(found))
            is_news = handler(self, peer, at, found) if handler is not None else not isinstance(found, IN_LOG_ONLY)
            if is_news and (sentence := found.sentence(peer.name, self.name_of)):
                self.note(plain(sentence, _NOTE_CHARS_MAX))
        except OSError:
            raise  # the terminal is gone
        except Exception as error:  # noqa: BLE001  a fault of a view must not end the peer
            if event not in self.odd:
                self.odd.add(event)
                what = plain(f"{type(error).__name__}: {error}")
                self.note(f"{peer.name}: its event {event!r} cannot be shown ({what}); the view continues without it")


def plain_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields with plain texts."""
    return {key: plain(value) if isinstance(value, str) else value for key, value in fields.items()}
