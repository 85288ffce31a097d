"""`response_format` of a request: the form of an answer, as a grammar that its tokens follow."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from peer.ipc.grammar_messages import ANY_OBJECT, SCHEMA_CHARS_MAX, Grammar
from swarm.gateway.errors import ApiError

_PARAM: Final = "response_format"
FLAT: Final = "text.format"
"""The same of a response, where the schema stands beside its type."""
_TYPES: Final = ("text", "json_object", "json_schema")
_FIELDS: Final = ("name", "description", "schema", "strict")


def read_format(given: dict[str, Any] | None, param: str = _PARAM) -> Grammar | None:
    """Return the grammar that an answer must follow; None for any text. What a schema may have is known once it is
    compiled: then an answer is refused. An answer follows its schema also where `strict` is false. `param`: its name in
    the request, for errors. Raises ApiError."""
    kind = "text" if not given else given.get("type")
    if kind not in _TYPES:
        raise _wrong(f"{param}.type is {str(kind)[:40]!r}: choose one of {', '.join(_TYPES)}", param)
    if given is None or kind == "text":
        return None
    if kind == "json_object":
        return ANY_OBJECT
    described = given.get("json_schema")
    place = param if param == FLAT else f"{param}.json_schema"
    if not isinstance(described, dict) or not isinstance(described.get("name"), str):
        raise _wrong(f"{place} is no object with a name: send the name and the schema", param)
    for name in described:
        if name not in _FIELDS:
            raise _wrong(f"{place}.{name[:40]} is not known: send only {', '.join(_FIELDS)}", param)
    return schema_grammar(described.get("schema"), param=param)


def schema_grammar(schema: Any, prefix: str = "", suffix: str = "", param: str = _PARAM) -> Grammar:
    """Return the grammar of JSON that a schema describes, between two fixed texts; None is any object. `param`: of the
    request that brings the schema, for errors. Raises ApiError for what is no schema, or too long."""
    if schema is None:
        return Grammar(ANY_OBJECT.schema, prefix, suffix)
    if not isinstance(schema, dict):
        raise _wrong("the schema is no JSON object: send one", param)
    text = msgspec.json.encode(schema).decode()
    if len(text) > SCHEMA_CHARS_MAX:
        raise _wrong(f"the schema has {len(text)} characters, more than {SCHEMA_CHARS_MAX}: send a shorter one", param)
    return Grammar(text, prefix, suffix)


def _wrong(message: str, param: str) -> ApiError:
    return ApiError(400, message, code="invalid_value", param=param)
