"""Being reachable without an open port: places at public relays, connections through them, and holes punched past them.

A peer behind NAT holds a place at each of its relays (`peer relay`, or any libp2p relay) and announces
`<relay>/p2p/<relay id>/p2p-circuit`. When somebody connects to it there, it first tries to dial back, then both dial
each other at the same moment (DCUtR, https://github.com/libp2p/specs/blob/master/relay/DCUtR.md): most home routers let
such connections through. Calls prefer the direct connection as soon as there is one.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final, Literal, Protocol

import trio
from libp2p.connection_types import ConnectionType
from libp2p.peer.id import ID
from libp2p.relay.circuit_v2.dcutr import DCUtRProtocol, _local_tcp_listen_addrs
from libp2p.tools.anyio_service import background_trio_service
from multiaddr import Multiaddr

from peer.errors import DialError, DialReason
from peer.events import EventLog
from peer.net import circuit_relay as circuit
from peer.net.address_book import is_circuit, split_address
from peer.net.dialing import Connection
from peer.net.libp2p_fixes.peer_cleanup import OnConnections
from peer.net.stream_channel import LOST

Path = Literal["direct", "hole-punched", "relayed"]

_STEP_S: Final = 10.0
_RETRY_S: Final = (1.0, 2.0, 5.0, 10.0, 30.0)
_REFRESH_MAX_S: Final = 600.0
_DIAL_BACK_S: Final = 3.0
_PUNCH_AFTER_S: Final = (0.0, 5.0, 30.0)  # a punch misses when the two dials are badly timed: try again
_PUNCH_S: Final = 4  # the kernel repeats a SYN that a NAT has dropped after 1 s and after 3 s
_PUNCH_ROUNDS: Final = 2
_PUNCH_ADDRESSES_MAX: Final = 8
_ACCEPTS_AT_ONCE: Final = 32

_REFUSALS: Final[dict[str, tuple[DialReason, str]]] = {
    "NO_RESERVATION": ("refused", "it holds no place there any more: is it running?"),
    "CONNECTION_FAILED": ("unreachable", "the relay cannot reach it: is it running?"),
    "RESOURCE_LIMIT_EXCEEDED": ("refused", "the relay is full: use another one."),
    "PERMISSION_DENIED": ("refused", "the relay does not serve us: use another one."),
}


class Dialer(Protocol):
    """What this needs of the host's connections."""

    async def dial(self, peer: str, addresses: tuple[str, ...]) -> Connection: ...

    def live(self, peer: str) -> list[Connection]: ...


class Traversal:
    """Our places at relays, our way to peers who hold some, and what kind of path each peer got."""

    def __init__(self, libp2p_host: Any, dialer: Dialer, relays: tuple[str, ...], events: EventLog) -> None:
        self._host = libp2p_host
        self._dialer = dialer
        self._relays = relays
        self._events = events
        self._reserved: list[str] = []
        self._own_relays = frozenset(split_address(relay)[1] for relay in relays)
        self._relay_ids = set(self._own_relays)
        self._accepting = trio.CapacityLimiter(_ACCEPTS_AT_ONCE)
        self._punch = _HolePunch(libp2p_host, self._until_direct, self._on_punch_ended)
        self._punched: set[str] = set()
        self._unpunchable: set[str] = set()
        self._news = trio.Event()
        self._scope = trio.CancelScope()
        self.changed: Callable[[], None] = lambda: None
        """Called when `addresses` change."""
        self.ask_addresses: Callable[[str], Awaitable[tuple[str, ...]]] = _nowhere
        """Asks a connected peer where it listens; direct addresses only."""

    @property
    def addresses(self) -> tuple[str, ...]:
        """The circuit addresses under which we can be reached now, freshest first."""
        return tuple(f"{relay}/p2p-circuit" for relay in reversed(self._reserved))

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
        """As `path`, but not before a hole punch that may still better it has ended."""
        while (path := self.path(peer)) == "relayed" and peer not in self._unpunchable:
            await self._news.wait()
        return path

    async def _until_direct(self, peer: str) -> None:
        while self.path(peer) in (None, "relayed"):
            await self._news.wait()

    async def run(self) -> None:
        """Hold a place at every relay, answer circuits and punch holes, until cancelled."""
        self._host.get_network().register_notifee(OnConnections(lambda peer: self._announce(), lambda peer: None))
        with self._scope:
            async with background_trio_service(self._punch), trio.open_nursery() as nursery:
                if self._relays:
                    self._host.set_stream_handler(circuit.STOP, self._on_circuit)
                for relay in self._relays:
                    nursery.start_soon(self._hold_place, relay)
                await trio.sleep_forever()

    def forget(self, peer: ID) -> None:
        """A peer is no longer connected: how it was reached does not matter any more."""
        self._punched.discard(str(peer))
        self._unpunchable.discard(str(peer))
        if str(peer) not in self._own_relays:
            self._relay_ids.discard(str(peer))
        self._punch.on_peer_disconnected(peer)

    def stop(self) -> None:
        """Give up our places: `run` returns."""
        self._scope.cancel()

    async def dial(self, address: str, peer: str) -> Connection:
        """A connection to `peer` by a circuit address; DialError says which of relay and peer failed, and why."""
        relay, relay_id = split_address(address.removesuffix("/p2p-circuit"))
        self._relay_ids.add(relay_id)
        if not self._dialer.live(relay_id):
            await self._dialer.dial(relay_id, (relay,))
        self._unpunchable.discard(peer)
        try:
            return await circuit.connect(self._host, ID.from_base58(relay_id), ID.from_base58(peer))
        except circuit.CircuitRefused as error:
            reason, why = _REFUSALS.get(error.status, ("refused", f"{error}."))
            raise DialError(f"cannot reach {peer} through the relay {relay}: {why}", reason) from error

    # -- our own places ------------------------------------------------------------------------------------------

    async def _hold_place(self, relay: str) -> None:
        failures = 0
        while True:
            place, connection = await self._reserve(relay)
            if place is None:
                self._set_reserved(relay, False)
                await trio.sleep(_RETRY_S[min(failures, len(_RETRY_S) - 1)])
                failures += 1
                continue
            failures = 0
            self._set_reserved(relay, True)
            with trio.move_on_after(min(place.held_s / 2, _REFRESH_MAX_S)):
                await connection.event_closed.wait()
                self._set_reserved(relay, False)

    async def _reserve(self, relay: str) -> tuple[circuit.Reservation | None, Connection]:
        """The place we now hold, None if we got none, and the connection that it hangs on."""
        bare, relay_id = split_address(relay)
        reason = f"no answer within {_STEP_S:g} s"
        with trio.move_on_after(_STEP_S):
            try:
                alive = self._dialer.live(relay_id)
                connection = alive[0] if alive else await self._dialer.dial(relay_id, (bare,))
                return await circuit.reserve(self._host, ID.from_base58(relay_id)), connection
            except (DialError, *LOST) as error:
                reason = str(error)
        self._events.emit("relay_failed", relay=relay, reason=reason)
        return None, None

    def _set_reserved(self, relay: str, reserved: bool) -> None:
        if reserved == (relay in self._reserved):
            return
        if reserved:
            self._reserved.append(relay)
        else:
            self._reserved.remove(relay)
        self._events.emit("relay_reserved" if reserved else "relay_lost", relay=relay)
        self.changed()

    # -- whom a relay brings ---------------------------------------------------------------------------------------

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
            await muxed.event_closed.wait()  # the connection lives on this stream
            nursery.cancel_scope.cancel()

    async def _seek_direct(self, peer_id: ID) -> None:
        """Dial back, then punch. The side that was called does it, so that the two never collide."""
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
        self._news.set()
        self._news = trio.Event()


class _HolePunch(DCUtRProtocol):
    """The library's DCUtR exchanges addresses and agrees on the moment. When to begin, whom to dial and for how long is
    ours: it would poll all connections, and try for half a minute what a NAT decides in the first seconds.
    """

    def __init__(
        self, host: Any, until_direct: Callable[[str], Awaitable[None]], ended: Callable[[str, Path], None]
    ) -> None:
        super().__init__(host, dial_timeout=_PUNCH_S)
        self._until_direct = until_direct
        self._ended = ended

    def is_under_way(self, peer: str) -> bool:
        return ID.from_base58(peer) in self._in_progress

    async def _perform_hole_punch(self, peer_id: ID, addrs: list[Multiaddr], as_responder: bool = False) -> bool:
        """Dial from our listening port (the one whose mapping both NATs expect) while the peer does the same."""
        wanted = [address for address in addrs if not is_circuit(str(address))][:_PUNCH_ADDRESSES_MAX]
        source = next(((ip, port) for family, ip, port in _local_tcp_listen_addrs(self.host) if family == 4), None)
        punched = False
        for _ in range(_PUNCH_ROUNDS):
            if not wanted or punched:
                break
            async with trio.open_nursery() as nursery:
                for address in wanted:
                    nursery.start_soon(self._dial_peer, peer_id, address, source, as_responder)
                with trio.move_on_after(_PUNCH_S):
                    await self._until_direct(str(peer_id))
                    punched = True
                nursery.cancel_scope.cancel()
        self._ended(str(peer_id), "hole-punched" if punched else "relayed")
        return punched

    async def _try_unilateral_upgrade(self, peer_id: ID) -> bool:
        return False  # `Traversal` has tried that

    async def _auto_drive_loop(self) -> None:
        await trio.sleep_forever()


async def _nowhere(peer: str) -> tuple[str, ...]:
    return ()


@dataclass(frozen=True)
class Reachability:
    """How this machine and one peer reach each other, in one word and in one sentence."""

    kind: Literal["public", "hole-punched", "relayed", "unreachable"]
    detail: str


class Reacher(Protocol):
    """What `probe` needs of a host."""

    @property
    def traversal(self) -> Traversal: ...

    async def connect(self, peer_id: str, *, timeout_s: float) -> None: ...


async def probe(host: Reacher, peer: str, *, timeout_s: float) -> Reachability:
    """Connect to `peer` if need be, give a hole punch the time to succeed, and say which path is left to us."""
    path: Path | None = None
    with trio.move_on_after(timeout_s):
        try:
            await host.connect(peer, timeout_s=timeout_s)
        except DialError as error:
            return Reachability("unreachable", str(error))
        path = await host.traversal.settled_path(peer)
    match path or host.traversal.path(peer):
        case "direct":
            return Reachability("public", f"{peer} and this machine are connected directly")
        case "hole-punched":
            return Reachability("hole-punched", f"{peer} is connected directly, through a hole punched into the NAT")
        case "relayed":
            return Reachability("relayed", f"{peer} is connected through a relay only: forward a TCP port for speed")
        case _:
            return Reachability("unreachable", f"the connection to {peer} was lost: try again")
