"""The catalogue of events: their names, what other peers are told, and their words, whole or of told fields alone."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from peer.catalogue.happening import Happening
from peer.catalogue.reading import CATALOGUE, happening, heard
from peer.events import Event, EventLog
from swarm.membership.told_events import AskEvents, ToldEvents
from tests.cli.terminal.test_hostile_text import fields_of


def emitted(event: Happening) -> Event:
    seen = list[Event]()
    EventLog(watch=seen.append).emit(event)
    return seen[0]


def complete(name: str) -> Happening:
    """Return the event with all its fields."""
    found = happening(name, fields_of(name, "a text"))
    assert found is not None
    return found


@pytest.mark.parametrize("name", sorted(CATALOGUE))
def test_an_event_comes_back_from_the_stream_as_it_was(name: str) -> None:
    event = complete(name)
    line = emitted(event)
    assert line.name == name and happening(line.name, line.fields) == event
    again = msgspec.json.decode(msgspec.json.encode(line.fields))
    assert happening(name, again) == event, "as it is read from a file"


@pytest.mark.parametrize("name", sorted(CATALOGUE))
def test_what_other_peers_are_told_makes_the_same_event(name: str) -> None:
    told, kind = ToldEvents(), CATALOGUE[name]
    told.note(emitted(complete(name)))
    events = told.since(AskEvents()).events
    assert len(events) == (kind.told is not None)
    for event in events:
        assert set(event.fields) == set(kind.told or ())
        found = heard(event.at, event.name, event.fields)
        assert found is not None and "None" not in found.event.sentence("ann", lambda peer: peer)


@pytest.mark.parametrize("name", sorted(CATALOGUE))
def test_words_need_no_more_than_the_fields_without_a_default(name: str) -> None:
    required = {field.name for field in msgspec.structs.fields(CATALOGUE[name]) if field.required}
    least = {field: value for field, value in fields_of(name, "a text").items() if field in required}
    found = happening(name, least)
    assert found is not None and "None" not in found.sentence("ann", lambda peer: peer)


def test_only_measures_are_null_in_the_stream() -> None:
    nulls = {(name, field) for name in CATALOGUE for field, value in _least(name).items() if value is None}
    assert {field for _, field in nulls} == {"loss", "val_loss", "distance", "gain", "own_gain"}
    assert ("round_committed", "loss") in nulls, "a reader is told that there was none"


def _least(name: str) -> dict[str, Any]:
    required = {field.name for field in msgspec.structs.fields(CATALOGUE[name]) if field.required}
    found = happening(name, {field: value for field, value in fields_of(name, "a text").items() if field in required})
    assert found is not None
    return found.as_fields()


def test_an_event_that_is_not_its_own_is_none() -> None:
    assert happening("no_such_event", {"round": 1}) is None and heard(1.0, "no_such_event", {}) is None
    with pytest.raises(msgspec.ValidationError):
        happening("round_empty", {"round": "three"})
    assert heard(1.0, "round_empty", {"round": "three"}) is None
    newer = heard(1.0, "round_empty", {"round": 3, "members": 2, "of a later release": 1})
    assert newer is not None and newer.event.sentence("ann", str) == "round 3 merged nothing"
