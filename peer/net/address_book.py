"""The last known addresses of peers. The library's own book forgets them after two minutes.

Addresses are multiaddrs without the trailing `/p2p/<id>` of their peer: freshest first, direct before relayed.
"""

from __future__ import annotations

import os
import tempfile
from collections import OrderedDict
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Final

import msgspec
from multiaddr import Multiaddr
from multiaddr.exceptions import Error as MultiaddrError

from peer.bounds import Address, Name
from peer.decoding import MALFORMED
from peer.errors import ConfigError, ResourceError
from peer.identity import is_peer_id

_PEERS_MAX: Final = 4096
ADDRESS_CHARS_MAX: Final = 512
_HOSTS: Final = ("ip4", "ip6", "dns", "dns4", "dns6", "dnsaddr")
_UNDIALLABLE: Final = ("0.0.0.0", "::")
_CIRCUIT: Final = "/p2p-circuit"


class _Stored(msgspec.Struct):
    addresses: Annotated[
        dict[Name, Annotated[list[Address], msgspec.Meta(max_length=64)]], msgspec.Meta(max_length=_PEERS_MAX)
    ]


class AddressBook:
    """Addresses per peer, of at most 4096 peers. The least recently added is forgotten first."""

    def __init__(self, addresses_per_peer: int = 16) -> None:
        self._per_peer = addresses_per_peer
        self._book: OrderedDict[str, tuple[str, ...]] = OrderedDict()

    def add(self, peer_id: str, addrs: Iterable[str]) -> None:
        """Add addresses (with or without `/p2p/<id>`), the best first. Skips those that cannot be dialled."""
        if not is_peer_id(peer_id):
            return
        known = self._book.pop(peer_id, ())
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
        self._book[peer_id] = tuple(merged[: self._per_peer])
        while len(self._book) > _PEERS_MAX:
            self._book.popitem(last=False)

    def get(self, peer_id: str) -> tuple[str, ...]:
        """Return the known addresses, best first."""
        return self._book.get(peer_id, ())

    def forget(self, peer_id: str) -> None:
        self._book.pop(peer_id, None)

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
