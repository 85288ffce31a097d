"""Of all public keys only Ed25519 in 36 bytes is parsed."""

from __future__ import annotations

import os
from typing import Any

import pytest
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.crypto.keys import KeyType
from libp2p.crypto.pb import crypto_pb2
from libp2p.crypto.serialization import deserialize_public_key
from libp2p.peer import envelope
from libp2p.peer.id import ID
from libp2p.peer.pb import crypto_pb2 as envelope_pb2
from libp2p.security.noise.messages import NoiseHandshakePayload
from libp2p.security.noise.pb import noise_pb2

from peer.identity import _decoded_key, is_peer_id, verify_signature
from peer.net.connections import _kept_id, _libp2p_id
from peer.net.libp2p_fixes import apply_fixes
from peer.net.libp2p_fixes.keys import KEY_BYTES, PREFIX
from tests.peer.support.key_bombs import prime_bomb

KEY = create_new_key_pair().public_key


@pytest.fixture(autouse=True)
def no_parser(monkeypatch: pytest.MonkeyPatch) -> None:
    def parse(*_: object) -> None:
        raise AssertionError("a key is parsed")

    apply_fixes()
    monkeypatch.setattr("Crypto.PublicKey.RSA.import_key", parse)
    monkeypatch.setattr("coincurve.PublicKey.__init__", parse)


def shown(data: bytes) -> list[bytes]:
    """Return the messages and names by which a stranger can show a key."""
    payload = noise_pb2.NoiseHandshakePayload(identity_key=data, identity_sig=bytes(64))
    return [data, payload.SerializeToString()]


@pytest.mark.parametrize("kind", [kind for kind in KeyType if kind is not KeyType.Ed25519])
@pytest.mark.parametrize("size", [0, 32, 33, 65, 5000])
def test_other_kinds_of_keys_are_refused(kind: KeyType, size: int) -> None:
    encoded = crypto_pb2.PublicKey(key_type=kind.value, data=os.urandom(size)).SerializeToString()
    key, payload = shown(encoded)
    with pytest.raises(ValueError, match="no Ed25519"):
        deserialize_public_key(key)
    with pytest.raises(ValueError, match="no Ed25519"):
        NoiseHandshakePayload.deserialize(payload)


@pytest.mark.parametrize(
    "key", [KEY.serialize()[:-1], KEY.serialize() + b"\0", b"", prime_bomb()], ids=["35", "37", "0", "bomb"]
)
def test_other_lengths_are_refused(key: bytes) -> None:
    assert len(key) != KEY_BYTES
    with pytest.raises(ValueError, match="no Ed25519"):
        deserialize_public_key(key)


def test_another_order_of_the_fields_is_refused() -> None:
    """One key, one encoding: the peer id is a hash of it."""
    with pytest.raises(ValueError, match="no Ed25519"):
        deserialize_public_key(b"\x12\x20" + KEY.to_bytes() + b"\x08\x01")


def test_an_ed25519_key_is_read() -> None:
    assert KEY.serialize() == PREFIX + KEY.to_bytes()
    assert deserialize_public_key(KEY.serialize()) == KEY
    assert ID.from_pubkey(KEY).extract_public_key() == KEY


@pytest.mark.parametrize("kind", [envelope_pb2.KeyType.RSA, envelope_pb2.KeyType.Secp256k1])
def test_keys_of_envelopes_are_refused(kind: Any) -> None:
    with pytest.raises(ValueError, match="no Ed25519"):
        envelope.pub_key_from_protobuf(envelope_pb2.PublicKey(Type=kind, Data=prime_bomb()))


def test_long_peer_ids_are_neither_decoded_nor_kept() -> None:
    kept = _decoded_key.cache_info().currsize, _kept_id.cache_info().currsize
    inlined = ID(b"\x00" + bytes([0x80 | len(prime_bomb()) & 0x7F, len(prime_bomb()) >> 7]) + prime_bomb())
    for name in (str(inlined), "1" * (1 << 20), str(ID.from_pubkey(KEY)) + "1", "0" * 53, ""):
        assert not is_peer_id(name)
        assert not verify_signature(name, b"", bytes(64))
        with pytest.raises(Exception, match="no peer id"):
            _libp2p_id(name)
    assert inlined.extract_public_key() is None
    assert (_decoded_key.cache_info().currsize, _kept_id.cache_info().currsize) == kept
    assert is_peer_id(str(ID.from_pubkey(KEY)))
