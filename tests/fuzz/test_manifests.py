"""Mutated manifests, signed by a hostile authority: no number without bounds, no error but ours."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from optim.config import METHODS, CodecConfig
from peer.config import RopeScaling
from peer.errors import BarnraiseError
from peer.identity import Identity
from swarm.run.features import message_features, model_features
from swarm.run.manifest import AnyManifest, ServedModelManifest, open_any_manifest
from swarm.run.sections import RunRules
from tests.fuzz.support.guard import MUTATIONS, Trial, chance_for, no_growth
from tests.fuzz.support.mutations import of_msgpack
from tests.fuzz.support.resign import resigned
from tests.swarm.run.test_manifest import make_manifest

AUTHORITY = Identity(bytes(32))
FREE = {"created_at"}  # shown, never computed with


def manifests() -> list[AnyManifest]:
    """Return a manifest of each method, one with every optional section, and one of a served model."""
    found: list[AnyManifest] = []
    for name, method in METHODS.items():
        needed = {"batch": 4} if name == "allreduce" else {"steps": 4}
        outer = method(**needed)
        features = message_features(outer, CodecConfig())
        found.append(make_manifest(AUTHORITY.peer_id, outer=outer, run=RunRules(name=name), requires=features))
    whole = make_manifest(AUTHORITY.peer_id)
    rope = RopeScaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_seq_len=16)
    found.append(msgspec.structs.replace(whole, model=msgspec.structs.replace(whole.model, rope_scaling=rope)))
    yarn = RopeScaling(kind="yarn", factor=8.0, original_max_seq_len=16, attention_factor=1.0)
    stretched = msgspec.structs.replace(whole.model, rope_scaling=yarn)
    found.append(msgspec.structs.replace(whole, model=stretched, requires=model_features(stretched)))
    found.append(
        ServedModelManifest(
            protocol=whole.protocol,
            authority=whole.authority,
            created_at=1,
            model=whole.model,
            tokenizer="bytes",
            name="served",
            cuts=whole.cuts,
            checkpoint=(bytes(32),),
        )
    )
    return found


@pytest.mark.parametrize("count", MUTATIONS)
def test_mutated_manifests(count: int) -> None:
    chance, valid = chance_for("manifests"), [msgspec.msgpack.encode(manifest) for manifest in manifests()]
    for body in valid:
        open_any_manifest(resigned(AUTHORITY, "manifest", body))
    trial = Trial("manifests", (BarnraiseError,))

    def work(body: bytes) -> None:
        manifest = open_any_manifest(resigned(AUTHORITY, "manifest", body))
        manifest.run_id, manifest.name

    with no_growth():
        for number in range(count):
            trial.run(number, of_msgpack(chance, chance.choice(valid), chance.choice(valid)), work)
    assert trial.refused


def numbers(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of each number inside a plain value."""
    if isinstance(value, dict | list):
        for key, part in value.items() if isinstance(value, dict) else enumerate(value):
            yield from numbers(part, (*path, key))
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield path


def with_at(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    if not path:
        return new
    changed = dict(value) if isinstance(value, dict) else list(value)
    changed[path[0]] = with_at(value[path[0]], path[1:], new)
    return changed


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf, 1e300, (1 << 63) - 1, -(1 << 63)])
def test_every_number_of_a_manifest_has_two_bounds(number: float) -> None:
    taken = set()
    for manifest in manifests():
        plain = msgspec.msgpack.decode(msgspec.msgpack.encode(manifest))
        for path in numbers(plain):
            if path[-1] in FREE:
                continue
            body = msgspec.msgpack.encode(with_at(plain, path, number))
            try:
                open_any_manifest(resigned(AUTHORITY, "manifest", body))
            except BarnraiseError:
                continue
            taken.add(".".join(map(str, path)))
    assert taken <= ({"run.seed"} if number == (1 << 63) - 1 else set())
