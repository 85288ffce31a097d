"""The manifest: who signs it, what names it, what is refused."""

from __future__ import annotations

import msgspec
import pytest

from optim.config import CodecConfig, Diloco
from peer.config import DataConfig, InnerConfig, ModelConfig
from peer.errors import NotAdmitted, ProtocolViolation
from peer.identity import Identity, Signed, sign_body
from swarm.manifest import (
    PROTOCOL_VERSION,
    Manifest,
    PipelineConfig,
    RunRules,
    open_manifest,
    sign_manifest,
)


def make_manifest(authority: str, **changes: object) -> Manifest:
    manifest = Manifest(
        protocol=PROTOCOL_VERSION,
        authority=authority,
        created_at=1_700_000_000,
        run=RunRules(name="test"),
        model=ModelConfig(hidden_size=32, layers=1, heads=2, kv_heads=1, intermediate_size=64, max_seq_len=64),
        tokenizer="bytes",
        data=DataConfig(seq_len=64),
        inner=InnerConfig(lr=1e-3, batch_size=4, total_steps=100),
        outer=Diloco(steps=10),
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
        make_manifest(authority.peer_id, outer=Diloco(steps=11)),
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
    with pytest.raises(NotAdmitted, match="belongs to run"):
        open_manifest(signed, "a" * 32)


@pytest.mark.parametrize(("version", "who"), [(PROTOCOL_VERSION + 1, "this machine"), (0, "the other side")])
def test_another_protocol_version_is_refused_before_its_fields_are_read(
    authority: Identity, version: int, who: str
) -> None:
    class Later(msgspec.Struct):
        protocol: int
        authority: str
        something_new: str = "?"

    with pytest.raises(NotAdmitted, match=f"version {version} .*upgrade barnraise on {who}"):
        open_manifest(sign_body(authority, "manifest", Later(version, authority.peer_id)))


def test_rules_that_make_no_sense_are_refused_although_signed(authority: Identity) -> None:
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
        ({"rounds": -1}, "rounds"),
        ({"patience_s": -1.0}, "patience_s"),
        ({"seed": -1}, "seed"),
        ({"name": "\n"}, "name"),
    ],
)
def test_run_rules_are_checked(rules: dict[str, object], word: str) -> None:
    with pytest.raises(ValueError, match=word):
        RunRules(**{"name": "x", **rules})
