from __future__ import annotations

import os
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.peer.id import ID

from peer.errors import IdentityError, ProtocolViolation
from peer.identity import (
    MULTIHASH_PREFIX,
    Identity,
    Signed,
    is_peer_id,
    open_body,
    peer_id_of,
    public_key_of,
    sign_body,
    verify_signature,
)

ALICE, BOB = Identity.generate(), Identity.generate()


class Note(msgspec.Struct, frozen=True):
    text: str
    number: int = 0


class Other(msgspec.Struct, frozen=True):
    text: int


@given(st.binary(min_size=32, max_size=32), st.binary(max_size=100))
def test_ids_and_signatures_are_those_of_libp2p(seed: bytes, message: bytes) -> None:
    mine, pair = Identity(seed), create_new_key_pair(seed)
    assert mine.public_key == pair.public_key.to_bytes() and mine.seed == pair.private_key.to_bytes()
    assert mine.peer_id == str(ID.from_pubkey(pair.public_key))
    assert mine.sign(message) == pair.private_key.sign(message)
    assert public_key_of(mine.peer_id) == mine.public_key and peer_id_of(mine.public_key) == mine.peer_id


@given(st.text(alphabet="123456789ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz0 ", min_size=52, max_size=52))
def test_no_text_is_an_id_that_libp2p_reads_otherwise(text: str) -> None:
    if is_peer_id(text):
        assert ID.from_base58(text).to_bytes() == MULTIHASH_PREFIX + public_key_of(text)


def test_a_key_is_never_shown() -> None:
    assert ALICE.seed.hex() not in repr(ALICE) and repr(ALICE.seed) not in repr(ALICE)


def test_a_seed_of_another_length_is_refused() -> None:
    with pytest.raises(ValueError, match="32"):
        Identity(bytes(31))


def test_the_key_file_is_private_and_keeps_the_identity(tmp_path: Path) -> None:
    path = tmp_path / "home" / "identity.key"
    first = Identity.load_or_create(path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert Identity.load_or_create(path).peer_id == first.peer_id
    assert first.peer_id.startswith("12D3Koo")
    assert [file.name for file in path.parent.iterdir()] == ["identity.key"]


def test_a_readable_key_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "identity.key"
    Identity.load_or_create(path)
    path.chmod(0o644)
    with pytest.raises(IdentityError, match="chmod 600"):
        Identity.load_or_create(path)


def test_a_damaged_key_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "identity.key"
    Identity.load_or_create(path)
    path.write_bytes(b"short")
    with pytest.raises(IdentityError, match="damaged"):
        Identity.load_or_create(path)


def test_an_unwritable_folder_is_reported(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    with pytest.raises(IdentityError, match="--home"):
        Identity.load_or_create(blocked / "sub" / "identity.key")


def test_two_processes_that_create_at_once_agree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "identity.key"
    link = os.link

    def someone_was_faster(source: str, target: Path) -> None:
        path.write_bytes(ALICE.seed)
        path.chmod(0o600)
        link(source, target)

    monkeypatch.setattr(os, "link", someone_was_faster)
    assert Identity.load_or_create(path).peer_id == ALICE.peer_id


@given(st.binary(max_size=200), st.binary(min_size=1, max_size=8), st.integers(0, 63))
def test_a_signature_covers_every_byte(message: bytes, extra: bytes, position: int) -> None:
    signature = ALICE.sign(message)
    assert verify_signature(ALICE.peer_id, message, signature)
    assert not verify_signature(BOB.peer_id, message, signature)
    assert not verify_signature(ALICE.peer_id, message + extra, signature)
    flipped = bytearray(signature)
    flipped[position] ^= 1
    assert not verify_signature(ALICE.peer_id, message, bytes(flipped))


@given(st.text(max_size=60), st.binary(max_size=70))
def test_malformed_ids_and_signatures_are_false(peer_id: str, signature: bytes) -> None:
    assert not verify_signature(peer_id, b"message", signature)
    assert not is_peer_id(peer_id)


def test_a_signed_body_opens_for_its_kind_type_and_signer_only() -> None:
    note = Note("hello", 3)
    signed = sign_body(ALICE, "note", note)
    assert open_body(signed, "note", Note, signer=ALICE.peer_id) == note
    with pytest.raises(ProtocolViolation, match="not by"):
        open_body(signed, "note", Note, signer=BOB.peer_id)
    with pytest.raises(ProtocolViolation, match="signature"):
        open_body(signed, "vote", Note)
    with pytest.raises(ProtocolViolation, match="malformed"):
        open_body(signed, "note", Other)
    with pytest.raises(ProtocolViolation, match="signature"):
        open_body(Signed(signed.body + b"x", signed.signer, signed.signature), "note", Note)
    with pytest.raises(ProtocolViolation, match="signature"):
        open_body(Signed(signed.body, BOB.peer_id, signed.signature), "note", Note)


def test_signed_survives_msgpack() -> None:
    signed = sign_body(ALICE, "note", Note("x"))
    again = msgspec.msgpack.decode(msgspec.msgpack.encode(signed), type=Signed)
    assert open_body(again, "note", Note) == Note("x")
