"""The last known addresses of peers. The library's own book forgets them after two minutes.

Addresses are multiaddrs without the trailing `/p2p/<id>` of their peer: freshest first, direct before relayed. Those
that a peer reports of itself are *claims* until a dial has found the peer there: else any identity could have us dial
third parties. `peer.net.strangers.claims` limits how often a claim is dialled.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable
from ipaddress import ip_address, ip_network
from itertools import islice
from pathlib import Path
from typing import Annotated, Final

import msgspec
from multiaddr import Multiaddr
from multiaddr.exceptions import Error as MultiaddrError

from peer.bounds import Address, Latest, Name
from peer.decoding import MALFORMED
from peer.errors import ConfigError, ResourceError
from peer.identity import is_peer_id

_PEERS_MAX: Final = 4096
_CLAIMANTS_MAX: Final = 1024
ADDRESS_CHARS_MAX: Final = 256  # so that all claims together take a few MiB
_HOSTS: Final = ("ip4", "ip6", "dns", "dns4", "dns6", "dnsaddr")
_UNDIALLABLE: Final = ("0.0.0.0", "::")
_CIRCUIT: Final = "/p2p-circuit"
_CLOSED_RANGES: Final = tuple(
    ip_network(network)
    for network in (
        "127.0.0.0/8", "10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "100.64.0.0/10", "169.254.0.0/16",
        "::1/128", "fc00::/7", "fe80::/10",
    )
)  # fmt: skip


class _Stored(msgspec.Struct):
    addresses: Annotated[
        dict[Name, Annotated[list[Address], msgspec.Meta(max_length=64)]], msgspec.Meta(max_length=_PEERS_MAX)
    ]


class AddressBook:
    """Addresses per peer, of at most 4096 peers, and claims of 1024. The least recently added is forgotten first."""

    def __init__(self, addresses_per_peer: int = 16) -> None:
        self._per_peer = addresses_per_peer
        self._book = Latest[str, tuple[str, ...]](_PEERS_MAX)
        self._claims = Latest[str, tuple[str, ...]](_CLAIMANTS_MAX)

    def add(self, peer_id: str, addrs: Iterable[str]) -> None:
        """Add addresses (with or without `/p2p/<id>`), the best first. Skips those that cannot be dialled."""
        self._note(self._book, peer_id, addrs)
        known = self._book.get(peer_id, ())
        self._keep_claims(peer_id, [address for address in self._claims.get(peer_id, ()) if address not in known])

    def claim(self, peer_id: str, addrs: Iterable[str]) -> None:
        """Add addresses of which we have only the word of a peer that we do not trust."""
        known = self._book.get(peer_id, ())
        bare = [_bare(peer_id, address) for address in islice(addrs, self._per_peer)]
        fresh = [address for address in bare if address is not None and address not in known]
        self._note(self._claims, peer_id, fresh)

    def is_claim(self, peer_id: str, address: str) -> bool:
        """Return whether only a claim says that the peer is at this address."""
        return address in self._claims.get(peer_id, ())

    def get(self, peer_id: str) -> tuple[str, ...]:
        """Return the known addresses, best first, claims last."""
        return (self.vouched(peer_id) + self._claims.get(peer_id, ()))[: self._per_peer]

    def vouched(self, peer_id: str) -> tuple[str, ...]:
        """Return the known addresses that are no claims, best first."""
        return self._book.get(peer_id, ())

    def _note(self, book: Latest[str, tuple[str, ...]], peer_id: str, addrs: Iterable[str]) -> None:
        if not is_peer_id(peer_id):
            return
        known = book.get(peer_id, ())
        fresh: list[str] = []
        for address in addrs:
            bare = _bare(peer_id, address)
            if bare is not None and bare not in fresh:
                fresh.append(bare)
            if len(fresh) == self._per_peer:
                break
        merged = fresh + [address for address in known if address not in fresh]
        if not merged:
            return
        merged.sort(key=is_circuit)  # stable: freshness is kept within direct and within relayed addresses
        book[peer_id] = tuple(merged[: self._per_peer])

    def _keep_claims(self, peer_id: str, kept: list[str]) -> None:
        if kept:
            self._claims[peer_id] = tuple(kept)
        else:
            self._claims.pop(peer_id, None)

    def forget(self, peer_id: str) -> None:
        self._book.pop(peer_id, None)
        self._claims.pop(peer_id, None)

    @property
    def peers(self) -> tuple[str, ...]:
        return tuple(self._book)

    def save(self, path: Path) -> None:
        """Write the book atomically. Raises ResourceError."""
        data = msgspec.json.encode(_Stored({peer: list(addresses) for peer, addresses in self._book.items()}))
        temporary = ""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            fd, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name)
            with os.fdopen(fd, "wb") as file:
                file.write(data)
            os.replace(temporary, path)
        except OSError as error:
            if temporary and os.path.exists(temporary):
                os.unlink(temporary)
            raise ResourceError(f"cannot save {path} ({error.strerror}): free some space or change --home") from error

    def load(self, path: Path) -> None:
        """Add what `save` wrote. A missing or torn file adds nothing: it is a cache."""
        try:
            stored = msgspec.json.decode(path.read_bytes(), type=_Stored)
        except (OSError, *MALFORMED):
            return
        for peer_id, addresses in stored.addresses.items():
            self.add(peer_id, addresses)


def is_circuit(address: str) -> bool:
    """Return whether an address leads through a relay."""
    return _CIRCUIT in address


def relay_in(address: str) -> str:
    """Return the peer id of the relay through which an address leads; empty for a direct one."""
    way, circuit, _ = address.partition(_CIRCUIT)
    return way.rpartition("/p2p/")[2] if circuit else ""


def ip_of(address: str) -> str | None:
    """Return the IP address that a dial of this multiaddr goes to, None for a name."""
    family, host = address.split("/")[1:3]
    return host if family in ("ip4", "ip6") else None


def closed_range(ip: str) -> str | None:
    """Return the range of an IP address that means another machine on every network, None for a public one."""
    parsed = ip_address(ip.partition("%")[0])
    return next((str(network) for network in _CLOSED_RANGES if parsed in network), None)


def split_address(address: str) -> tuple[str, str]:
    """Split a full address into (address, peer id). Raises ConfigError unless it ends in `/p2p/<id>`."""
    bare, separator, peer_id = address.strip().rpartition("/p2p/")
    if not separator or not is_peer_id(peer_id):
        raise ConfigError(f"the address {address} names no peer: end it in /p2p/<peer id>")
    if _bare(peer_id, bare) is None:
        raise ConfigError(f"the address {address} cannot be dialled: use one like /ip4/203.0.113.7/tcp/4001/p2p/<id>")
    return bare, peer_id


def _bare(peer_id: str, address: str) -> str | None:
    """Return the address without the peer's id, None if it cannot be dialled."""
    if len(address) > ADDRESS_CHARS_MAX:
        return None
    address = address.strip().removesuffix(f"/p2p/{peer_id}")
    try:
        parts = list(Multiaddr(address).items())
    except (MultiaddrError, ValueError, KeyError):
        return None
    if len(parts) < 2 or parts[0][0].name not in _HOSTS or parts[1][0].name != "tcp":
        return None
    if parts[0][1] in _UNDIALLABLE or parts[1][1] == "0":
        return None
    if len(parts) == 2:
        return address
    relayed = len(parts) == 4 and parts[2][0].name == "p2p" and address.endswith(_CIRCUIT)
    return address if relayed else None
