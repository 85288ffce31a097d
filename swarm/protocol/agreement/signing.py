"""Signatures as the agreement sees them, so that a simulation may use a table of signed bodies instead of Ed25519."""

from __future__ import annotations

from typing import Protocol, TypeVar

import msgspec

from peer.identity import Signed

Body = TypeVar("Body", bound=msgspec.Struct)


class Signer(Protocol):
    """Signs for one peer and checks the signatures of all."""

    def sign(self, kind: str, body: msgspec.Struct) -> Signed:
        """Encode and sign `body` for the purpose `kind`, as this peer. The same body gives the same bytes."""

    def open(self, signed: Signed, kind: str, type_: type[Body]) -> Body:
        """Check the signature and decode the body. Raise `ProtocolViolation` if either is wrong.

        A node opens the same message several times, so this should remember each checked message."""
