"""Random valid values of any message type, as plain objects that msgpack encodes."""

from __future__ import annotations

import random
from collections.abc import Mapping
from functools import cache
from typing import Any

import msgspec
from msgspec import inspect

LENGTHS = (0, 1, 1, 2, 3)
WORDS = ("", "a", "run", "here", "peer-1", "/ip4/127.0.0.1/tcp/1", "é\u202e\x1b[2J")
TRIES = 1000


@cache
def described(kind: Any) -> inspect.Type:
    """Return msgspec's description of a type, which takes it milliseconds."""
    return inspect.type_info(kind)


class Instances:
    """Makes values from `chance`. `pool` maps a struct's name to plain values that a test wants it to have."""

    def __init__(self, chance: random.Random, pool: Mapping[str, list[Any]] | None = None) -> None:
        self._chance = chance
        self._pool = pool or {}

    def encoded(self, kind: Any) -> bytes:
        """Return the msgpack of a valid value of `kind`; structs may check more than their types say."""
        for _ in range(TRIES):
            encoded = msgspec.msgpack.encode(self.plain(described(kind)))
            try:
                msgspec.msgpack.decode(encoded, type=kind)
            except msgspec.ValidationError:
                continue
            return encoded
        return encoded

    def plain(self, info: inspect.Type) -> Any:
        """Return a plain object that fits a type's description."""
        chance = self._chance
        match info:
            case inspect.UnionType():
                return self.plain(chance.choice(info.types))
            case inspect.StructType() if info.cls.__name__ in self._pool and chance.random() < 0.8:
                return chance.choice(self._pool[info.cls.__name__])
            case inspect.StructType():
                return self._struct(info)
            case inspect.LiteralType():
                return chance.choice(info.values)
            case inspect.IntType():
                low = info.ge if info.ge is not None else -3 if info.gt is None else info.gt + 1
                high = info.le if info.le is not None else low + 100 if info.lt is None else info.lt - 1
                known = [value for value in self._pool.get("int", []) if low <= value <= high]
                if known and chance.random() < 0.7:
                    return chance.choice(known)
                return chance.choice([low, high, chance.randint(low, min(high, low + 8))])
            case inspect.FloatType():
                least = info.ge if info.ge is not None else 0.0 if info.gt is None else info.gt + 1e-3
                most = info.le if info.le is not None else least + 10.0 if info.lt is None else info.lt * 0.999
                return chance.choice([float(least), float(most), min(most, least + chance.random())])
            case inspect.BoolType():
                return chance.random() < 0.5
            case inspect.NoneType():
                return None
            case inspect.StrType():
                known = self._pool.get("str", [])
                return str(chance.choice(known if known and chance.random() < 0.75 else WORDS))[: info.max_length]
            case inspect.BytesType():
                least = info.min_length or 0
                known = [value for value in self._pool.get("bytes", []) if len(value) >= least]
                if known and chance.random() < 0.7:
                    return chance.choice(known)
                most = least + 64 if info.max_length is None else min(info.max_length, least + 64)
                return chance.randbytes(chance.choice([least, most, chance.randint(least, most)]))
            case inspect.TupleType():
                return [self.plain(item) for item in info.item_types]
            case inspect.NamedTupleType():
                return [self.plain(field.type) for field in info.fields]
            case inspect.DictType():
                pairs = range(self._length(info))
                return {self.plain(info.key_type): self.plain(info.value_type) for _ in pairs}
            case inspect.ListType() | inspect.VarTupleType() | inspect.SetType() | inspect.FrozenSetType():
                return [self.plain(info.item_type) for _ in range(self._length(info))]
            case inspect.RawType() | inspect.AnyType():
                return chance.choice([None, 1, "text", [], {}])
        raise AssertionError(f"no values are known of {info}")

    def _length(self, info: Any) -> int:
        low = info.min_length or 0
        return min(low + self._chance.choice(LENGTHS), low + 3 if info.max_length is None else info.max_length)

    def _struct(self, info: inspect.StructType) -> Any:
        values = {
            field.encode_name: self.plain(field.type)
            for field in info.fields
            if field.required or self._chance.random() < 0.7 or info.array_like
        }
        if info.array_like:
            return [*([] if info.tag is None else [info.tag]), *values.values()]
        return values if info.tag_field is None else {info.tag_field: info.tag, **values}
