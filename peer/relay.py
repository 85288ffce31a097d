"""Being reachable without an open port: a place at public relays, calls through them, and holes punched past them.

Circuit Relay v2 and DCUtR as specified by libp2p; hivemind's Go daemon (`peer relay`) and other libp2p relays serve. A
peer behind NAT reserves a place at each of its relays and announces `<relay>/p2p/<relay id>/p2p-circuit`. Once two
peers are connected through a relay, both try to punch a direct connection, which calls then prefer.
"""

from __future__ import annotations

from typing import Any, Final, Protocol

import trio
from libp2p.peer.id import ID
from libp2p.relay.circuit_v2 import (
    PROTOCOL_ID,
    CircuitV2Protocol,
    CircuitV2Transport,
    DCUtRProtocol,
    RelayLimits,
)
from libp2p.relay.circuit_v2.config import RelayConfig, RelayRole
from libp2p.tools.anyio_service import background_trio_service
from multiaddr import Multiaddr

from peer.addressbook import split_address
from peer.channel import LOST
from peer.dialing import Connection
from peer.errors import DialError
from peer.events import EventLog

_REFRESH_S: Final = 600.0  # relays grant an hour at the most; the Go daemon of hivemind half of it
_STEP_S: Final = 10.0
_RETRY_S: Final = 5.0
_LIMITS: Final = RelayLimits(duration=3600, data=1 << 40, max_circuit_conns=64, max_reservations=64)


class Dialer(Protocol):
    """What this needs of the host's connections."""

    async def dial(self, peer: str, addresses: tuple[str, ...]) -> Connection: ...

    def live(self, peer: str) -> list[Connection]: ...


class RelayClient:
    """Our places at relays and our way through those of others."""

    def __init__(self, libp2p_host: Any, dialer: Dialer, relays: tuple[str, ...], events: EventLog) -> None:
        self._host = libp2p_host
        self._dialer = dialer
        self._relays = relays
        self._events = events
        self._reserved: dict[str, None] = {}
        self._stop = CircuitV2Protocol(libp2p_host, limits=_LIMITS, allow_hop=False)
        # Without the client role a dial does not first reserve a place for the one who dials.
        self._transport = CircuitV2Transport(
            libp2p_host, self._stop, RelayConfig(roles=RelayRole.STOP, limits=_LIMITS)
        )
        self._wants_holes = trio.Event()

    @property
    def addresses(self) -> tuple[str, ...]:
        """The circuit addresses under which we can be reached now."""
        return tuple(f"{relay}/p2p-circuit" for relay in self._reserved)

    async def run(self) -> None:
        """Hold a place at every relay and punch holes, until cancelled."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._punch_holes)
            if self._relays:
                self._wants_holes.set()
                nursery.start_soon(self._accept_circuits)
            for relay in self._relays:
                nursery.start_soon(self._hold_place, relay)

    async def dial(self, address: str, peer: str) -> Connection:
        """A connection to `peer` through the relay in `address`; DialError says which of the two failed."""
        relay, relay_id = split_address(address.removesuffix("/p2p-circuit"))
        if not self._dialer.live(relay_id):
            await self._dialer.dial(relay_id, (relay,))
        self._wants_holes.set()
        try:
            return await self._transport.dial(Multiaddr(f"{address}/p2p/{peer}"))
        except (ConnectionError, *LOST) as error:
            reason = "holds no place at the relay, or the relay is full"
            raise DialError(f"cannot reach {peer} through {relay}: it {reason}.", "refused") from error

    async def _accept_circuits(self) -> None:
        async with background_trio_service(self._stop):
            await trio.sleep_forever()

    async def _punch_holes(self) -> None:
        await self._wants_holes.wait()  # no relayed connection, no hole to punch
        async with background_trio_service(DCUtRProtocol(self._host)):
            await trio.sleep_forever()

    async def _hold_place(self, relay: str) -> None:
        bare, relay_id = split_address(relay)
        while True:
            connection = await self._reserve(relay, bare, relay_id)
            if connection is None:
                self._set_reserved(relay, False)
                await trio.sleep(_RETRY_S)
                continue
            self._set_reserved(relay, True)
            with trio.move_on_after(_REFRESH_S):
                await connection.event_closed.wait()
                self._set_reserved(relay, False)

    async def _reserve(self, relay: str, bare: str, relay_id: str) -> Connection | None:
        """The connection to a relay at which we now have a place, or None."""
        peer_id = ID.from_base58(relay_id)
        with trio.move_on_after(_STEP_S):
            try:
                alive = self._dialer.live(relay_id)
                connection = alive[0] if alive else await self._dialer.dial(relay_id, (bare,))
                stream = await self._host.new_stream(peer_id, [PROTOCOL_ID])
                if await self._transport._make_reservation(stream, peer_id):
                    return connection
                await stream.reset()
            except (DialError, *LOST) as error:
                self._events.emit("relay_failed", relay=relay, reason=str(error))
        return None

    def _set_reserved(self, relay: str, reserved: bool) -> None:
        if reserved == (relay in self._reserved):
            return
        if reserved:
            self._reserved[relay] = None
        else:
            del self._reserved[relay]
        self._events.emit("relay_reserved" if reserved else "relay_lost", relay=relay)
