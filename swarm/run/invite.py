"""Invites: one string to paste, with all that a peer needs to find a run or a served model and to be admitted.

    barnraise2<base32 of a msgpack array, lower case, and a checksum of 4 bytes>

Lower-case letters and digits only: they survive chat programs, line wraps and a double click. The string names the run
(by hash), its authority and several addresses to try. For a closed run it also carries the invite's private key, which
is never sent: with it a peer signs its own way in. Each reader may do so, until the invite expires or is used up. An
invite for one peer carries no key but the finished credential (docs/run/security.md).
"""

from __future__ import annotations

from base64 import b32decode, b32encode
from collections.abc import Iterable
from ipaddress import ip_address
from pathlib import Path
from typing import Annotated, Final, Literal

import msgspec
from blake3 import blake3
from multiaddr import Multiaddr
from multiaddr.exceptions import Error as MultiaddrError

from peer.bounds import Hash, Name
from peer.decoding import MALFORMED, told
from peer.errors import ConfigError
from peer.identity import Identity, is_peer_id, peer_id_of
from swarm.run.credentials import CLIENT_S, Chain, client_link, member_link
from swarm.run.home import Home
from swarm.run.manifest import RUN_ID_BYTES, run_id_text

PREFIX: Final = "barnraise"
VERSION: Final = "2"
ADDRESSES_MAX: Final = 16
_TEXT_MAX: Final = 8192
_CHECKSUM_BYTES: Final = 4
_REMEDY: Final = "copy it again from where `peer coordinate` printed it, from its first letter to its last"

Reach = Literal["machine", "network", "everywhere"]
_REACHES: Final[tuple[Reach, ...]] = ("machine", "network", "everywhere")
Seed = Annotated[bytes, msgspec.Meta(max_length=32)]


class Invite(msgspec.Struct, frozen=True):
    """A run, and how to reach it."""

    run_id: str
    authority: str
    addresses: tuple[str, ...]
    """Full multiaddrs that end in /p2p/<peer id>, best first; at least one."""
    chain: Chain = ()
    """Of a closed run: ends with the invite's link or, for one peer, with the link of that member."""
    key: Seed = b""
    """The private key (a seed of 32 bytes) of the invite at the end of `chain`; empty for one peer."""

    @property
    def reach(self) -> Reach:
        """Return from where the best of the addresses can be reached, as far as the addresses themselves tell."""
        return _REACHES[max((reach_of(address) for address in self.addresses), default=0)]

    def membership(self, identity: Identity) -> Chain:
        """Return what this invite makes of a peer that takes part: nothing new in an open run or for one peer."""
        if not self.key:
            return self.chain
        signer = Identity.from_seed(self.key)
        return (*self.chain, member_link(signer, self.run_id, identity.peer_id, self.chain, self.chain[-1].expires))

    def client_chain(self, client: str, owner: Identity | None, now: float) -> Chain:
        """Return what makes the peer `client` a reader of the run for an hour.

        `owner`: the identity of this machine's peer, for an invite that is for that peer only, and for the authority.
        Raises ConfigError if that is needed and missing.
        """
        expires = now + CLIENT_S
        if self.key:
            return (*self.chain, client_link(Identity.from_seed(self.key), self.run_id, client, expires))
        if owner is not None and (owner.peer_id == self.authority or self.chain):
            return (*self.chain, client_link(owner, self.run_id, client, expires))
        if self.chain:
            raise ConfigError(
                f"this invite is for peer {peer_id_of(self.chain[-1].key)} only: give the --home of that peer"
            )
        return ()

    def __str__(self) -> str:
        addresses = tuple(Multiaddr(address).to_bytes() for address in self.addresses)
        wire = _Wire(b32decode(self.run_id.upper()), self.authority, addresses, self.chain, self.key)
        payload = msgspec.msgpack.encode(wire)
        return f"{PREFIX}{VERSION}{_text(payload + _checksum(payload))}"

    @classmethod
    def parse(cls, text: str) -> Invite:
        """Parse what str() returns, with white space anywhere. Raises ConfigError."""
        text = "".join(text.split()).lower()
        if not text.startswith(PREFIX):
            raise ConfigError(f"this is no invite (one begins with {PREFIX}{VERSION}): {_REMEDY}")
        if not text.startswith(PREFIX + VERSION):
            raise ConfigError(
                f"this invite begins with {text[: len(PREFIX) + 1]}, this software reads {PREFIX}{VERSION}:"
                " upgrade barnraise on both sides and ask for a new invite"
            )
        payload = _payload(text[len(PREFIX + VERSION) :])
        try:
            wire = msgspec.msgpack.decode(payload, type=_Wire)
            addresses = tuple(str(Multiaddr(raw)) for raw in wire.addresses)
        except (MultiaddrError, ValueError, *MALFORMED) as error:
            raise ConfigError(f"the invite's content is malformed ({told(error)}): {_REMEDY}") from error
        check_addresses(addresses)
        if len(wire.run_id) != RUN_ID_BYTES or not is_peer_id(wire.authority):
            raise ConfigError(f"the invite names no run: {_REMEDY}")
        if wire.key and (not wire.chain or Identity.from_seed(wire.key).peer_id != peer_id_of(wire.chain[-1].key)):
            raise ConfigError(f"the invite's key does not fit what it grants: {_REMEDY}")
        return cls(run_id_text(wire.run_id), wire.authority, addresses, wire.chain, wire.key)


def reach_of(address: str) -> int:
    """Return from how far the first host of a multiaddr, a relay's if it goes through one, can be reached: 0 from this
    machine alone, 1 from its network, 2 from everywhere."""
    _, kind, host, *_ = address.split("/")
    if kind not in ("ip4", "ip6"):
        return 2  # a name
    ip = ip_address(host)
    return 0 if ip.is_loopback else 2 if ip.is_global else 1


def read_saved_invite(home: Path) -> Invite:
    """Return the invite in the peer's `home`. Raises ConfigError if there is none."""
    path = Home(home).invite
    try:
        return Invite.parse(path.read_text())
    except FileNotFoundError as error:
        raise ConfigError(f"{home} is no peer's home: give the --home of `peer join` or `peer coordinate`") from error
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror}): check its owner and permissions") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is damaged: give the INVITE itself in place of --home") from error


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

    run_id: Hash
    authority: Name
    addresses: Annotated[tuple[Annotated[bytes, msgspec.Meta(max_length=512)], ...], msgspec.Meta(max_length=64)]
    chain: Chain
    key: Seed


def _payload(text: str) -> bytes:
    if len(text) > _TEXT_MAX:
        raise ConfigError(f"the invite is longer than any invite: {_REMEDY}")
    try:
        raw = b32decode(text.upper() + "=" * (-len(text) % 8))
    except ValueError as error:
        raise ConfigError(f"the invite has characters that no invite has, or is cut off: {_REMEDY}") from error
    payload, checksum = raw[:-_CHECKSUM_BYTES], raw[-_CHECKSUM_BYTES:]
    if _checksum(payload) != checksum or _text(raw) != text:
        raise ConfigError(f"the invite is damaged (its checksum does not match): {_REMEDY}")
    return payload


def _text(raw: bytes) -> str:
    return b32encode(raw).decode().rstrip("=").lower()


def _checksum(payload: bytes) -> bytes:
    return blake3(b"barnraise invite" + payload).digest(_CHECKSUM_BYTES)
