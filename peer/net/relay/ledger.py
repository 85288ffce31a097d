"""Promises of a relay to peers: reservations and circuits, counted by peer, by address prefix and in all.

One machine has as many identities as it likes, but few address prefixes. So a prefix has a share of everything.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import trio
from libp2p.peer.id import ID


@dataclass(frozen=True)
class RelayLimits:
    """Caps of a relay. A relayed connection may be a peer's only link to its round, so the defaults are generous."""

    reservations: int = 512
    reservations_per_prefix: int = 64
    """A whole office behind one router."""
    reservation_s: int = 3600
    circuits: int = 1024
    circuits_per_peer: int = 128
    """At either end. Fewer than the streams that may be open on its connection to us."""
    circuit_s: int = 24 * 3600
    circuit_bytes: int = 1 << 40
    """In each direction."""
    rate_bytes_per_s: float | None = None
    """Of all that is forwarded; None for no cap."""


class Full(Exception):
    """A cap is reached."""


@dataclass(frozen=True)
class _Reservation:
    prefix: str
    until: float


@dataclass(frozen=True, eq=False)
class _Circuit:
    ends: tuple[ID, ID]
    prefix: str


class RelayLedger:
    """The reservations and circuits of one relay. `clock` returns seconds."""

    def __init__(self, limits: RelayLimits, clock: Callable[[], float] = trio.current_time) -> None:
        self._limits = limits
        self._clock = clock
        self._reservations: dict[ID, _Reservation] = {}
        self._circuits: set[_Circuit] = set()

    @property
    def reservations(self) -> int:
        """Held now."""
        self._drop_expired()
        return len(self._reservations)

    @property
    def circuits(self) -> int:
        """Open now."""
        return len(self._circuits)

    def reserve(self, peer: ID, prefix: str) -> None:
        """Give or renew a reservation. Raises Full; the peer keeps the one that it has."""
        self._drop_expired()
        others = [held.prefix for holder, held in self._reservations.items() if holder != peer]
        limits = self._limits
        if len(others) >= limits.reservations or others.count(prefix) >= limits.reservations_per_prefix:
            raise Full
        self._reservations[peer] = _Reservation(prefix, self._clock() + limits.reservation_s)

    def holds(self, peer: ID) -> bool:
        """Whether a peer has a reservation."""
        held = self._reservations.get(peer)
        return held is not None and held.until > self._clock()

    def forget(self, peer: ID) -> None:
        """End the reservation of a peer that has left."""
        self._reservations.pop(peer, None)

    @contextmanager
    def circuit(self, caller: ID, prefix: str, target: ID) -> Iterator[None]:
        """Count as a circuit inside the block. Raises Full."""
        if (
            len(self._circuits) >= self._limits.circuits
            or self._opened_from(prefix) >= self._share_of(prefix)
            or any(self._open_at(peer) >= self._limits.circuits_per_peer for peer in (caller, target))
        ):
            raise Full
        mine = _Circuit((caller, target), prefix)
        self._circuits.add(mine)
        try:
            yield
        finally:
            self._circuits.remove(mine)

    def _opened_from(self, prefix: str) -> int:
        return sum(each.prefix == prefix for each in self._circuits)

    def _share_of(self, prefix: str) -> int:
        """Half of what other prefixes leave: a few of them never have all."""
        others = len(self._circuits) - self._opened_from(prefix)
        return (self._limits.circuits - others + 1) // 2

    def _open_at(self, peer: ID) -> int:
        return sum(peer in each.ends for each in self._circuits)

    def _drop_expired(self) -> None:
        now = self._clock()
        for peer in [peer for peer, held in self._reservations.items() if held.until <= now]:
            del self._reservations[peer]
