"""Mutated messages of every type: decoding takes or refuses them, and no number that is none gets through."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest

from peer.decoding import MALFORMED
from tests.fuzz.support.guard import MUTATIONS, Trial, chance_for, no_growth
from tests.fuzz.support.instances import Instances
from tests.fuzz.support.mutations import of_msgpack
from tests.fuzz.support.wire_types import wire_types, worker_types

VALID = 12  # instances that are mutated
CHECKED_WHOLE = {"Manifest", "ServedModelManifest"}  # random values never fit together: see test_manifests.py


def kinds() -> dict[str, Any]:
    return {name: kind for name, kind in {**wire_types(), **worker_types()}.items() if name not in CHECKED_WHOLE}


def infinite(value: Any) -> bool:
    """Whether a float inside a decoded value is NaN or infinite."""
    if isinstance(value, float):
        return not math.isfinite(value)
    if isinstance(value, dict):
        return any(infinite(part) for part in (*value, *value.values()))
    if isinstance(value, list | tuple | set | frozenset):
        return any(map(infinite, value))
    return False


@pytest.mark.parametrize("count", MUTATIONS)
@pytest.mark.parametrize("name", sorted(kinds()))
def test_decoding(name: str, count: int) -> None:
    kind, chance = kinds()[name], chance_for(name)
    valid = [Instances(chance).encoded(kind) for _ in range(VALID)]
    for encoded in valid:
        msgspec.msgpack.decode(encoded, type=kind)
    decoder = msgspec.msgpack.Decoder(kind)
    trial = Trial(name, MALFORMED)

    def decode(data: bytes) -> None:
        value = decoder.decode(data)
        if name in worker_types():
            return
        assert not infinite(msgspec.to_builtins(value, builtin_types=(bytes, msgspec.Raw))), value

    with no_growth():
        for number in range(count):
            trial.run(number, of_msgpack(chance, chance.choice(valid), chance.choice(valid)), decode)
    assert trial.refused
