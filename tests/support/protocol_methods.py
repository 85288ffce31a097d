"""Every method of the protocol, found in the source, and messages made up for them."""

from __future__ import annotations

import ast
import importlib
import random
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, Final

import msgspec
from msgspec import inspect

from peer.net.method import Method

REPOSITORY: Final = Path(__file__).parents[2]
PAYLOAD_MAX: Final = 64 << 20


@cache
def all_methods() -> tuple[Method[Any, Any], ...]:
    """Return each `Method(...)` that the source makes, wherever it does, with payloads of up to 64 MiB."""
    found: dict[str, Method[Any, Any]] = {}
    for package in ("peer", "dht", "swarm"):
        for path in sorted((REPOSITORY / package).rglob("*.py")):
            source = path.read_text()
            if "Method(" not in source:
                continue
            for node in ast.walk(ast.parse(source)):
                if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Method"):
                    continue
                name, request, reply = (ast.unparse(argument) for argument in node.args[:3])
                module = vars(importlib.import_module(".".join(path.relative_to(REPOSITORY).with_suffix("").parts)))
                access: Any = next((k.value.value for k in node.keywords if k.arg == "access"), "member")  # type: ignore[attr-defined]
                text = ast.literal_eval(name)
                found[text] = Method(text, module[request], module[reply], PAYLOAD_MAX, PAYLOAD_MAX, access)
    return tuple(found.values())


def made_up(type_: Any, known: Mapping[str, Any], *, zero: bool = False) -> Any:
    """Return a message of that type: fields that are `known` by name where they fit, else zeros or small values."""
    plain = _value(_described(type_), known, zero)
    return msgspec.convert(plain, type_, builtin_types=(bytes,))


def garbage() -> Any:
    """Return something that is no message."""
    return random.choice(
        [None, -1, 1 << 63, float("nan"), "\x1b]0;x\x07", random.randbytes(200), [[]] * 50, {"": {"a": [0]}}]
    )


@cache  # msgspec reads the annotations of a type anew each time, which takes milliseconds
def _described(type_: Any) -> inspect.Type:
    return inspect.type_info(type_)


@cache
def _types_of_fields(cls: type) -> dict[str, Any]:
    return {field.name: field.type for field in msgspec.structs.fields(cls)}


def _value(info: inspect.Type, known: Mapping[str, Any], zero: bool) -> Any:
    match info:
        case inspect.StructType(cls=cls, fields=fields, array_like=array_like):
            values = {}
            for field in fields:
                value = known.get(field.encode_name, inspect)  # any object that is no value
                if value is inspect or not _fits(value, cls, field.name):
                    value = _value(field.type, known, zero)
                values[field.encode_name] = value
            return list(values.values()) if array_like else values
        case inspect.UnionType(types=types):
            return None if any(isinstance(t, inspect.NoneType) for t in types) else _value(types[0], known, zero)
        case inspect.IntType(ge=ge):
            return max(0 if zero else 1, ge or 0)
        case inspect.FloatType():
            return 0.0 if zero else 0.5
        case inspect.BoolType():
            return not zero
        case inspect.StrType(max_length=longest):
            return "" if zero or longest == 0 else "x"
        case inspect.BytesType(min_length=least, max_length=longest):
            return bytes(least or (0 if zero else min(32, longest if longest is not None else 32)))
        case inspect.LiteralType(values=values):
            return values[0]
        case inspect.TupleType(item_types=items):
            return [_value(item, known, zero) for item in items]
        case inspect.DictType():
            return {}
        case inspect.NoneType() | inspect.AnyType() | inspect.RawType():
            return None
        case _:  # lists, sets, tuples of any length
            members: Any = info
            return [_value(members.item_type, known, zero)] * (getattr(info, "min_length", None) or 0)


def _fits(value: Any, cls: type, field: str) -> bool:
    try:
        msgspec.convert(value, _types_of_fields(cls)[field], builtin_types=(bytes,))
    except (msgspec.ValidationError, ValueError):
        return False
    return True
