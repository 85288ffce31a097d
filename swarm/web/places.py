"""The places of a web server: how many connections there may be, and which one gives way to a newcomer.

A socket costs its client nothing. So a connection keeps its place against newcomers only while a request that was let
in is answered on it. All others give way, the longest at rest first, and last those whose clients have shown a key.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import Final

from starlette.types import Scope

from peer.net.address_prefix import prefix_of
from peer.notifier import Notifier

CONNECTIONS_MAX: Final = 512
STRANGERS_MAX: Final = 32
"""Connections of one IPv4 address, or /64, that have shown no valid key."""
_PLACE: Final = "place"


@dataclass(eq=False)
class ClientPlace:
    """The place of one connection."""

    origin: str
    """The client's IPv4 address, or /64; empty for this machine, which has no limit of its own."""
    close: Callable[[], None]
    known: bool = False
    """Whether a request came on it that was let in."""
    answering: bool = False
    """Whether such a request is being answered."""

    @property
    def state(self) -> dict[str, ClientPlace]:
        """What the scope of each request on this connection has as its state."""
        return {_PLACE: self}


class ClientPlaces:
    """All connections, the longest at rest first."""

    def __init__(self) -> None:
        self._open: dict[ClientPlace, None] = {}
        self._fewer = Notifier()

    def __len__(self) -> int:
        return len(self._open)

    def take(self, ip: str, close: Callable[[], None]) -> ClientPlace | None:
        """Return a place for a new connection, for which another one may be closed; None if all are being answered."""
        place = ClientPlace(_origin(ip), close)
        alike = [one for one in self._open if one.origin == place.origin and not one.known]
        if place.origin and len(alike) >= STRANGERS_MAX:
            self._end(alike[0])
        elif len(self._open) >= CONNECTIONS_MAX:
            at_rest = sorted((one for one in self._open if not one.answering), key=lambda one: one.known)
            if not at_rest:
                return None
            self._end(at_rest[0])
        self._open[place] = None
        return place

    def rest(self, place: ClientPlace) -> None:
        """Note that the request on this connection was answered."""
        place.answering = False
        if self._open.pop(place, self) is None:  # else it gave way meanwhile
            self._open[place] = None

    def leave(self, place: ClientPlace) -> None:
        """Free a place."""
        self._open.pop(place, None)
        self._fewer.notify()

    async def empty(self, timeout_s: float) -> None:
        """Wait until no connection is left, or time is up."""
        await self._fewer.until(lambda: not self._open, timeout_s)

    def end_all(self) -> None:
        """Close every connection."""
        for place in self._open:
            place.close()

    def _end(self, place: ClientPlace) -> None:
        self.leave(place)
        place.close()


def let_in(scope: Scope) -> None:
    """Note that a request showed what is asked of it, as a key: its client counts as known."""
    if isinstance(place := scope.get("state", {}).get(_PLACE), ClientPlace):
        place.known = True


def keep_place(scope: Scope) -> None:
    """Note that a request which was let in is being answered: its connection gives way to none until it is."""
    if isinstance(place := scope.get("state", {}).get(_PLACE), ClientPlace):
        place.known = place.answering = True


def _origin(ip: str) -> str:
    address: IPv4Address | IPv6Address = ip_address(ip.partition("%")[0])
    if isinstance(address, IPv6Address) and address.ipv4_mapped is not None:
        address = address.ipv4_mapped
    if address.is_loopback:
        return ""
    return str(address) if address.version == 4 else prefix_of(str(address))
