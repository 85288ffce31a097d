"""What a version of the software promises to those before and after it: runs of the number before, and fields of later
versions, which are kept in what is hashed and signed and have no meaning here."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from blake3 import blake3

from optim.config import CodecConfig, DilocoConfig, LionConfig
from peer.config import AdapterConfig, DataConfig, RopeScaling
from peer.errors import NotAdmitted, ProtocolViolation, RemoteError
from peer.identity import Identity, Signed, sign_body
from swarm.protocol.head import Head
from swarm.run import manifest as manifest_module
from swarm.run.agreement import schedule_of
from swarm.run.ban_list import BanList, open_bans
from swarm.run.features import features_of, inner_features, message_features, model_features
from swarm.run.gate import ENTER, Entry
from swarm.run.manifest import OLDEST_SPOKEN, PROTOCOL_VERSION, AnyManifest, open_any_manifest, open_manifest
from swarm.run.manifest_transfer import fetch_manifest, load_run_files, save_run_files, serve_run_files
from swarm.run.sections import RunRules
from tests.swarm.run.test_gate import AUTHORITY, SOON, gate_of, hear, hosts, invite_to, manifest_of
from tests.swarm.run.test_manifest import make_manifest
from tests.swarm.run.test_served_model import served_model

DATA = DataConfig(seq_len=8)


@contextmanager
def software(version: int) -> Iterator[None]:
    """Let this process be software of that protocol number."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(manifest_module, "PROTOCOL_VERSION", version)
        patch.setattr(manifest_module, "OLDEST_SPOKEN", max(8, version - 1))
        yield


def signed_run(version: int) -> Signed:
    return sign_body(AUTHORITY, "manifest", manifest_of(open_run=False, protocol=version))


def with_unknown_fields(value: object) -> Any:
    """Return plain values with a field more in each map."""
    if isinstance(value, dict):
        return {"aaa_later": ["anything", {"at": "all"}]} | {k: with_unknown_fields(v) for k, v in value.items()}
    return [with_unknown_fields(item) for item in value] if isinstance(value, list | tuple) else value


def later(manifest: AnyManifest, version: int = PROTOCOL_VERSION) -> Signed:
    """Return the manifest as software that knows more fields would have signed it."""
    content = with_unknown_fields(msgspec.to_builtins(manifest, builtin_types=(bytes,)))
    return sign_body(AUTHORITY, "manifest", content | {"protocol": version})


def test_the_number_before_is_spoken_from_8_on() -> None:
    assert max(8, PROTOCOL_VERSION - 1) == OLDEST_SPOKEN <= PROTOCOL_VERSION


@pytest.mark.parametrize("server", ["newer", "older"])
async def test_two_numbers_meet_in_a_run_of_the_older(server: str) -> None:
    signed = signed_run(PROTOCOL_VERSION)
    run_id = open_manifest(signed).run_id
    async with hosts(2) as (older, newer):
        here, there = (newer, older) if server == "newer" else (older, newer)
        serve_run_files(here.rpc, signed, b"")
        fetched = await fetch_manifest(there.rpc, here.peer_id, run_id, SOON)
        gate_of(older, open_manifest(fetched, run_id))
        with software(PROTOCOL_VERSION + 1):
            gate_of(newer, open_manifest(fetched, run_id))
            assert await hear(newer, older) == "hi"
        older.admissions.revoke(newer.peer_id)
        newer.admissions.revoke(older.peer_id)
        assert await hear(older, newer) == "hi"


async def test_a_run_that_is_too_new_or_too_old_names_the_machine_to_upgrade() -> None:
    async with hosts(2) as (member, joiner):
        with software(PROTOCOL_VERSION + 1):
            new = signed_run(PROTOCOL_VERSION + 1)
            run_id = open_manifest(new).run_id
            serve_run_files(member.rpc, new, b"")
        number = PROTOCOL_VERSION + 1
        with pytest.raises(NotAdmitted, match=f"speaks protocol version {number} .*: upgrade barnraise on this mach"):
            await fetch_manifest(joiner.rpc, member.peer_id, run_id, SOON)
        with software(PROTOCOL_VERSION + 1):
            assert await fetch_manifest(joiner.rpc, member.peer_id, run_id, SOON) == new
        with (
            software(PROTOCOL_VERSION + 3),
            pytest.raises(
                NotAdmitted, match=rf"\(versions {number + 1} and {number + 2}\).*: finish or export it with"
            ),
        ):
            await fetch_manifest(joiner.rpc, member.peer_id, run_id, SOON)


@pytest.mark.parametrize(("step", "machine"), [(-1, "the caller's machine"), (1, "the run's machines")])
async def test_a_caller_of_another_number_than_the_run_learns_whom_to_upgrade(step: int, machine: str) -> None:
    manifest = manifest_of(open_run=False)
    async with hosts(2) as (a, b):
        gate = gate_of(b, manifest)
        nonce = bytes(32)
        chain = invite_to(manifest).membership(a.identity)
        entry = Entry(manifest.protocol + step, gate._run_hash(nonce), nonce, chain, 0)
        with pytest.raises(RemoteError, match=f"upgrade barnraise on {machine}") as caught:
            await a.rpc.call(b.peer_id, ENTER, entry, timeout_s=SOON)
        assert caught.value.code == "NotAdmitted", "which is no violation"


def test_a_home_of_the_number_before_is_opened_and_an_older_one_is_named(tmp_path: Path) -> None:
    signed = signed_run(PROTOCOL_VERSION)
    save_run_files(tmp_path, signed, b"")
    with software(PROTOCOL_VERSION + 1):
        assert load_run_files(tmp_path) == (signed, b"")
    with software(PROTOCOL_VERSION + 2), pytest.raises(NotAdmitted, match="finish or export it with the barnraise"):
        load_run_files(tmp_path)


@pytest.mark.parametrize(
    "manifest",
    [make_manifest(AUTHORITY.peer_id), served_model(authority=AUTHORITY.peer_id, tokenizer="bytes")],
    ids=lambda m: m.name,
)
def test_unknown_fields_of_a_manifest_are_hashed_and_ignored(manifest: AnyManifest, tmp_path: Path) -> None:
    signed = later(manifest)
    opened = open_any_manifest(signed)
    assert opened == manifest, "they mean nothing"
    assert opened.run_id != manifest.run_id, "but they make another run"
    with software(PROTOCOL_VERSION + 1):
        assert open_any_manifest(signed, opened.run_id).run_id == opened.run_id
    save_run_files(tmp_path, signed, b"")
    assert load_run_files(tmp_path) == (signed, b"")
    changed = Signed(signed.body.replace(b"anything", b"whatever"), signed.signer, signed.signature)
    with pytest.raises(ProtocolViolation, match="signature"):
        open_any_manifest(changed)
    with pytest.raises(NotAdmitted, match="is of run"):
        open_any_manifest(sign_body(AUTHORITY, "manifest", manifest), opened.run_id)


def test_a_known_manifest_has_the_id_of_its_own_bytes() -> None:
    """As before unknown fields were kept: what is opened and what was made are the same run."""
    manifest = make_manifest(AUTHORITY.peer_id)
    opened = open_manifest(sign_body(AUTHORITY, "manifest", manifest))
    assert opened.run_id == manifest.run_id and opened.groups == manifest.groups
    changed = msgspec.structs.replace(opened, created_at=1)
    assert changed.run_id == make_manifest(AUTHORITY.peer_id, created_at=1).run_id, "not the id of what it came from"


async def test_a_run_with_unknown_fields_is_joined(tmp_path: Path) -> None:
    signed = later(manifest_of(open_run=False))
    run_id = open_manifest(signed).run_id
    async with hosts(2) as (a, b):
        serve_run_files(a.rpc, signed, b"")
        fetched = await fetch_manifest(b.rpc, a.peer_id, run_id, SOON)
        assert fetched == signed
        gate_of(a, open_manifest(signed))
        gate_of(b, open_manifest(fetched, run_id))
        assert await hear(a, b) == "hi"


def test_a_field_that_is_not_known_here_cannot_be_in_a_head() -> None:
    """Every voter derives a head's bytes by itself, so heads change with the number only. A field that was added on
    the way is dropped; one that the voters have hashed makes a head of which nobody here finds the votes."""
    head = make_manifest(AUTHORITY.peer_id).first_head()
    content = msgspec.to_builtins(head, builtin_types=(bytes,)) | {"later": 1}
    encoded = msgspec.msgpack.encode(content)
    opened = msgspec.msgpack.decode(encoded, type=Head)
    assert opened == head and opened.hash == head.hash != blake3(encoded).digest()


def test_unknown_fields_of_a_ban_list_are_signed_and_ignored() -> None:
    manifest = make_manifest(AUTHORITY.peer_id)
    peer = Identity.generate().peer_id
    content = msgspec.to_builtins(BanList(manifest.run_id, 1, frozenset({peer})), builtin_types=(bytes,))
    bans = open_bans(sign_body(AUTHORITY, "bans", content | {"later": 1}), manifest)
    assert list(bans.peers) == [peer]


def test_a_feature_that_is_not_known_here_is_refused() -> None:
    """A field may be ignored, unless to ignore it is to compute something else: then the manifest names it."""
    content = msgspec.to_builtins(make_manifest(AUTHORITY.peer_id), builtin_types=(bytes,))
    unknown = sign_body(AUTHORITY, "manifest", content | {"requires": ["compute_s_max", "rope_yarn"], "rope": 1})
    with pytest.raises(NotAdmitted, match="needs 'rope_yarn', which this software does not know: upgrade barnraise"):
        open_any_manifest(unknown)
    known = sign_body(AUTHORITY, "manifest", content | {"requires": ["compute_s_max"]})
    assert open_manifest(known).requires == ("compute_s_max",)


def test_rules_that_older_software_would_break_are_required() -> None:
    longer = RunRules(name="test", compute_s_max=7200.0)
    with pytest.raises(ValueError, match="requires lacks"):
        make_manifest(AUTHORITY.peer_id, run=longer)
    manifest = make_manifest(AUTHORITY.peer_id, run=longer, requires=features_of(longer, DATA))
    assert open_manifest(sign_body(AUTHORITY, "manifest", manifest)) == manifest
    assert schedule_of(manifest, 0).compute_s_max == 7200.0
    assert features_of(RunRules(name="test"), DATA) == ()
    ended = msgspec.structs.replace(DATA, end_of_text="</s>")
    with pytest.raises(ValueError, match="requires lacks"):
        make_manifest(AUTHORITY.peer_id, data=ended)
    assert features_of(RunRules(name="test"), ended) == ("end_of_text",)
    plain = make_manifest(AUTHORITY.peer_id).model
    stretched = msgspec.structs.replace(plain, rope_scaling=RopeScaling(kind="linear", factor=2.0))
    assert (model_features(plain), model_features(stretched)) == ((), ("rope_kind",))
    assert model_features(msgspec.structs.replace(plain, attention_bias=True, output_bias=True)) == ("output_bias",)
    for adapter, needed in (
        (AdapterConfig(), ("adapter",)),
        (AdapterConfig(dropout=0.1), ("adapter", "adapter_dropout")),
    ):
        assert model_features(msgspec.structs.replace(plain, adapter=adapter)) == needed
    with pytest.raises(ValueError, match="requires lacks"):
        make_manifest(AUTHORITY.peer_id, model=stretched)
    layered = CodecConfig(up="lgreco")
    with pytest.raises(ValueError, match="requires lacks"):
        make_manifest(AUTHORITY.peer_id, codec=layered)
    usual = DilocoConfig()
    assert message_features(usual, CodecConfig()) == ()
    assert message_features(usual, layered) == ("lgreco_by_layer",)
    assert message_features(usual, CodecConfig(up="powersgd")) == ("powersgd_summed",)
    assert message_features(usual, CodecConfig(down="two_bit")) == ("two_bit",)
    assert make_manifest(AUTHORITY.peer_id, codec=layered, requires=("lgreco_by_layer",)).codec == layered
    with pytest.raises(ValueError, match="requires lacks"):
        make_manifest(AUTHORITY.peer_id, outer=LionConfig())
    assert message_features(LionConfig(), CodecConfig()) == ("lion_signs",)


def test_a_run_in_fp16_is_refused_by_software_that_lacks_it() -> None:
    """Others keep the manifest of before. A peer's own choice is in no manifest."""
    plain = make_manifest(AUTHORITY.peer_id).inner
    narrow = msgspec.structs.replace(plain, dtype="fp16")
    assert (inner_features(plain), inner_features(narrow)) == ((), ("fp16",))
    assert not any(inner_features(msgspec.structs.replace(plain, dtype=dtype)) for dtype in ("auto", "fp32", "bf16"))
    with pytest.raises(ValueError, match="requires lacks"):
        make_manifest(AUTHORITY.peer_id, inner=narrow)
    manifest = make_manifest(AUTHORITY.peer_id, inner=narrow, requires=("fp16",))
    assert open_manifest(sign_body(AUTHORITY, "manifest", manifest)).inner.dtype == "fp16"
