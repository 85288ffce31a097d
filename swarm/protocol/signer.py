"""Ed25519 for a node of the agreement. It opens each body several times, so what was checked once is remembered."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import msgspec

from peer.identity import Identity, Signed, is_genuine, open_body, read_body, sign_body
from swarm.protocol.agreement.signing import Body

CHECKED_MAX: Final = 4096  # bodies; a round of 64 members has some hundreds
CHECKED_BYTES_MAX: Final = 32 << 20


class KeySigner:
    """Signs with this peer's key, and checks the signatures of all."""

    def __init__(self, identity: Identity) -> None:
        self._identity = identity
        self._checked: OrderedDict[tuple[str, bytes, str, bytes], Any] = OrderedDict()
        self._bytes = 0
        self._genuine: frozenset[tuple[str, Signed]] = frozenset()

    def sign(self, kind: str, body: msgspec.Struct) -> Signed:
        signed = sign_body(self._identity, kind, body)
        self._remember((kind, signed.body, signed.signer, signed.signature), body)
        return signed

    def open(self, signed: Signed, kind: str, type_: type[Body]) -> Body:
        """Check the signature and decode the body. Raises `ProtocolViolation`."""
        name = (kind, signed.body, signed.signer, signed.signature)
        known = self._checked.get(name)
        if isinstance(known, type_):
            self._checked.move_to_end(name)
            return known
        body = (read_body if (kind, signed) in self._genuine else open_body)(signed, kind, type_)
        self._remember(name, body)
        return body

    def _remember(self, name: tuple[str, bytes, str, bytes], body: Any) -> None:
        if name not in self._checked:
            self._bytes += len(name[1])
        self._checked[name] = body
        while self._checked and (len(self._checked) > CHECKED_MAX or self._bytes > CHECKED_BYTES_MAX):
            (_, oldest, _, _), _ = self._checked.popitem(last=False)
            self._bytes -= len(oldest)

    @contextmanager
    def knowing(self, genuine: Iterable[tuple[str, Signed]]) -> Iterator[None]:
        """Within the block, check those signatures no more."""
        self._genuine = frozenset(genuine)
        try:
            yield
        finally:
            self._genuine = frozenset()


def check_all(bodies: Iterable[tuple[str, Signed]]) -> list[tuple[str, Signed]]:
    """Return those of the bodies, with the kind that each is signed for, whose signature is right, up to the first
    wrong one: what comes after that is not looked at."""
    found = []
    for kind, signed in bodies:
        if not is_genuine(signed, kind):
            break
        found.append((kind, signed))
    return found
