"""The connections of one host: to each peer that it calls one for control and, on demand, one for bulk.

Control calls share the oldest direct connection. Bulk calls have their own, so that a heartbeat never waits for a
100 MB payload (measured on a 20 Mbit/s link: 7 ms instead of 53).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, Final

import trio
from libp2p.connection_types import ConnectionType
from libp2p.peer.id import ID
from multiaddr import Multiaddr

from peer.errors import ConnectionLost, DialError
from peer.identity import is_peer_id
from peer.net.address_book import AddressBook, is_circuit, relay_in
from peer.net.admissions import Admissions
from peer.net.backoff import Backoff
from peer.net.bulk.transport import BulkTransport
from peer.net.dialing import Connection, Dial, race
from peer.net.libp2p_fixes import abort_connection
from peer.net.libp2p_fixes.inbound_limits import inbound_gate
from peer.net.libp2p_fixes.peer_cleanup import OnConnections
from peer.net.limits import NetLimits
from peer.net.nat.traversal import Traversal
from peer.net.strangers.claims import UnprovenDials
from peer.net.stream_channel import GREETING, LOST, StreamChannel
from peer.net.wire import Channel

_BULK_RETRY_S: Final = 60.0
_DIRECT_FIRST_S: Final = 1.5  # head start of direct addresses over relayed ones


class Connections:
    """Dials, keeps and chooses connections. `rpc` gets its channels here."""

    def __init__(
        self, host: Any, book: AddressBook, limits: NetLimits, admissions: Admissions, nursery: trio.Nursery
    ) -> None:
        self._network = host.get_network()
        self._book = book
        self._limits = limits
        self._admissions = admissions
        self._nursery = nursery
        self.bulk: BulkTransport | None = None
        """The TLS transport for payloads, if this host has one."""
        self.traversal: Traversal | None = None
        """Dials addresses behind a relay."""
        self.on_dialled: Callable[[str], None] = lambda peer: None
        """Called with every peer that we have just connected to."""
        self.on_refused: Callable[[str], None] = lambda cap: None
        """Called when we dial no peer because a cap is reached, with the name of the cap."""
        self._unproven = UnprovenDials(lambda: admissions.guarded)
        self._racing = 0
        self._dials: dict[tuple[str, tuple[str, ...]], Dial] = {}
        self._bulk: dict[str, Connection] = {}
        self._bulk_dials: dict[str, trio.Lock] = {}
        self._bulk_refused = Backoff(_BULK_RETRY_S, _BULK_RETRY_S, factor=1)
        inbound_gate(self._network).judge_by(admissions)
        self._network.register_notifee(OnConnections(lambda peer: None, self._on_gone))

    def counts(self) -> dict[str, int]:
        """Return the connections to peers, and our dials under way."""
        dials = self._racing + len(self._network._ongoing_dials)
        return {"connections": len(self._network.get_connections()), "dials": dials + len(self._bulk_dials)}

    @property
    def connected(self) -> frozenset[str]:
        """Peers with at least one live connection."""
        return frozenset(str(peer) for peer in list(self._network.connections) if self.live(str(peer)))

    def live(self, peer: str) -> list[Connection]:
        """Return the live connections to `peer`, the one for control first, the one for bulk last."""
        if not is_peer_id(peer):
            return []
        bulk = self._bulk.get(peer)
        alive = [c for c in self._network.get_connections(_libp2p_id(peer)) if not c.is_closed]
        return sorted(alive, key=lambda c: (c is bulk, _is_relayed(c)))

    def remote_ip(self, peer: str) -> str | None:
        """Return the IP address at the other end of a direct connection to `peer`, None if there is none."""
        return next(iter(self.remote_ips(peer)), None)

    def remote_ips(self, peer: str) -> tuple[str, ...]:
        """Return the IP addresses at the other ends of all direct connections to `peer`, that for control first."""
        return tuple(ip for connection in self.live(peer) if (ip := _remote_ip(connection)) is not None)

    async def open(self, peer: str, bulk: bool) -> Channel:
        """Open a new stream to `peer`, dialling if need be. Raises DialError or ConnectionLost."""
        channel = await self._open_bulk(peer) if bulk else None
        if channel is not None:
            return channel
        return await self.open_stream(peer, GREETING)

    async def open_stream(self, peer: str, greeting: bytes) -> Channel:
        """Open a new stream of the protocol that begins so on the connection for control. Raises as `open`."""
        for connection in self.live(peer):
            channel = await self._open_on(connection, peer, greeting)
            if channel is not None:
                return channel
        channel = await self._open_on(await self.connect(peer), peer, greeting)
        if channel is None:
            raise ConnectionLost(f"the connection to {peer} ended as soon as it was made")
        return channel

    async def connect(self, peer: str) -> Connection:
        """Return a live connection to `peer`, dialling if need be. Simultaneous callers share one dial."""
        alive = self.live(peer)
        if alive:
            return alive[0]
        return await self.dial(peer, self._book.get(peer))

    async def verify(self, peer: str) -> bool:
        """Dial a peer, though it is connected, at the addresses that it claims. Returns whether it answered."""
        claims = tuple(address for address in self._book.get(peer) if self._book.is_claim(peer, address))
        try:
            connection = await self._race(peer, claims)
        except DialError:
            return False
        self._nursery.start_soon(connection.close)
        return True

    async def dial(self, peer: str, addresses: tuple[str, ...], *, vouched: bool = False) -> Connection:
        """Return a new connection by these addresses, or that of a dial of the same under way. Raises DialError.

        `vouched` says that the addresses are from a better source than the peer's claim, if it has claimed them too.
        """
        dial = self._dials.get((peer, addresses))
        if dial is None:
            dial = self._dials[peer, addresses] = Dial()
            self._nursery.start_soon(self._run_dial, dial, peer, addresses, vouched)
        await dial.done.wait()
        if dial.error is not None:
            raise DialError(str(dial.error), dial.error.reason)
        return dial.connection

    async def disconnect(self, peer: str) -> None:
        """Close every connection to `peer`."""
        self._forget_bulk(peer)
        for connection in self.live(peer):
            with trio.move_on_after(1.0) as scope:
                await connection.close()
            if scope.cancelled_caught:
                await abort_connection(connection)

    async def abort(self, peer: str) -> None:
        """Drop every connection to a peer that no longer answers, so that calls waiting on it fail now."""
        self._forget_bulk(peer)
        for connection in self.live(peer):
            await abort_connection(connection)

    def _forget_bulk(self, peer: str) -> None:
        self._bulk.pop(peer, None)
        if self.bulk is not None:
            self.bulk.abort(peer)

    def _on_gone(self, peer_id: ID) -> None:
        """Forget a peer whose last connection has ended."""
        peer = str(peer_id)
        self._admissions.revoke(peer)
        self._bulk.pop(peer, None)
        if self.bulk is not None:
            self.bulk.leave(peer)
        if self.traversal is not None:
            self.traversal.forget(peer_id)

    async def direct_ip(self, peer: str) -> str | None:
        """Connect to a peer, unless connected, and return the IP address at which a further dial would reach it. None
        for one behind NAT: a dial would fail, after seconds. Raises DialError."""
        ip = _remote_ip(await self.connect(peer))
        return ip if ip is not None and self._listens_at(peer, ip) else None

    async def _open_bulk(self, peer: str) -> Channel | None:
        """Open a channel that shares no connection with control calls: by TLS, else by a second libp2p connection."""
        ip = await self.direct_ip(peer)
        if ip is None:
            return None
        if self.bulk is not None:
            channel = await self.bulk.channel(peer, ip)
            if channel is not None:
                return channel
        connection = await self._bulk_connection(peer)
        return None if connection is None else await self._open_on(connection, peer)

    def _listens_at(self, peer: str, ip: str) -> bool:
        """Return whether a peer announces the IP address at which we see it (or a name, which may stand for it)."""
        hosts = (address.split("/")[1:3] for address in self._book.get(peer) if not is_circuit(address))
        return any(host == ip or family.startswith("dns") for family, host in hosts)

    async def _run_dial(self, dial: Dial, peer: str, addresses: tuple[str, ...], vouched: bool) -> None:
        try:
            dial.connection = await self._race(peer, addresses, vouched)
            self.on_dialled(peer)
        except DialError as error:
            dial.error = error
        finally:
            if dial.connection is None and dial.error is None:  # cancelled: a node may still say goodbye
                dial.error = DialError(f"{peer} is not dialled: this host is closing", "unreachable")
            del self._dials[peer, addresses]
            dial.done.set()

    async def _race(self, peer: str, addresses: tuple[str, ...], vouched: bool = False) -> Connection:
        peer_id = _libp2p_id(peer)
        if (count := len(self._network.get_connections())) >= self._limits.connections:
            self.on_refused("connections")
            raise DialError(f"{peer} is not dialled, as {count} connections are open: let some peers leave", "refused")

        direct = [address for address in addresses if not is_circuit(address)]
        relayed = [address for address in addresses if is_circuit(address)]

        async def attempt(address: str) -> Connection:
            through = relay_in(address)
            claimed = self._book.is_claim(peer, address)
            free = vouched or self._unproven.is_proven(peer, address) or not (claimed or self._admissions.guarded)
            if free or (through and self.live(through)):  # a relay that we are connected to is no third party
                connection = await go(address)
            else:
                async with self._unproven.permit(address, claimed):
                    connection = await go(address)
            if claimed and not vouched:
                self._book.add(peer, (address,))
            self._unproven.note_found(peer, address)
            return connection

        async def go(address: str) -> Connection:
            if not is_circuit(address):
                return await self._network.dial_addr(Multiaddr(address), peer_id)
            if self.traversal is None:
                raise DialError(f"this host uses no relays, so it cannot reach {peer}", "unreachable")
            if direct:
                await trio.sleep(_DIRECT_FIRST_S)
            return await self.traversal.dial(address, peer)

        self._racing += 1
        try:
            return await race(
                peer,
                direct + relayed,
                attempt,
                timeout_s=self._limits.dial_timeout_s,
                stagger_s=self._limits.dial_stagger_s,
                discard=lambda connection: self._nursery.start_soon(connection.close),
            )
        finally:
            self._racing -= 1

    async def _bulk_connection(self, peer: str) -> Connection | None:
        """Return the libp2p connection for bulk, made on first use, None if the peer cannot be dialled directly."""
        turn = self._bulk_dials.setdefault(peer, trio.Lock())
        try:
            async with turn:
                return await self._dial_bulk(peer)
        finally:
            if not turn.locked():  # a released lock is locked at once for the next that waits
                self._bulk_dials.pop(peer, None)

    async def _dial_bulk(self, peer: str) -> Connection | None:
        connection = self._bulk.get(peer)
        if connection is not None and not connection.is_closed:
            return connection
        self._bulk.pop(peer, None)
        if self._bulk_refused.paused(peer):
            return None
        direct = tuple(address for address in self._book.get(peer) if not is_circuit(address))
        try:
            connection = self._bulk[peer] = await self._race(peer, direct)
        except DialError:
            self._bulk_refused.failed(peer)
            return None
        return connection

    async def _open_on(self, connection: Connection, peer: str, greeting: bytes = GREETING) -> StreamChannel | None:
        """Open a stream on this connection. Returns None if the connection is dead."""
        try:
            stream = await connection.muxed_conn.open_stream()  # beside the library's layers: see `streams`
        except LOST:
            return None
        return StreamChannel(peer, stream, owes_greeting=True, expects_greeting=True, greeting=greeting)


def _libp2p_id(peer: str) -> ID:
    if not is_peer_id(peer):  # never decoded and never kept: other peers choose its length
        raise DialError(f"{peer[:80]!r} is no peer id: check where it comes from", "unreachable")
    return _kept_id(peer)


@lru_cache(maxsize=4096)
def _kept_id(peer: str) -> ID:
    return ID.from_base58(peer)


def _remote_ip(connection: Connection) -> str | None:
    """Return the IP address at the other end of a direct connection."""
    if _is_relayed(connection):
        return None
    for address in connection.get_transport_addresses():
        for protocol in ("ip4", "ip6"):
            if protocol in (part.name for part in address.protocols()):
                return str(address.value_for_protocol(protocol))
    return None


def _is_relayed(connection: Connection) -> bool:
    return bool(connection.get_connection_type() == ConnectionType.RELAYED)
