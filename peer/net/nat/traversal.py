"""Being reachable without an open port: reservations at public relays, circuits through them, hole punching.

A peer behind NAT holds a reservation at each of its relays (`peer relay`, or any libp2p relay) and announces
`<relay>/p2p/<relay id>/p2p-circuit`. When another peer connects to it there, it first tries to dial back. If that
fails, both dial each other at the same moment (`peer.net.nat.hole_punch`): most home routers let such connections
through. Calls prefer the direct connection as soon as there is one.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Any, Final, Protocol

import trio
from libp2p.connection_types import ConnectionType
from libp2p.peer.id import ID
from libp2p.tools.anyio_service import background_trio_service

from peer.catalogue.machine import ClientMode, ClientModeEnded, RelayFailed, RelayReserved
from peer.errors import DialError, DialReason
from peer.events import EventLog
from peer.net.address_book import split_address
from peer.net.dialing import Connection
from peer.net.libp2p_fixes.identify import learn_observed_address
from peer.net.libp2p_fixes.inbound_limits import inbound_gate
from peer.net.libp2p_fixes.peer_cleanup import OnConnections
from peer.net.nat import circuit_relay as circuit
from peer.net.nat.hole_punch import HolePunch, Path
from peer.net.nat.port_mapping import keep_mapped
from peer.net.stream_channel import LOST
from peer.notifier import Notifier

_STEP_S: Final = 10.0
_RETRY_S: Final = (1.0, 2.0, 5.0, 10.0, 30.0)
_REFRESH_MAX_S: Final = 600.0
_DIAL_BACK_S: Final = 3.0
_PUNCH_AFTER_S: Final = (0.0, 5.0, 30.0)  # a punch misses when the two dials are badly timed: try again
_ACCEPTS_AT_ONCE: Final = 32

_REFUSALS: Final[dict[str, tuple[DialReason, str]]] = {
    "NO_RESERVATION": ("refused", "it holds no reservation there any more: check that it is running"),
    "CONNECTION_FAILED": ("unreachable", "the relay cannot reach it: check that it is running"),
    "RESOURCE_LIMIT_EXCEEDED": ("refused", "the relay is full: use another one"),
    "PERMISSION_DENIED": ("refused", "the relay does not serve us: use another one"),
}


class Dialer(Protocol):
    """The methods of the host's connections that traversal needs."""

    async def dial(self, peer: str, addresses: tuple[str, ...]) -> Connection: ...

    def live(self, peer: str) -> list[Connection]: ...


class Traversal:
    """This host's relay reservations, its circuits to peers behind relays, and the kind of path to each peer."""

    def __init__(self, libp2p_host: Any, dialer: Dialer, relays: tuple[str, ...], events: EventLog) -> None:
        self._host = libp2p_host
        self._dialer = dialer
        self._relays = relays
        self._events = events
        self._reserved: list[str] = []
        self._own_relays = frozenset(split_address(relay)[1] for relay in relays)
        self._relay_ids = set(self._own_relays)
        self._accepting = trio.CapacityLimiter(_ACCEPTS_AT_ONCE)
        self._punch = HolePunch(libp2p_host, self._until_direct, self._on_punch_ended)
        self._punched: set[str] = set()
        self._unpunchable: set[str] = set()
        self._news = Notifier()
        self._scope = trio.CancelScope()
        self.changed: Callable[[], None] = lambda: None
        """Called when `addresses` change."""
        self.port_to_map: Callable[[], int | None] = lambda: None
        """Returns the port that the router is asked to forward; None for none."""
        self.mapped: tuple[str, ...] = ()
        """The address at the router that leads here, if it forwards the port."""
        self._is_client = False
        self.ask_addresses: Callable[[str], Awaitable[tuple[str, ...]]] = _nowhere
        """Asks a connected peer for the direct addresses at which it listens."""

    @property
    def addresses(self) -> tuple[str, ...]:
        """The circuit addresses under which we can be reached now, freshest first."""
        return tuple(f"{relay}/p2p-circuit" for relay in reversed(self._reserved))

    @property
    def is_client(self) -> bool:
        """Whether no other peer can dial this host: then it announces no address, and dials the others."""
        return self._is_client and not self._reserved and not self.mapped

    def direct(self, announced: tuple[str, ...], listening: Sequence[str]) -> tuple[str, ...]:
        """Return the addresses to announce, from those that the user names and those where the host listens."""
        return () if self.is_client else announced or (*self.mapped, *listening)

    def set_client(self, is_client: bool) -> None:
        """Note whether others can dial this host at an address of its own."""
        if is_client != self._is_client:
            self._is_client = is_client
            self._events.emit(ClientMode() if is_client else ClientModeEnded())
            self.changed()

    def is_relay(self, peer: str) -> bool:
        """Whether we know `peer` as a relay, which speaks none of our protocols."""
        return peer in self._relay_ids

    def path(self, peer: str) -> Path | None:
        """The best path to a connected peer; None if it is not connected."""
        live = self._dialer.live(peer)
        if not live:
            return None
        if all(connection.get_connection_type() == ConnectionType.RELAYED for connection in live):
            return "relayed"
        return "hole-punched" if peer in self._punched or self._punch.is_under_way(peer) else "direct"

    async def settled_path(self, peer: str) -> Path | None:
        """Return `path` once no hole punch that may improve it is under way."""
        while (path := self.path(peer)) == "relayed" and peer not in self._unpunchable:
            await self._news.wait()
        return path

    async def _until_direct(self, peer: str) -> None:
        while self.path(peer) in (None, "relayed"):
            await self._news.wait()

    async def run(self) -> None:
        """Hold a reservation at every relay, answer circuits and punch holes, until cancelled."""
        self._host.get_network().register_notifee(OnConnections(lambda peer: self._announce(), lambda peer: None))
        with self._scope:
            async with background_trio_service(self._punch), trio.open_nursery() as nursery:
                if self._relays:
                    self._host.set_stream_handler(circuit.STOP, self._on_circuit)
                for relay in self._relays:
                    nursery.start_soon(self._hold_reservation, relay)
                if (port := self.port_to_map()) is not None:
                    nursery.start_soon(keep_mapped, port, self._events, self._set_mapped)
                await trio.sleep_forever()

    def _set_mapped(self, address: str) -> None:
        self.mapped = (address,)
        self.changed()

    def forget(self, peer: ID) -> None:
        """Forget how a peer was reached that is no longer connected."""
        self._punched.discard(str(peer))
        self._unpunchable.discard(str(peer))
        if str(peer) not in self._own_relays:
            self._relay_ids.discard(str(peer))
        self._punch.on_peer_disconnected(peer)

    def stop(self) -> None:
        """Give up the reservations: `run` returns."""
        self._scope.cancel()

    async def dial(self, address: str, peer: str) -> Connection:
        """Connect to `peer` by a circuit address. Raises DialError: whether relay or peer failed, and why."""
        relay, relay_id = split_address(address.removesuffix("/p2p-circuit"))
        self._relay_ids.add(relay_id)
        try:
            if not self._dialer.live(relay_id):
                await learn_observed_address(self._host, await self._dialer.dial(relay_id, (relay,)))
        finally:
            if relay_id not in self._own_relays and not self._dialer.live(relay_id):
                self._relay_ids.discard(relay_id)  # it will not be `forget` that does it
        self._unpunchable.discard(peer)
        try:
            return await circuit.connect(self._host, ID.from_base58(relay_id), ID.from_base58(peer))
        except circuit.CircuitRefused as error:
            reason, why = _REFUSALS.get(error.status, ("refused", str(error)))
            raise DialError(f"cannot reach {peer} through the relay {relay}: {why}", reason) from error

    # -- our own reservations ------------------------------------------------------------------------------------

    async def _hold_reservation(self, relay: str) -> None:
        failures = 0
        while True:
            reservation, connection = await self._reserve(relay)
            if reservation is None:
                self._set_reserved(relay, False)
                await trio.sleep(_RETRY_S[min(failures, len(_RETRY_S) - 1)])
                failures += 1
                continue
            failures = 0
            self._set_reserved(relay, True)
            with trio.move_on_after(min(reservation.held_s / 2, _REFRESH_MAX_S)):
                await connection.event_closed.wait()
                self._set_reserved(relay, False)

    async def _reserve(self, relay: str) -> tuple[circuit.Reservation | None, Connection]:
        """Return the reservation, None if the relay gave none, and the connection that it depends on."""
        bare, relay_id = split_address(relay)
        reason = f"no answer within {_STEP_S:g} s"
        with trio.move_on_after(_STEP_S):
            try:
                alive = self._dialer.live(relay_id)
                connection = alive[0] if alive else await self._dialer.dial(relay_id, (bare,))
                reservation = await circuit.reserve(self._host, ID.from_base58(relay_id))
                await learn_observed_address(self._host, connection)
                return reservation, connection
            except (DialError, *LOST) as error:
                reason = str(error)
        self._events.emit(RelayFailed(relay=relay, reason=reason))
        return None, None

    def _set_reserved(self, relay: str, reserved: bool) -> None:
        if reserved == (relay in self._reserved):
            return
        if reserved:
            self._reserved.append(relay)
        else:
            self._reserved.remove(relay)
        if reserved:
            self._events.emit(RelayReserved(relay=relay))
        else:
            self._events.emit("relay_lost", relay=relay)
        self.changed()

    # -- peers that a relay connects to us -------------------------------------------------------------------------

    async def _on_circuit(self, stream: Any) -> None:
        try:
            self._accepting.acquire_on_behalf_of_nowait(stream)
        except trio.WouldBlock:
            await stream.reset()
            return
        try:
            muxed = await circuit.accept(self._host, stream)
        finally:
            self._accepting.release_on_behalf_of(stream)
        if muxed is None:
            return
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._seek_direct, muxed.peer_id)
            relay = f"relay {stream.muxed_conn.peer_id}"
            await inbound_gate(self._host.get_network()).hold(muxed, relay)  # the connection lives on this stream
            nursery.cancel_scope.cancel()

    async def _seek_direct(self, peer_id: ID) -> None:
        """Dial back, then punch. Only the side that was called does this, so that the two never collide."""
        peer = str(peer_id)
        with trio.move_on_after(_DIAL_BACK_S), suppress(DialError):  # it may be behind NAT, as we are
            await self._dialer.dial(peer, await self.ask_addresses(peer))
        for pause_s in _PUNCH_AFTER_S:
            await trio.sleep(pause_s)
            if self.path(peer) != "relayed" or await self._punch.initiate_hole_punch(peer_id):
                return
            self._on_punch_ended(peer, "relayed")

    def _on_punch_ended(self, peer: str, path: Path) -> None:
        self._punched.discard(peer)
        self._unpunchable.discard(peer)
        if path != "direct":
            (self._punched if path == "hole-punched" else self._unpunchable).add(peer)
        self._events.emit("hole_punch_ended", peer=peer, path=path)
        self._announce()

    def _announce(self) -> None:
        self._news.notify()


async def _nowhere(peer: str) -> tuple[str, ...]:
    return ()
