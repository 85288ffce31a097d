"""Answers of models that call functions, and what is read of them piece by piece."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from swarm.gateway.reading.call_formats import FORMATS, Schemas
from swarm.gateway.reading.tool_calls import CallStream
from tests.swarm.gateway.tool_models import Calls

SCHEMAS: Schemas = {
    "get_weather": {"properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
    "add": {"properties": {"terms": {"type": "array"}, "note": {"type": ["string", "null"]}, "exact": {}}},
    "clock": {},
}
TWO: Calls = [("get_weather", {"city": 'Köln "}]) </function> \\ \n', "days": -3}), ("clock", {})]
MANY: Calls = [*TWO, ("add", {"terms": [1, 2.5, {"a": [True, None]}, "x"], "note": None, "exact": False})]
SEVERAL = sorted(FORMATS)
JSON = [name for name in SEVERAL if FORMATS[name].forced is not None]
Read = tuple[str, list[tuple[str, str, str | None]]]
"""The text of an answer, and of each call its name, its arguments as the model wrote them, and how it has ended."""


def read(form: str, pieces: Sequence[str], is_parallel: bool = True, hidden: Sequence[str] = ()) -> Read:
    """Return what is read of an answer that comes in pieces."""
    stream = CallStream(FORMATS[form], SCHEMAS, is_parallel)
    told = [one for piece in pieces for one in stream.push(piece, piece not in hidden)] + stream.finish()
    calls, ids = list[tuple[str, str, str | None]](), list[str]()
    for piece in [piece for one in told for piece in one.calls]:
        if piece.is_first:
            assert piece.id not in ids and (not calls or calls[-1][2])  # the call before has ended
            ids.append(piece.id)
            calls.append((piece.name, piece.arguments, piece.end))
        else:
            name, arguments, end = calls[-1]
            assert (piece.id, piece.name, end) == (ids[-1], name, None)
            calls[-1] = (name, arguments + piece.arguments, piece.end)
    assert len(calls) == stream.count and all(end for *_, end in calls)
    return "".join(one.text for one in told), calls


def found(
    form: str, pieces: Sequence[str], is_parallel: bool = True, hidden: Sequence[str] = ()
) -> tuple[str, list[tuple[str, Any]]]:
    """Return the text and the calls, all of which are whole, of an answer that comes in pieces."""
    text, calls = read(form, pieces, is_parallel, hidden)
    assert all(end == "completed" for *_, end in calls)
    return text, [(name, json.loads(arguments)) for name, arguments, _ in calls]


def cut(text: str, places: Sequence[int]) -> list[str]:
    ends = sorted({min(place, len(text)) for place in places})
    return [text[begin:end] for begin, end in zip([0, *ends], [*ends, len(text)], strict=True)]
