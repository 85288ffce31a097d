"""Signatures by a table of all bodies that were ever signed: as unforgeable as Ed25519, and a thousand times faster."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, TypeVar

import msgspec

from peer.decoding import MALFORMED
from peer.errors import ProtocolViolation
from peer.identity import Signed
from swarm.protocol.agreement.output import encode

Body = TypeVar("Body", bound=msgspec.Struct)
LASTING: Final = {"agreement.witness", "agreement.start"}
"""Kinds of bodies that are signed seldom, and may be shown much later."""


class Signatures:
    """The table of one world. Only `TableSigner.sign` adds to it, always under its own peer's id. `watch` is told."""

    def __init__(self, watch: Callable[[str, str, bytes], None] = lambda peer, kind, encoded: None) -> None:
        self._watch = watch
        self.signed: set[tuple[str, str, bytes]] = set()
        self.opened: dict[tuple[str, str, bytes], msgspec.Struct] = {}
        self._signed_before: set[tuple[str, str, bytes]] = set()
        self._kinds: set[tuple[str, str]] = set()

    def of(self, peer: str) -> TableSigner:
        return TableSigner(self, peer)

    def open(self, signed: Signed, kind: str, type_: type[Body]) -> Body:
        """Check the signature and decode the body, as a receiver would: a liar may have signed what is no such body."""
        entry = (signed.signer, kind, signed.body)
        known = self.opened.get(entry)
        if known is not None:
            return known  # type: ignore[return-value]
        if entry not in self.signed:
            if entry not in self._signed_before:
                raise ProtocolViolation("a signature is wrong")
            self.signed.add(entry)
        try:
            body = msgspec.msgpack.decode(signed.body, type=type_)
        except MALFORMED as error:
            raise ProtocolViolation("a signed body is malformed") from error
        self.opened[entry] = body
        return body

    def add(self, peer: str, kind: str, encoded: bytes) -> None:
        """Note that a peer has signed this."""
        self.signed.add((peer, kind, encoded))
        self._kinds.add((peer, kind))
        self._watch(peer, kind, encoded)

    def has_signed(self, peer: str, kind: str) -> bool:
        """Return whether a peer has ever signed a body of that kind."""
        return (peer, kind) in self._kinds

    def forget(self) -> None:
        """Forget what was neither signed nor looked at since the last call but one."""
        lasting = {entry for entry in (*self.signed, *self._signed_before) if entry[1] in LASTING}
        self._signed_before, self.signed = self.signed, lasting
        self.opened.clear()


class TableSigner:
    """Signs for one peer."""

    def __init__(self, table: Signatures, peer: str) -> None:
        self._table, self.peer = table, peer
        self.open = table.open

    def sign(self, kind: str, body: msgspec.Struct) -> Signed:
        encoded = encode(body)
        self._table.add(self.peer, kind, encoded)
        return Signed(encoded, self.peer, b"")
