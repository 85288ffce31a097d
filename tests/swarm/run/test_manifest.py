"""The manifest of a training run: its signature, its name, and what is refused."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from optim.config import AllReduceConfig, CodecConfig, DilocoConfig, StreamingConfig
from peer.config import DataConfig, InnerConfig, ModelConfig
from peer.errors import NotAdmitted, ProtocolViolation
from peer.identity import Identity, Signed, sign_body
from swarm.protocol.plan import RANGES_MAX
from swarm.run.manifest import PROTOCOL_VERSION, Manifest, open_manifest, sign_manifest
from swarm.run.sections import PipelineConfig, RunRules


def make_manifest(authority: str, **changes: object) -> Manifest:
    manifest = Manifest(
        protocol=PROTOCOL_VERSION,
        authority=authority,
        created_at=1_700_000_000,
        run=RunRules(name="test", open=True),
        model=ModelConfig(hidden_size=32, layers=1, heads=2, kv_heads=1, intermediate_size=64, max_seq_len=64),
        tokenizer="bytes",
        data=DataConfig(seq_len=64),
        inner=InnerConfig(lr=1e-3, batch_size=4, total_steps=100),
        outer=DilocoConfig(steps=10),
        codec=CodecConfig(),
        pipeline=PipelineConfig(),
        cuts=((0, 1),),
        genesis=(bytes(32),),
    )
    return msgspec.structs.replace(manifest, **changes)


@pytest.fixture(scope="module")
def authority() -> Identity:
    return Identity.generate()


def test_signed_manifest_opens_to_the_same_content(authority: Identity) -> None:
    manifest = make_manifest(authority.peer_id)
    assert open_manifest(sign_manifest(authority, manifest), manifest.run_id) == manifest


def test_run_id_is_32_characters_and_depends_on_every_rule(authority: Identity) -> None:
    manifest = make_manifest(authority.peer_id)
    others = [
        make_manifest(authority.peer_id, created_at=1),
        make_manifest(authority.peer_id, genesis=(b"\1" * 32,)),
        make_manifest(authority.peer_id, outer=DilocoConfig(steps=11)),
        make_manifest(authority.peer_id, codec=CodecConfig(down="fp16")),
        make_manifest(Identity.generate().peer_id),
    ]
    assert len(manifest.run_id) == 32 and manifest.run_id.isalnum()
    assert len({manifest.run_id, *(other.run_id for other in others)}) == 6


def test_only_the_named_authority_can_sign(authority: Identity) -> None:
    stranger = Identity.generate()
    manifest = make_manifest(authority.peer_id)
    with pytest.raises(ValueError, match="another authority"):
        sign_manifest(stranger, manifest)
    with pytest.raises(ProtocolViolation, match=f"not by {authority.peer_id}"):
        open_manifest(sign_body(stranger, "manifest", manifest))


def test_a_flipped_byte_is_a_forgery(authority: Identity) -> None:
    signed = sign_manifest(authority, make_manifest(authority.peer_id))
    body = signed.body.replace(b"test", b"tesu")
    with pytest.raises(ProtocolViolation, match="signature"):
        open_manifest(Signed(body, signed.signer, signed.signature))


def test_a_manifest_of_another_run_is_refused(authority: Identity) -> None:
    signed = sign_manifest(authority, make_manifest(authority.peer_id))
    with pytest.raises(NotAdmitted, match="is of run"):
        open_manifest(signed, "a" * 32)


@pytest.mark.parametrize(
    ("version", "remedy"),
    [(PROTOCOL_VERSION + 1, "upgrade barnraise on this machine"), (7, "finish or export it with the barnraise")],
)
def test_another_protocol_version_is_refused_before_its_fields_are_read(
    authority: Identity, version: int, remedy: str
) -> None:
    class Later(msgspec.Struct):
        protocol: int
        authority: str
        something_new: str = "?"

    with pytest.raises(NotAdmitted, match=f"version {version}.*{remedy}"):
        open_manifest(sign_body(authority, "manifest", Later(version, authority.peer_id)))


def test_signed_nonsense_is_refused(authority: Identity) -> None:
    content = msgspec.msgpack.decode(msgspec.msgpack.encode(make_manifest(authority.peer_id)))
    body = msgspec.msgpack.encode({**content, "genesis": [b"short"]})
    signature = authority.sign(b"barnraise/1/manifest\0" + body)
    with pytest.raises(ProtocolViolation, match="genesis"):
        open_manifest(Signed(body, authority.peer_id, signature))


@pytest.mark.parametrize(
    ("rules", "word"),
    [
        ({"min_peers": 0}, "min_peers"),
        ({"min_peers": 5, "max_peers": 4}, "min_peers"),
        ({"max_peers": 5000}, "max_peers"),
        ({"members_per_prefix": 0}, "members_per_prefix"),
        ({"members_per_prefix": 1025}, "members_per_prefix"),
        ({"rounds": -1}, "rounds"),
        ({"timeout_floor_s": -1.0}, "timeout_floor_s"),
        ({"seed": -1}, "seed"),
        ({"compute_s_max": 0.5}, "compute_s_max"),
        ({"compute_s_max": float("nan")}, "compute_s_max"),
        ({"name": "\n"}, "name"),
    ],
)
def test_run_rules_are_checked(rules: dict[str, Any], word: str) -> None:
    with pytest.raises(ValueError, match=word):
        RunRules(**{"name": "x", **rules})


@pytest.mark.parametrize(
    ("sizes", "word"),
    [
        ({"layers": 1 << 40}, "layers is"),
        ({"vocab_size": 1 << 40}, "vocab_size is"),
        ({"vocab_size": 1 << 24, "hidden_size": 1 << 17}, "parameters"),
    ],
)
def test_a_signed_manifest_of_an_absurd_model_is_refused(authority: Identity, sizes: dict[str, int], word: str) -> None:
    content = msgspec.to_builtins(make_manifest(authority.peer_id), builtin_types=(bytes,))
    content["model"] |= sizes
    with pytest.raises(ProtocolViolation, match=word):
        open_manifest(sign_body(authority, "manifest", content))


# -- pipelines --------------------------------------------------------------------------------------------------------

MODEL = ModelConfig(
    hidden_size=32, layers=6, heads=2, kv_heads=1, intermediate_size=64, max_seq_len=64, tie_embeddings=False
)
THREE = {
    "model": MODEL,
    "pipeline": PipelineConfig(stages=3, micro_batch=2),
    "cuts": ((0, 3), (3, 5), (5, 6)),
    "genesis": (b"a" * 32, b"b" * 32, b"c" * 32),
}


def test_a_single_group_has_the_runs_id_several_have_their_own(authority: Identity) -> None:
    one = make_manifest(authority.peer_id)
    assert (one.stages, one.groups) == (1, (one.run_id,))
    assert one.first_head().state_hash == bytes(32)
    three = make_manifest(authority.peer_id, **THREE)
    assert three.stages == 3 and len({three.run_id, *three.groups}) == 4
    assert all(len(group) == 32 and group.isalnum() for group in three.groups)
    head = three.first_head(2)
    assert (head.run_id, head.round, head.state_hash) == (three.group_id(2), 0, b"c" * 32)
    assert open_manifest(sign_manifest(authority, three), three.run_id).groups == three.groups
    assert set(three.groups).isdisjoint(make_manifest(authority.peer_id, **THREE, created_at=1).groups)


def test_a_micro_batch_is_a_batch_by_default(authority: Identity) -> None:
    assert make_manifest(authority.peer_id, **THREE).micro_batch == 2
    assert make_manifest(authority.peer_id, **THREE | {"pipeline": PipelineConfig(stages=3)}).micro_batch == 4
    assert not make_manifest(authority.peer_id, **THREE).synchronous
    assert make_manifest(authority.peer_id, **THREE, outer=AllReduceConfig(batch=8)).synchronous
    assert make_manifest(authority.peer_id, **THREE, outer=AllReduceConfig(batch=2 * RANGES_MAX)).synchronous


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"cuts": ((0, 3), (3, 6))}, "cuts"),
        ({"cuts": ((0, 3), (3, 5), (4, 6))}, "cuts"),
        ({"cuts": ((0, 3), (3, 3), (3, 6))}, "cuts"),
        ({"cuts": ((0, 3), (3, 5), (5, 7))}, "cuts"),
        ({"cuts": ((1, 3), (3, 5), (5, 6))}, "cuts"),
        ({"genesis": (b"a" * 32, b"b" * 32)}, "genesis"),
        ({"genesis": (b"a" * 32, b"b" * 32, b"c")}, "genesis"),
        ({"model": msgspec.structs.replace(MODEL, shared_blocks=3)}, "stages is 3"),
        ({"model": msgspec.structs.replace(MODEL, shared_blocks=2)}, "cuts part blocks"),
        ({"model": msgspec.structs.replace(MODEL, tie_embeddings=True)}, "tie_embeddings is true"),
        ({"outer": StreamingConfig(steps=10)}, "method is 'streaming': with stages > 1"),
        ({"outer": AllReduceConfig(batch=7)}, r"micro_batch is 2: it must divide \[outer\] batch \(7\)"),
        ({"pipeline": PipelineConfig(stages=3, micro_batch=3)}, "micro_batch is 3: it must divide"),
        ({"outer": AllReduceConfig(batch=2 * (RANGES_MAX + 1))}, r"micro_batch is 2: .* 32769 of them.*; raise it"),
    ],
)
def test_a_signed_manifest_of_an_impossible_pipeline_is_refused(
    authority: Identity, changes: dict[str, object], word: str
) -> None:
    content = msgspec.to_builtins(make_manifest(authority.peer_id, **THREE), builtin_types=(bytes,))
    content |= msgspec.to_builtins(changes, builtin_types=(bytes,))
    with pytest.raises(ProtocolViolation, match=word):
        open_manifest(sign_body(authority, "manifest", content))
