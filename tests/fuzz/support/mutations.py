"""Mutations of valid bytes: of the bytes themselves, and of the values that msgpack or JSON hold."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

DEEP = 200_000
SIZE_MAX = 4 << 20  # of a mutation: above what any reader takes
NUMBERS = (-1, 0, 1, 127, 255, 256, 1 << 20, 1 << 31, 1 << 32, 1 << 53, (1 << 53) + 1, (1 << 63) - 1, -(1 << 63))
FLOATS = (float("nan"), float("inf"), float("-inf"), 1e308, -1e308, 5e-324, -0.0, 1.5)
HUGE = tuple(kind + b"\xff" * 4 for kind in (b"\xdb", b"\xc6", b"\xdd", b"\xdf"))
"""The beginnings of strings, arrays and maps that declare 4 GiB."""


def flip(chance: random.Random, data: bytes) -> bytes:
    """Change one to eight bits."""
    changed = bytearray(data)
    for _ in range(chance.randint(1, 8) if changed else 0):
        changed[chance.randrange(len(changed))] ^= 1 << chance.randrange(8)
    return bytes(changed)


def cut(chance: random.Random, data: bytes) -> bytes:
    """Leave out the end."""
    return data[: chance.randrange(len(data) + 1)]


def insert(chance: random.Random, data: bytes) -> bytes:
    """Insert some bytes, or repeat a part."""
    at = chance.randrange(len(data) + 1)
    piece = chance.choice([chance.randbytes(chance.randint(1, 9)), data[at : at + 64] * chance.randint(1, 30)])
    return data[:at] + piece + data[at:]


def declare(chance: random.Random, data: bytes) -> bytes:
    """Declare a huge length somewhere."""
    at = chance.randrange(len(data) + 1)
    return data[:at] + chance.choice(HUGE) + data[at + chance.randint(0, 2) :]


def splice(chance: random.Random, data: bytes, other: bytes) -> bytes:
    """Join the beginning of one with the end of another."""
    return data[: chance.randrange(len(data) + 1)] + other[chance.randrange(len(other) + 1) :]


BYTES: Sequence[Callable[[random.Random, bytes], bytes]] = (flip, cut, insert, declare)


def of_bytes(chance: random.Random, data: bytes, other: bytes) -> bytes:
    """Return one mutation of bytes of any format."""
    if chance.random() < 0.2:
        return splice(chance, data, other)
    return chance.choice(BYTES)(chance, data)


def of_msgpack(chance: random.Random, data: bytes, other: bytes) -> bytes:
    """Return one mutation of a msgpack value: of its bytes, or of one to three of the values inside."""
    if chance.random() < 0.35:
        return of_bytes(chance, data, other)
    try:
        value = msgspec.msgpack.decode(data)
        for _ in range(chance.randint(1, 3)):
            value = replaced(chance, value, evil_msgpack)
        return msgspec.msgpack.encode(value)[:SIZE_MAX]
    except (msgspec.MsgspecError, UnicodeDecodeError, TypeError, OverflowError):  # a key that cannot be one
        return of_bytes(chance, data, other)


def of_json(chance: random.Random, data: bytes, other: bytes) -> bytes:
    """Return one mutation of a JSON text."""
    if chance.random() < 0.35:
        return of_bytes(chance, data, other)
    try:
        value = json.loads(data)
        for _ in range(chance.randint(1, 3)):
            value = replaced(chance, value, evil_json)
        text = json.dumps(value).encode()[:SIZE_MAX]
        return text.replace(f'"{_NESTED}"'.encode(), b"[" * DEEP)[:SIZE_MAX]
    except ValueError:
        return of_bytes(chance, data, other)


def replaced(chance: random.Random, value: Any, evil: Callable[[random.Random, Any], Any]) -> Any:
    """Return `value` with something inside it changed."""
    if isinstance(value, dict) and value and chance.random() < 0.85:
        key = chance.choice(list(value))
        match chance.randrange(12):
            case 0:
                return {k: v for k, v in value.items() if k != key}
            case 1:
                return {**value, "unknown": evil(chance, None)}
            case _:
                return {**value, key: replaced(chance, value[key], evil)}
    if isinstance(value, list) and value and chance.random() < 0.85:
        at = chance.randrange(len(value))
        match chance.randrange(12):
            case 0:
                return value[:at] + value[at + 1 :]
            case 1:
                return value[:at] + [value[at]] * chance.choice([2, 70, 5000]) + value[at + 1 :]
            case 2:
                return value[::-1]
            case _:
                return [*value[:at], replaced(chance, value[at], evil), *value[at + 1 :]]
    return evil(chance, value)


def evil_msgpack(chance: random.Random, value: Any) -> Any:
    """Return another value, often near to the one that was there."""
    if chance.random() < 0.02:
        return msgspec.Raw(chance.choice([b"\x91", b"\x81\x01"]) * DEEP + b"\xc0")
    if isinstance(value, bytes) and chance.random() < 0.4:
        return of_bytes(chance, value, value)
    if isinstance(value, str) and chance.random() < 0.2:
        return value.encode()
    if isinstance(value, bytes) and chance.random() < 0.2:
        return value.decode("latin-1")
    return _evil(chance, value, [1 << 63, (1 << 64) - 1, chance.randbytes(32), bytes(70_000)])


_NESTED = "nested without end"


def evil_json(chance: random.Random, value: Any) -> Any:
    """As `evil_msgpack`, for values that JSON has."""
    return _evil(chance, value, [10**40, _NESTED, "\ud800", "\x1b]52;c;AAAA\x07"])


def _evil(chance: random.Random, value: Any, more: list[Any]) -> Any:
    if isinstance(value, int) and not isinstance(value, bool) and chance.random() < 0.4:
        near = value + chance.choice([-1, 1, -256, 1 << 20])
        return near if -(1 << 63) <= near < 1 << 63 else float(value)
    if isinstance(value, float) and chance.random() < 0.5:
        return chance.choice(FLOATS)
    anything = [None, True, "", "x" * 70_000, "..", "/etc/passwd", [], {}, [[]], {"": {}}, *more]
    return chance.choice([chance.choice(NUMBERS), chance.choice(FLOATS), chance.choice(anything)])
