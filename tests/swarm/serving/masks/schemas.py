"""Schemas of the kinds that the JSON-Schema test suite has, as far as grammars support them."""

from __future__ import annotations

from typing import Any, Final

_NODE: Final = {
    "type": "object",
    "properties": {"v": {"type": "boolean"}, "next": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/node"}]}},
    "required": ["v", "next"],
    "additionalProperties": False,
}


def closed(required: bool = True, **properties: Any) -> dict[str, Any]:
    """Return an object of these properties and no others."""
    names = list(properties) if required else []
    return {"type": "object", "properties": properties, "required": names, "additionalProperties": False}


SCHEMAS: Final[dict[str, dict[str, Any]]] = {
    "null": {"type": "null"},
    "boolean": {"type": "boolean"},
    "integer": {"type": "integer", "minimum": -50, "maximum": 50},
    "exclusive bounds": {"type": "integer", "exclusiveMinimum": 3, "exclusiveMaximum": 6},
    "number": {"type": "number", "minimum": 0.5, "maximum": 2.25},
    "multiple": {"type": "integer", "multipleOf": 7, "minimum": 0, "maximum": 100},
    "short string": {"type": "string", "maxLength": 5},
    "long string": {"type": "string", "minLength": 3, "maxLength": 4},
    "several types": {"type": ["boolean", "null"]},
    "enum": {"enum": ["red", "green", 3, None, [1, 2], {"a": 1}]},
    "const": {"const": {"deep": [True, 'é"\\']}},
    "pattern": {"type": "string", "pattern": "^[a-f]{2,4}-[0-9]{2}$"},
    "pattern anywhere": {"type": "string", "pattern": "b+c", "maxLength": 8},
    "alternatives in a pattern": {"type": "string", "pattern": "^(cat|dog|ca(mel|r))s?$"},
    "date": {"type": "string", "format": "date"},
    "uuid": {"type": "string", "format": "uuid"},
    "ipv4": {"type": "string", "format": "ipv4"},
    "closed object": closed(a={"type": "integer", "minimum": 0, "maximum": 9}, b={"type": "boolean"}),
    "optional properties": closed(False, a={"type": "null"}, b={"type": "boolean"}, c={"const": 1}),
    "required": {**closed(False, a={"type": "null"}, b={"type": "boolean"}), "required": ["b"]},
    "additional properties": {
        "type": "object",
        "properties": {"a": {"const": 1}},
        "required": ["a"],
        "additionalProperties": {"type": "boolean"},
        "maxProperties": 2,
    },
    "items": {"type": "array", "items": {"enum": [1, 2]}, "minItems": 2, "maxItems": 3},
    "prefix items": {
        "type": "array",
        "prefixItems": [{"type": "boolean"}, {"const": "x"}],
        "items": False,
        "minItems": 2,
    },
    "any of": {"anyOf": [{"type": "boolean"}, closed(k={"enum": ["p", "q"]})]},
    "one of": {"oneOf": [{"type": "null"}, {"enum": ["x", "y"]}]},
    "all of": {
        "allOf": [
            closed(False, a={"type": "integer", "minimum": 3}, b={"type": "boolean"}),
            {"required": ["a", "b"], "properties": {"a": {"maximum": 5}}},
        ]
    },
    "reference": {
        "$defs": {"colour": {"enum": ["red", "blue"]}},
        **closed(one={"$ref": "#/$defs/colour"}, two={"$ref": "#/$defs/colour"}),
    },
    "recursion": {"$defs": {"node": _NODE}, "$ref": "#/$defs/node"},
    "nested": closed(
        list={"type": "array", "items": closed(id={"type": "integer", "minimum": 1, "maximum": 99}), "maxItems": 2},
        inner=closed(inner=closed(leaf={"type": "boolean"})),
    ),
    "letters beyond ASCII": {"enum": ["größe", "日本", "\U0001f600"]},
    "any object": {"type": "object"},
}
