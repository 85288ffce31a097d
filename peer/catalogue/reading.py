"""From a name and fields, of a log or of another peer, to an event of the catalogue."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Final, NamedTuple

import msgspec

from peer.catalogue import groups, machine, pages, rounds, serving, stages
from peer.catalogue.happening import Happening

CATALOGUE: Final[Mapping[str, type[Happening]]] = {
    kind.event_name(): kind
    for room in (rounds, groups, stages, machine, pages, serving)
    for kind in vars(room).values()
    if isinstance(kind, type) and issubclass(kind, Happening) and kind.__module__ == room.__name__
}
"""Every event that has readers, by its name in the stream."""


def happening(name: str, fields: Mapping[str, Any]) -> Happening | None:
    """Return the event; None for a name that is not in the catalogue.

    Raises `msgspec.ValidationError` (a ValueError) where the fields are not the event's.
    """
    kind = CATALOGUE.get(name)
    return None if kind is None else msgspec.convert(dict(fields), kind)


class Heard(NamedTuple):
    """An event that a peer told, or a log holds, as it is read."""

    at: float
    event: Happening


def heard(at: float, name: str, fields: Mapping[str, Any]) -> Heard | None:
    """Return the event; None for one that this release does not know, or whose fields are not its own."""
    with suppress(msgspec.ValidationError):
        if (event := happening(name, fields)) is not None:
            return Heard(at, event)
    return None
