"""Invites: one string to paste, with all that a peer needs to find a run or a served model and to be admitted.

    barnraise3<base58 of the fields, and a checksum of 4 bytes>

Letters and digits only: they survive chat programs, line wraps and a double click. The string names the run (by hash),
its authority and several addresses to try. For a closed run it also carries the invite's private key, which is never
sent: with it a peer signs its own way in. Each reader may do so, until the invite expires or is used up. An invite for
one peer carries no key but the finished credential (docs/run/security.md).

Signatures are over the form of `swarm.run.credentials`, not over the text.
"""

from __future__ import annotations

from base64 import b32decode
from collections.abc import Iterable
from ipaddress import ip_address
from pathlib import Path
from typing import Annotated, Final, Literal

import msgspec
from blake3 import blake3
from multiaddr import Multiaddr
from multiaddr.exceptions import Error as MultiaddrError

from peer.base58 import base58_length, from_base58, to_base58
from peer.decoding import MALFORMED, told
from peer.errors import ConfigError
from peer.identity import MULTIHASH_PREFIX, Identity, is_peer_id, peer_id_of, public_key_of
from swarm.run.credentials import (
    CHAIN_MAX,
    CLIENT_S,
    EXPIRES_END,
    GUESTS_MAX,
    Chain,
    Link,
    LinkKind,
    client_link,
    is_signed,
    member_link,
)
from swarm.run.home import Home
from swarm.run.manifest import RUN_ID_BYTES, run_id_text

PREFIX: Final = "barnraise"
VERSION: Final = "3"
ADDRESSES_MAX: Final = 16
_BYTES_MAX: Final = 5120  # of all that the text holds
_CHECKSUM_BYTES: Final = 4
_KEY_BYTES: Final = 32
_ADDRESS_BYTES_MAX: Final = 512
_P2P: Final = b"\xa5\x03" + bytes([len(MULTIHASH_PREFIX) + _KEY_BYTES]) + MULTIHASH_PREFIX
"""The prefix of the public key in the binary form of /p2p/<peer id>."""
_KINDS: Final[tuple[LinkKind, ...]] = ("invite", "member", "client")
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
        """Return from where the best of the addresses can be reached, as far as the addresses themselves show."""
        return _REACHES[max((reach_of(address) for address in self.addresses), default=0)]

    def membership(self, identity: Identity) -> Chain:
        """Return what this invite makes of a peer that takes part: nothing new in an open run or for one peer."""
        if not self.key:
            return self.chain
        signer = Identity(self.key)
        return (*self.chain, member_link(signer, self.run_id, identity.peer_id, self.chain, self.chain[-1].expires))

    def client_chain(self, client: str, owner: Identity | None, now: float) -> Chain:
        """Return what makes the peer `client` a reader of the run for an hour.

        `owner`: the identity of this machine's peer, for an invite that is for that peer only, and for the authority.
        Raises ConfigError if that is needed and missing.
        """
        expires = now + CLIENT_S
        if self.key:
            return (*self.chain, client_link(Identity(self.key), self.run_id, client, expires))
        if owner is not None and (owner.peer_id == self.authority or self.chain):
            return (*self.chain, client_link(owner, self.run_id, client, expires))
        if self.chain:
            raise ConfigError(
                f"this invite is for peer {peer_id_of(self.chain[-1].key)} only: give the --home of that peer"
            )
        return ()

    def __str__(self) -> str:
        check_addresses(self.addresses)
        payload = _Writer().invite(self)
        return f"{PREFIX}{VERSION}{to_base58(payload + _checksum(payload))}"

    @classmethod
    def parse(cls, text: str) -> Invite:
        """Parse what str() returns, with white space anywhere. Raises ConfigError."""
        text = "".join(text.split())
        start = text[: len(PREFIX) + 1].lower()
        if not start.startswith(PREFIX):
            raise ConfigError(f"this is no invite (one begins with {PREFIX}{VERSION}): {_REMEDY}")
        if start != PREFIX + VERSION:
            raise ConfigError(
                f"this invite begins with {start}, this software reads {PREFIX}{VERSION}:"
                " upgrade barnraise on both sides and ask for a new invite"
            )
        try:
            invite = _Reader(_payload(text[len(start) :])).invite()
        except (MultiaddrError, ValueError, *MALFORMED) as error:
            raise ConfigError(f"the invite's content is malformed ({told(error)}): {_REMEDY}") from error
        check_addresses(invite.addresses)
        if invite.key and not _fits(invite):
            raise ConfigError(f"the invite's key does not fit what it grants: {_REMEDY}")
        return invite


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


class _Writer:
    """Writes the fields of an invite: a byte that counts, the run id, the authority's key, the addresses, the links,
    the private key. Numbers are LEB128. A public key is the number of those before it; or, where it is new, that number
    is the count of all before, and the key follows. That of the private key is not written."""

    def __init__(self) -> None:
        self._out = bytearray()
        self._keys: list[bytes] = []

    def invite(self, invite: Invite) -> bytes:
        """Return the one form of `invite`, without the checksum."""
        counts = len(invite.addresses) - 1 | bool(invite.key) << 4 | len(invite.chain) << 5
        self._out += bytes([counts]) + b32decode(invite.run_id.upper())
        self._key(public_key_of(invite.authority))
        for address in invite.addresses:
            self._address(Multiaddr(address).to_bytes())
        for number, link in enumerate(invite.chain, 1):
            self._number(link.guests << 2 | _KINDS.index(link.kind))
            self._number(link.expires)
            if not invite.key or number < len(invite.chain):
                self._key(link.key)
            self._out += link.signature
        self._out += invite.key
        return bytes(self._out)

    def _address(self, raw: bytes) -> None:
        """Write a multiaddr as what lies between the keys in it, each part with its length, whether a key follows, and
        whether it is the last."""
        start, is_last = 0, False
        while not is_last:
            at = raw.find(_P2P, start)
            after = at + len(_P2P) + _KEY_BYTES
            has_key = at >= 0 and after <= len(raw)
            end, after = (at, after) if has_key else (len(raw), len(raw))
            is_last = after == len(raw)
            self._number((end - start) << 2 | has_key << 1 | is_last)
            self._out += raw[start:end]
            if has_key:
                self._key(raw[after - _KEY_BYTES : after])
            start = after

    def _key(self, key: bytes) -> None:
        if key in self._keys:
            self._number(self._keys.index(key))
            return
        self._number(len(self._keys))
        self._keys.append(key)
        self._out += key

    def _number(self, number: int) -> None:
        while number > 0x7F:
            self._out.append(number & 0x7F | 0x80)
            number >>= 7
        self._out.append(number)


class _Reader:
    """Reads what `_Writer` writes. Raises ValueError for anything else."""

    def __init__(self, raw: bytes) -> None:
        self._raw, self._at = raw, 0
        self._keys: list[bytes] = []

    def invite(self) -> Invite:
        """Return the invite; there is one form of each, and nothing may follow it."""
        (counts,) = self._take(1)
        has_key, links = bool(counts >> 4 & 1), counts >> 5
        if links > CHAIN_MAX:
            raise ValueError(f"{links} links, and at most {CHAIN_MAX} are allowed")
        run_id, authority = self._take(RUN_ID_BYTES), self._key()
        addresses = tuple(str(Multiaddr(self._address())) for _ in range((counts & 0xF) + 1))
        chain = [self._link(has_key and number == links) for number in range(1, links + 1)]
        seed = self._take(_KEY_BYTES) if has_key else b""
        if has_key and chain:
            own = public_key_of(Identity(seed).peer_id)
            chain[-1] = msgspec.structs.replace(chain[-1], key=own)
        invite = Invite(run_id_text(run_id), peer_id_of(authority), addresses, tuple(chain), seed)
        if _Writer().invite(invite) != self._raw:
            raise ValueError("it has another form than that of this invite")
        return invite

    def _link(self, is_own: bool) -> Link:
        guests, kind = divmod(self._number(GUESTS_MAX << 2 | 3), 4)
        if kind >= len(_KINDS) or guests > GUESTS_MAX:
            raise ValueError("no link is of this kind, or number of guests")
        expires = self._number(EXPIRES_END - 1)
        return Link(_KINDS[kind], bytes(_KEY_BYTES) if is_own else self._key(), guests, expires, self._take(64))

    def _address(self) -> bytes:
        raw, is_last = b"", False
        while not is_last:
            part = self._number(_ADDRESS_BYTES_MAX << 2 | 3)
            is_last = bool(part & 1)
            raw += self._take(part >> 2) + (_P2P + self._key() if part & 2 else b"")
            if len(raw) > _ADDRESS_BYTES_MAX:
                raise ValueError(f"an address of more than {_ADDRESS_BYTES_MAX} bytes")
        return raw

    def _key(self) -> bytes:
        number = self._number(len(self._keys))
        if number == len(self._keys):
            self._keys.append(self._take(_KEY_BYTES))
        return self._keys[number]

    def _number(self, most: int) -> int:
        number = shift = 0
        while True:
            (byte,) = self._take(1)
            number |= (byte & 0x7F) << shift
            shift += 7
            if number > most or shift > 63:
                raise ValueError(f"a number above {most}")
            if byte < 0x80:
                return number

    def _take(self, count: int) -> bytes:
        taken = self._raw[self._at : self._at + count]
        if len(taken) < count:
            raise ValueError("it ends too early")
        self._at += count
        return taken


def _payload(text: str) -> bytes:
    if len(text) > base58_length(_BYTES_MAX):
        raise ConfigError(f"the invite is longer than any invite: {_REMEDY}")
    try:
        raw = from_base58(text)
    except ValueError as error:
        raise ConfigError(f"the invite has characters that no invite has, or is cut off: {_REMEDY}") from error
    payload, checksum = raw[:-_CHECKSUM_BYTES], raw[-_CHECKSUM_BYTES:]
    if _checksum(payload) != checksum:
        raise ConfigError(f"the invite is damaged (its checksum does not match): {_REMEDY}")
    return payload


def _checksum(payload: bytes) -> bytes:
    return blake3(b"barnraise invite 3" + payload).digest(_CHECKSUM_BYTES)


def _fits(invite: Invite) -> bool:
    """Whether an invite's private key is that of the last link, and the chain is what its signers have signed."""
    if not invite.chain or Identity(invite.key).peer_id != peer_id_of(invite.chain[-1].key):
        return False
    return is_signed(invite.run_id, invite.authority, invite.chain)
