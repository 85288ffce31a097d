"""Signatures over bodies that are no honest ones: a signer may be hostile."""

from __future__ import annotations

import msgspec

from peer.identity import Identity, Signed, _signed_bytes


def resigned(identity: Identity, kind: str, body: bytes) -> Signed:
    """Return any bytes, signed as `sign_body` signs a body."""
    return Signed(body, identity.peer_id, identity.sign(_signed_bytes(kind, body)))


def resigned_bytes(identity: Identity, kind: str, body: bytes) -> bytes:
    """Return the same, encoded."""
    return msgspec.msgpack.encode(resigned(identity, kind, body))
