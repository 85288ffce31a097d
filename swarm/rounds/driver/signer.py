"""Ed25519 for a node of the agreement. It opens each body several times, so what was checked once is remembered."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, Final

import msgspec

from peer.identity import Identity, Signed, open_body, sign_body
from swarm.protocol.agreement.signing import Body

CHECKED_MAX: Final = 4096  # bodies; a round of 64 members has some hundreds
CHECKED_BYTES_MAX: Final = 32 << 20


class KeySigner:
    """Signs with this peer's key, and checks the signatures of all."""

    def __init__(self, identity: Identity) -> None:
        self._identity = identity
        self._checked: OrderedDict[tuple[str, bytes, str, bytes], Any] = OrderedDict()
        self._bytes = 0

    def sign(self, kind: str, body: msgspec.Struct) -> Signed:
        return sign_body(self._identity, kind, body)

    def open(self, signed: Signed, kind: str, type_: type[Body]) -> Body:
        """Check the signature and decode the body. Raises `ProtocolViolation`."""
        name = (kind, signed.body, signed.signer, signed.signature)
        known = self._checked.get(name)
        if isinstance(known, type_):
            self._checked.move_to_end(name)
            return known
        body = open_body(signed, kind, type_)
        if known is None:
            self._bytes += len(signed.body)
        self._checked[name] = body
        while self._checked and (len(self._checked) > CHECKED_MAX or self._bytes > CHECKED_BYTES_MAX):
            (_, oldest, _, _), _ = self._checked.popitem(last=False)
            self._bytes -= len(oldest)
        return body
