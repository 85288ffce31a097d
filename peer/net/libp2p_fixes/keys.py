"""Public keys of strangers: Ed25519 in its one encoding of 36 bytes, and nothing else reaches a parser.

Stock 0.8.1 parses RSA, Secp256k1 and ECDSA keys too, in handshakes, in identify messages, in signed envelopes and in
peer ids. For RSA it even takes a private key, whose check is quadratic or worse in its size: before any
authentication, 5 kB hold the event loop for seconds and 62 kB, which fit into one handshake message, for longer.
"""

from __future__ import annotations

from typing import Any, Final, NoReturn

from libp2p.crypto import ecc, rsa, secp256k1, serialization
from libp2p.crypto.ed25519 import Ed25519PublicKey
from libp2p.crypto.keys import KeyType, PublicKey
from libp2p.crypto.pb import crypto_pb2

PREFIX: Final = b"\x08\x01\x12\x20"  # protobuf: key type Ed25519, then 32 bytes of data
KEY_BYTES: Final = len(PREFIX) + 32


def apply() -> None:
    """Refuse every other key wherever the library parses one, also under names that were imported before."""
    PublicKey.deserialize_from_protobuf = staticmethod(_parse)  # type: ignore[method-assign, assignment]
    table = serialization.key_type_to_public_key_deserializer
    table.clear()
    table[KeyType.Ed25519.value] = Ed25519PublicKey.from_bytes
    others: tuple[Any, ...] = (rsa.RSAPublicKey, secp256k1.Secp256k1PublicKey, ecc.ECCPublicKey)
    for other in others:
        other.from_bytes = staticmethod(_refuse)
        if hasattr(other, "deserialize"):
            other.deserialize = staticmethod(_refuse)


def _parse(data: bytes) -> crypto_pb2.PublicKey:
    """Return the message of an Ed25519 key. Raises ValueError, before anything is parsed, for any other bytes."""
    if len(data) != KEY_BYTES or data[: len(PREFIX)] != PREFIX:
        _refuse(data)
    return crypto_pb2.PublicKey(key_type=crypto_pb2.KeyType.Ed25519, data=bytes(data[len(PREFIX) :]))


def _refuse(data: bytes, *_: object) -> NoReturn:
    raise ValueError(f"{len(data)} bytes are no Ed25519 public key of {KEY_BYTES}: use an Ed25519 identity")
