"""Every field of every message has bounds: of its value if it is a number, of its size otherwise."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from msgspec import inspect

from tests.fuzz.support.wire_types import MINOR_METHODS, methods, wire_types, worker_types

CHECKED_WHOLE = {"peer.config", "optim.config", "swarm.run.sections", "swarm.run.manifest"}
"""Sections of a manifest check their fields together, in `__post_init__`: test_manifests.py holds these bounds."""
NAN_HAS_A_MEANING = {"InnerResult.loss", "WorkerEvent.fields"}
"""A worker's own figures, which go to no other peer: no step was made, an event tells of a NaN."""
ANY_OF_64_BITS = {"Sampling.seed"}
"""msgspec takes no bound beyond 63 bits, and reads no number beyond 64."""


def unbounded(info: inspect.Type, path: str, seen: frozenset[Any] = frozenset()) -> Iterator[str]:
    """Yield the path of each field below `path` that lacks a bound."""
    match info:
        case inspect.StructType() | inspect.NamedTupleType():
            if info.cls in seen or info.cls.__module__ in CHECKED_WHOLE:
                return
            for field in info.fields:
                yield from unbounded(field.type, f"{info.cls.__name__}.{field.name}", seen | {info.cls})
        case inspect.IntType() | inspect.FloatType():
            if (info.ge is None and info.gt is None) or (info.le is None and info.lt is None):
                yield path
        case inspect.StrType() | inspect.BytesType():
            if info.max_length is None:
                yield path
        case inspect.DictType():
            if info.max_length is None:
                yield path
            yield from unbounded(info.key_type, path, seen)
            yield from unbounded(info.value_type, path, seen)
        case inspect.ListType() | inspect.VarTupleType() | inspect.SetType() | inspect.FrozenSetType():
            if info.max_length is None:
                yield path
            yield from unbounded(info.item_type, path, seen)
        case inspect.TupleType():
            for item in info.item_types:
                yield from unbounded(item, path, seen)
        case inspect.UnionType():
            for item in info.types:
                yield from unbounded(item, path, seen)
        case inspect.RawType() | inspect.LiteralType() | inspect.BoolType() | inspect.NoneType():
            return
        case _:
            yield path


@pytest.mark.parametrize("name", sorted({**wire_types(), **worker_types()}))
def test_every_field_has_bounds(name: str) -> None:
    kind = {**wire_types(), **worker_types()}[name]
    assert not set(unbounded(inspect.type_info(kind), name)) - NAN_HAS_A_MEANING - ANY_OF_64_BITS


def test_all_methods_are_found() -> None:
    assert len(methods()) >= MINOR_METHODS
    assert {"net/hello", "pipeline.forward", "state.chunk", "dht/store"} <= set(methods())


def test_a_missing_bound_is_found() -> None:
    import msgspec

    class Loose(msgspec.Struct):
        numbers: list[float]

    assert set(unbounded(inspect.type_info(Loose), "")) == {"Loose.numbers"}
