"""Every number of what others sign has two bounds. Reflection finds the fields, so that a new one is tested as well."""

from __future__ import annotations

import math
import types
import typing
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from optim.config import (
    AllReduceConfig,
    CodecConfig,
    DemoConfig,
    DilocoConfig,
    EagerConfig,
    GossipConfig,
    LionConfig,
    OuterConfig,
    SparseLocoConfig,
    StreamingConfig,
)
from peer.checkpoint.checkpoint_file import CheckpointManifest
from peer.config import AdapterConfig, DataConfig, InnerConfig, ModelConfig, RopeScaling
from peer.errors import ProtocolViolation
from peer.identity import Identity, sign_body
from peer.model.text.rules import Generation, TextRules
from swarm.run.features import message_features
from swarm.run.manifest import FrozenBase, Manifest, ServedAdapter, ServedModelManifest, open_any_manifest
from swarm.run.sections import PipelineConfig, RunRules
from tests.swarm.run.test_manifest import make_manifest
from tests.swarm.run.test_served_model import served_model

AUTHORITY = Identity.generate()
SCALING = RopeScaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_seq_len=32)
YARN = RopeScaling(kind="yarn", factor=8.0, original_max_seq_len=32, attention_factor=1.0)
MODEL = ModelConfig(
    hidden_size=32,
    layers=1,
    heads=2,
    kv_heads=1,
    intermediate_size=64,
    max_seq_len=64,
    head_dim=16,
    rope_scaling=SCALING,
)
METHODS = (
    DilocoConfig(steps=10, schedule="quadratic", alpha=0.1),
    StreamingConfig(steps=10),
    EagerConfig(steps=10),
    DemoConfig(),
    SparseLocoConfig(steps=10),
    LionConfig(),
    AllReduceConfig(batch=8),
    GossipConfig(steps=10),
)
SECTIONS: list[msgspec.Struct] = [
    RunRules(name="x"),
    MODEL,
    SCALING,
    YARN,
    DataConfig(seq_len=64),
    InnerConfig(lr=1e-3, batch_size=4, total_steps=100),
    CodecConfig(),
    PipelineConfig(),
    TextRules(),
    Generation(),
    ServedAdapter(name="a", adapter=AdapterConfig(), root=bytes(32)),
    AdapterConfig(),
    FrozenBase(cuts=((0, 2),), checkpoint=(bytes(32),)),
    *METHODS,
]
FLOATS = (math.nan, math.inf, -math.inf, 1e308, -1e308)
INTEGERS = (1 << 62, -(1 << 63), -(1 << 31), (1 << 63) - 1, (1 << 64) - 1)
FREE = {("seed", 1 << 62), ("seed", (1 << 63) - 1)}  # of 63 bits, and only ever hashed


def numbers(kind: object) -> set[type]:
    """Return which of int and float a field of this type may hold, also inside tuples and unions."""
    if kind in (int, float):
        return {typing.cast("type", kind)}
    if typing.get_origin(kind) in (tuple, typing.Union, types.UnionType):
        return set().union(*(numbers(inner) for inner in typing.get_args(kind)))
    return set()


def numeric(struct: msgspec.Struct) -> Iterator[tuple[str, bool]]:
    """Yield the numeric fields of a struct, and whether each may be a float."""
    hints = typing.get_type_hints(type(struct))
    for field in msgspec.structs.fields(struct):
        if found := numbers(hints[field.name]):
            yield field.name, float in found


def test_every_section_of_a_manifest_is_walked() -> None:
    tested = {type(section) for section in SECTIONS}
    for manifest in (Manifest, ServedModelManifest):
        for kind in typing.get_type_hints(manifest).values():
            wanted = typing.get_args(kind) or (kind,)
            structs = [one for one in wanted if isinstance(one, type) and issubclass(one, msgspec.Struct)]
            assert tested.issuperset(structs)
    assert tested.issuperset(typing.get_args(OuterConfig))


@pytest.mark.parametrize("section", SECTIONS, ids=lambda section: type(section).__name__)
def test_a_number_out_of_all_proportion_is_refused(section: msgspec.Struct) -> None:
    content = msgspec.to_builtins(section)
    assert msgspec.convert(content, type(section)) == section
    accepted = []
    for name, is_float in numeric(section):
        for bad in FLOATS if is_float else INTEGERS:
            value = content[name]
            changed = {**content, name: [bad, *value[1:]] if isinstance(value, list | tuple) else bad}
            try:
                msgspec.convert(changed, type(section))
            except msgspec.ValidationError:
                continue
            if (name, bad) not in FREE:
                accepted.append((name, bad))
    assert not accepted


@pytest.mark.parametrize("outer", METHODS, ids=lambda outer: type(outer).__name__)
def test_a_sound_manifest_of_every_method_opens(outer: Any) -> None:
    needs = message_features(outer, CodecConfig())
    manifest = make_manifest(AUTHORITY.peer_id, model=MODEL, outer=outer, requires=needs)
    assert open_any_manifest(sign_body(AUTHORITY, "manifest", manifest)) == manifest


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("inner", "lr"), math.nan),
        (("inner", "lr"), math.inf),
        (("inner", "weight_decay"), math.nan),
        (("inner", "clip_norm"), math.inf),
        (("inner", "batch_size"), 1 << 31),
        (("inner", "batch_size"), 1 << 60),
        (("model", "norm_eps"), math.nan),
        (("model", "rope_theta"), math.inf),
        (("model", "max_seq_len"), 1 << 31),
        (("data", "max_bytes"), 1 << 62),
        (("run", "rounds"), 1 << 62),
        (("run", "name"), "a\x1b[2J"),
        (("run", "name"), "a\u202eb"),
        (("tokenizer",), "\x1b" * 64),
        (("tokenizer",), "A" * 64),
        (("tokenizer",), "/etc/passwd"),
        (("created_at",), -1),
        (("created_at",), 1 << 62),
    ],
)
def test_a_signed_manifest_of_implausible_values_is_refused(path: tuple[str, ...], value: object) -> None:
    for manifest in (make_manifest(AUTHORITY.peer_id), served_model(authority=AUTHORITY.peer_id)):
        content = msgspec.to_builtins(manifest, builtin_types=(bytes,))
        if path[0] not in content:
            continue
        section = content if len(path) == 1 else content[path[0]]
        section[path[-1]] = value
        with pytest.raises(ProtocolViolation, match=path[-1]):
            open_any_manifest(sign_body(AUTHORITY, "manifest", content))


def test_the_numbers_of_a_checkpoint_have_bounds() -> None:
    sound = {"run_id": "x", "round": 1, "head": b"", "layout": {}, "numel": 1, "vectors": [], "shards": []}
    sound["tree"] = {"chunk_size": 1, "size_bytes": 1, "hashes": []}
    assert msgspec.convert(sound, CheckpointManifest).round == 1
    for name in ("round", "numel"):
        for bad in INTEGERS:
            with pytest.raises(msgspec.ValidationError):
                msgspec.convert({**sound, name: bad}, CheckpointManifest)
