"""The manifest of a served model: signed, named by its hash, checked, and sent through the gate like that of a run."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from blake3 import blake3

from peer.config import ModelConfig
from peer.errors import ConfigError, NotAdmitted, ProtocolViolation, RemoteError
from peer.identity import Identity, Signed, sign_body
from swarm.run.ban_list import BanList, sign_bans
from swarm.run.bootstrap import enter_run
from swarm.run.gate import Gate
from swarm.run.home import Home
from swarm.run.invite import Invite
from swarm.run.manifest import (
    PROTOCOL_VERSION,
    Manifest,
    ServedModelManifest,
    open_any_manifest,
    open_manifest,
    sign_manifest,
)
from swarm.run.manifest_transfer import fetch_manifest, load_run_files, serve_run_files
from tests.swarm.run.test_gate import AUTHORITY, SOON, hear, hosts, invite_to
from tests.swarm.run.test_manifest import make_manifest

TOKENIZER = b'{"a": "tokenizer"}'
MODEL = ModelConfig(hidden_size=32, layers=4, heads=2, kv_heads=1, intermediate_size=64, max_seq_len=64)


def served_model(**changes: object) -> ServedModelManifest:
    manifest = ServedModelManifest(
        protocol=PROTOCOL_VERSION,
        authority=AUTHORITY.peer_id,
        created_at=1_700_000_000,
        model=MODEL,
        tokenizer=blake3(TOKENIZER).hexdigest(),
        name="a served model",
        open=False,
        cuts=((0, 3), (3, 4)),
        checkpoint=(b"a" * 32, b"b" * 32),
    )
    return msgspec.structs.replace(manifest, **changes)


def test_it_opens_to_the_same_content() -> None:
    manifest = served_model()
    assert open_any_manifest(sign_manifest(AUTHORITY, manifest), manifest.run_id) == manifest


def test_each_kind_opens_to_its_own_type() -> None:
    run = make_manifest(AUTHORITY.peer_id)
    kinds = [type(open_any_manifest(sign_manifest(AUTHORITY, manifest))) for manifest in (run, served_model())]
    assert kinds == [Manifest, ServedModelManifest]


def test_its_id_depends_on_every_rule() -> None:
    others = [
        served_model(created_at=1),
        served_model(open=True),
        served_model(name="another"),
        served_model(checkpoint=(b"a" * 32, b"c" * 32)),
        served_model(cuts=((0, 2), (2, 4))),
    ]
    assert len({manifest.run_id for manifest in (served_model(), *others)}) == 6


def test_only_the_named_authority_can_sign() -> None:
    with pytest.raises(ValueError, match="another authority"):
        sign_manifest(Identity.generate(), served_model())
    with pytest.raises(ProtocolViolation, match=f"not by {AUTHORITY.peer_id}"):
        open_any_manifest(sign_body(Identity.generate(), "manifest", served_model()))


def test_a_forgery_is_refused() -> None:
    signed = sign_manifest(AUTHORITY, served_model())
    with pytest.raises(ProtocolViolation, match="signature"):
        open_any_manifest(Signed(signed.body.replace(b"b" * 32, b"c" * 32), signed.signer, signed.signature))


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"name": ""}, "name"),
        ({"kind": "something else"}, "something else"),
        ({"cuts": ((0, 3), (3, 5))}, "cuts"),
        ({"cuts": ((0, 2), (3, 4))}, "cuts"),
        ({"cuts": ()}, "checkpoint"),
        ({"cuts": (), "checkpoint": ()}, "cuts"),
        ({"checkpoint": (b"a" * 32,)}, "checkpoint"),
        ({"checkpoint": (b"a" * 32, b"b")}, "checkpoint"),
        ({"tokenizer": "a name"}, "tokenizer"),
        ({"authority": "somewhere"}, "not by somewhere"),
        ({"model": msgspec.structs.replace(MODEL, shared_blocks=2)}, "cuts part blocks"),
        ({"model": {**msgspec.to_builtins(MODEL), "vocab_size": 1 << 40}}, "vocab_size is"),
    ],
)
def test_signed_nonsense_is_refused(changes: dict[str, object], word: str) -> None:
    content = msgspec.to_builtins(served_model(), builtin_types=(bytes,))
    content |= msgspec.to_builtins(changes, builtin_types=(bytes,))
    with pytest.raises(ProtocolViolation, match=word):
        open_any_manifest(sign_body(AUTHORITY, "manifest", content))


def test_a_trainer_gets_one_clear_error() -> None:
    with pytest.raises(ConfigError, match="'a served model' is a served model, not a training run: ask for an invite"):
        open_manifest(sign_manifest(AUTHORITY, served_model()))


async def test_it_travels_through_the_gate(tmp_path: Path) -> None:
    manifest = served_model()
    signed = sign_manifest(AUTHORITY, manifest)
    async with hosts(3, first=AUTHORITY) as (member, joiner, stranger):
        gate = Gate(member.rpc, manifest, AUTHORITY)
        serve_run_files(member.rpc, signed, TOKENIZER)
        invite = Invite.parse(str(invite_to(manifest, member.addresses)))
        chain = invite.membership(joiner.identity)
        entered = await enter_run(joiner, invite, Home(tmp_path / "a"), chain, open_any_manifest)
        assert (entered.signed, entered.tokenizer) == (signed, TOKENIZER)
        assert load_run_files(tmp_path / "a") == (signed, TOKENIZER)
        assert await hear(joiner, member) == "hi"

        with pytest.raises(RemoteError, match="for members of the run"):
            await hear(stranger, member)
        with pytest.raises(NotAdmitted, match="carries no key"):
            await enter_run(stranger, invite, Home(tmp_path / "b"), (), open_any_manifest)
        gate.learn_bans(sign_bans(AUTHORITY, BanList(manifest.run_id, 1, peers=frozenset({joiner.peer_id}))))
        with pytest.raises(RemoteError, match="banned"):
            await hear(joiner, member)


async def test_a_forged_manifest_from_a_peer_is_refused() -> None:
    manifest = served_model()
    async with hosts(2) as (liar, joiner):
        serve_run_files(liar.rpc, sign_manifest(AUTHORITY, manifest), TOKENIZER)
        other = sign_manifest(AUTHORITY, served_model(created_at=2))
        with pytest.raises(RemoteError, match="in another run"):
            await fetch_manifest(joiner.rpc, liar.peer_id, open_any_manifest(other).run_id, SOON)


async def test_a_training_peer_is_refused_before_it_keeps_anything(tmp_path: Path) -> None:
    manifest = served_model(open=True)
    async with hosts(2, first=AUTHORITY) as (member, trainer):
        Gate(member.rpc, manifest, AUTHORITY)
        serve_run_files(member.rpc, sign_manifest(AUTHORITY, manifest), TOKENIZER)
        invite = Invite(manifest.run_id, AUTHORITY.peer_id, member.addresses)
        with pytest.raises(ConfigError, match="is a served model, not a training run"):
            await enter_run(trainer, invite, Home(tmp_path / "home"), (), open_manifest)
    assert not (tmp_path / "home").exists()
