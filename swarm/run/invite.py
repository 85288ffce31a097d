"""Invites: one string to paste, with all that a peer needs to find a run or a served model and to be admitted.

    barnraise1<base32 of a msgpack array, lower case, and a checksum of 4 bytes>

Lower-case letters and digits only: they survive chat programs, line wraps and a double click. The string names the run
(by hash), its authority and several addresses to try. For an invitation-only run it also carries the join token, and
any reader of it may join until it expires (docs/security.md).
"""

from __future__ import annotations

from base64 import b32decode, b32encode
from collections.abc import Iterable
from typing import Final

import msgspec
from blake3 import blake3
from multiaddr import Multiaddr
from multiaddr.exceptions import Error as MultiaddrError

from peer.errors import ConfigError
from peer.identity import Signed, is_peer_id
from swarm.run.manifest import RUN_ID_BYTES, run_id_text

PREFIX: Final = "barnraise"
VERSION: Final = "1"
ADDRESSES_MAX: Final = 16
_TEXT_MAX: Final = 8192
_CHECKSUM_BYTES: Final = 4
_REMEDY: Final = "copy it again from where `peer coordinate` printed it, from its first letter to its last"


class Invite(msgspec.Struct, frozen=True):
    """A run, and how to reach it."""

    run_id: str
    authority: str
    addresses: tuple[str, ...]
    """Full multiaddrs that end in /p2p/<peer id>, best first; at least one."""
    token: Signed | None = None

    def __str__(self) -> str:
        addresses = tuple(Multiaddr(address).to_bytes() for address in self.addresses)
        wire = _Wire(b32decode(self.run_id.upper()), self.authority, addresses, self.token)
        payload = msgspec.msgpack.encode(wire)
        text = b32encode(payload + _checksum(payload)).decode().rstrip("=").lower()
        return f"{PREFIX}{VERSION}{text}"

    @classmethod
    def parse(cls, text: str) -> Invite:
        """Parse what str() returns, with white space anywhere. Raises ConfigError."""
        text = "".join(text.split()).lower()
        if not text.startswith(PREFIX):
            raise ConfigError(f"this is no invite (one begins with {PREFIX}{VERSION}): {_REMEDY}")
        if not text.startswith(PREFIX + VERSION):
            raise ConfigError("this invite is of a newer format: upgrade barnraise")
        payload = _payload(text[len(PREFIX + VERSION) :])
        try:
            wire = msgspec.msgpack.decode(payload, type=_Wire)
            addresses = tuple(str(Multiaddr(raw)) for raw in wire.addresses)
        except (msgspec.MsgspecError, MultiaddrError, ValueError) as error:
            raise ConfigError(f"the invite's content is malformed ({error}): {_REMEDY}") from error
        check_addresses(addresses)
        if len(wire.run_id) != RUN_ID_BYTES or not is_peer_id(wire.authority):
            raise ConfigError(f"the invite names no run: {_REMEDY}")
        return cls(run_id_text(wire.run_id), wire.authority, addresses, wire.token)


def check_addresses(addresses: Iterable[str]) -> None:
    """Raise ConfigError unless there are 1 to 16 multiaddrs and each names the peer expected there."""
    seen = tuple(addresses)
    if not 1 <= len(seen) <= ADDRESSES_MAX:
        raise ConfigError(f"the invite has {len(seen)} addresses: give it 1 to {ADDRESSES_MAX}")
    for address in seen:
        try:
            peer = Multiaddr(address).get_peer_id()
        except (MultiaddrError, ValueError) as error:
            raise ConfigError(
                f"{address!r} is no multiaddr ({error}): write one like /ip4/1.2.3.4/tcp/31337/p2p/12D3Koo"
            ) from error
        if peer is None or not is_peer_id(peer):
            raise ConfigError(f"{address} names no peer: end it in /p2p/ and the peer's id")


class _Wire(msgspec.Struct, frozen=True, array_like=True):
    """The compact form: binary run id and multiaddrs, no field names."""

    run_id: bytes
    authority: str
    addresses: tuple[bytes, ...]
    token: Signed | None


def _payload(text: str) -> bytes:
    if len(text) > _TEXT_MAX:
        raise ConfigError(f"the invite is longer than any invite: {_REMEDY}")
    try:
        raw = b32decode(text.upper() + "=" * (-len(text) % 8))
    except ValueError as error:
        raise ConfigError(f"the invite has characters that no invite has, or is cut off: {_REMEDY}") from error
    payload, checksum = raw[:-_CHECKSUM_BYTES], raw[-_CHECKSUM_BYTES:]
    if _checksum(payload) != checksum:
        raise ConfigError(f"the invite is damaged (its checksum does not match): {_REMEDY}")
    return payload


def _checksum(payload: bytes) -> bytes:
    return blake3(b"barnraise invite" + payload).digest(_CHECKSUM_BYTES)
