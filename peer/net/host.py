"""One peer's presence on the network: identity, listening socket, connections, calls, heartbeat.

    async with open_host(identity, events) as host:
        peer = await host.connect_address("/ip4/203.0.113.7/tcp/4001/p2p/12D3Koo...", timeout_s=10)
        reply = await host.rpc.call(peer, method, body, payload, timeout_s=30)

TCP, Noise and Yamux only, with the library's holes fixed (`peer.net.libp2p_fixes`).
"""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager, suppress
from ipaddress import ip_address
from itertools import islice
from typing import Any, Final

import trio
from libp2p import new_host
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.custom_types import TProtocol
from libp2p.network.config import ConnectionConfig, RetryConfig

from peer.errors import BarnraiseError, DialError, ResourceError
from peer.events import EventLog
from peer.identity import Identity
from peer.net.address_book import AddressBook, closed_range, ip_of, is_circuit, split_address
from peer.net.admissions import Admissions
from peer.net.bulk.transport import OFFER, BulkTransport, Offer, OfferRequest
from peer.net.connection_counts import ConnectionCounts
from peer.net.connections import Connections
from peer.net.flow.dialing import open_flows
from peer.net.flow.flow import FlowParts
from peer.net.flow.flows import Flows
from peer.net.heartbeat import Heartbeat
from peer.net.hello import HELLO, Addresses
from peer.net.libp2p_fixes import apply_fixes, harden
from peer.net.libp2p_fixes.inbound_limits import inbound_gate
from peer.net.libp2p_fixes.streams import serve_greeted
from peer.net.libp2p_fixes.yamux_stream import YamuxStream
from peer.net.limits import ByteBudget, NetLimits
from peer.net.listen_address import announced_address, check_port_free, expand_wildcard, listen_address
from peer.net.method import Call
from peer.net.nat.hole_punch import Path
from peer.net.nat.port_mapping import port_to_map
from peer.net.nat.traversal import Traversal
from peer.net.rate_limit import Meter, TokenBucket, Traffic
from peer.net.reach import LOCAL, Reach
from peer.net.rpc import Rpc
from peer.net.strangers.turns import accept_in_turn, turns_of
from peer.net.stream_channel import GREETING, PROTOCOL, StreamChannel

if sys.version_info < (3, 11):
    from exceptiongroup import BaseExceptionGroup

_HELLO_S: Final = 10.0
_GOODBYE_S: Final = 1.0
_LIMITS: Final = NetLimits()
Caps = tuple[float | None, float | None]
"""Of upload and download, in bytes per second; None for no cap."""


class Host:
    """A running host. Made by `open_host`."""

    def __init__(
        self,
        identity: Identity,
        events: EventLog,
        reach: Reach,
        caps: Caps,
        limits: NetLimits,
        libp2p_host: Any,
        nursery: trio.Nursery,
    ) -> None:
        self.peer_id: Final = identity.peer_id
        self.identity: Final = identity
        self.events: Final = events
        self.reach: Final = reach
        self.libp2p: Final = libp2p_host
        """The underlying py-libp2p host."""
        self._limits = limits
        self._nursery = nursery
        self.admissions: Final = Admissions()
        upload, download = map(TokenBucket, caps)
        self._meter = Meter(upload, download, self.admissions.is_trusted)
        self.book: Final = AddressBook(limits.addresses_per_peer)
        self._connections = Connections(libp2p_host, self.book, limits, self.admissions, nursery)
        self._turns = turns_of(libp2p_host.get_network())
        self.rpc: Final = Rpc(self.peer_id, self._connections, limits, self._meter, events, self.admissions)
        self._watched: dict[str, frozenset[str]] = {}
        self._heartbeat = Heartbeat(self.rpc, self._connections, self._meter, limits, events)
        self.rpc.register(HELLO, self._on_hello)
        server, meter, ips = self.rpc.server, self._meter, self._connections.remote_ips
        self._bulk = BulkTransport(nursery, self._ask_for_bulk, server, meter, ips, self.admissions, self._turns)
        self.rpc.register(OFFER, self._bulk.offer)
        self._connections.bulk = self._bulk
        budget = ByteBudget(limits.flow_bytes_in_flight, self.admissions)
        penalize, ping, prefix = self.rpc.server.penalize, self._heartbeat.ping, self.rpc.prefix
        parts = FlowParts(self._meter, budget, self.admissions, penalize, ping, prefix)
        self.flows: Final[Flows] = open_flows(nursery, libp2p_host, self.rpc, self._connections, self._bulk, parts)
        self.traversal: Final = Traversal(libp2p_host, self._connections, reach.relays, events)
        self.traversal.ask_addresses = self._ask_addresses
        if reach.map_port and not reach.announce:
            self.traversal.port_to_map = lambda: port_to_map(self.listening())
        self._connections.traversal = self.traversal
        self._connections.on_dialled = lambda peer: nursery.start_soon(self._say_hello, peer)
        gate = inbound_gate(libp2p_host.get_network())
        counted = (self._connections.counts, gate.counts, self._bulk.counts, self.rpc.counts)
        self.counts: Final = ConnectionCounts(events, counted, trio.current_time)
        self._connections.on_refused = gate.on_refused = self._bulk.on_refused = self.counts.refuse
        self._greeting: dict[str, trio.Event] = {}
        serve_greeted(libp2p_host.get_network(), GREETING, self._on_greeted_stream)
        libp2p_host.set_stream_handler(TProtocol(PROTOCOL), self._on_stream)

    @property
    def addresses(self) -> tuple[str, ...]:
        """Full multiaddrs at which other peers can dial us, those through a relay last; as many as others keep."""
        most, relayed = self._limits.addresses_per_peer, self.traversal.addresses
        direct = self.traversal.direct(self.reach.announce, self.listening())
        announced = (*direct[: max(1, most - len(relayed))], *relayed)[:most]
        return tuple(f"{address.removesuffix(f'/p2p/{self.peer_id}')}/p2p/{self.peer_id}" for address in announced)

    @property
    def connected(self) -> frozenset[str]:
        """Peers with a live connection, not counting relays."""
        return frozenset(peer for peer in self._connections.connected if not self.traversal.is_relay(peer))

    @property
    def bytes_up(self) -> int:
        """Payload and framing sent since the start."""
        return self._meter.bytes_up

    @property
    def bulk_bytes_up(self) -> int:
        """The part of `bytes_up` that went over connections for payloads: exchanges and state transfers."""
        return self._meter.bulk_bytes_up

    @property
    def bytes_down(self) -> int:
        return self._meter.bytes_down

    @property
    def bytes_by_peer(self) -> Mapping[str, Traffic]:
        return self._meter.by_peer

    def received_from(self, peer_id: str) -> tuple[int, float]:
        """Return the bytes of payloads that came from a peer, and the seconds in which they were read."""
        traffic = self._meter.by_peer.get(peer_id)
        return (0, 0.0) if traffic is None else (traffic.payload_bytes, traffic.payload_s)

    def is_connected(self, peer_id: str) -> bool:
        """Return whether there is a live connection to a peer."""
        return bool(self._connections.live(peer_id))

    def remote_ip(self, peer_id: str) -> str | None:
        """Return the IP address at which we see a peer, None if it is not connected or only through a relay."""
        return self._connections.remote_ip(peer_id)

    def path(self, peer_id: str) -> Path | None:
        """Return how a peer is reached: direct, hole-punched or relayed; None if it is not connected."""
        return self.traversal.path(peer_id)

    async def connect(self, peer_id: str, *, timeout_s: float) -> None:
        """Connect to a peer whose addresses are in the book, unless connected. Raises DialError."""
        if peer_id == self.peer_id:
            return
        with trio.move_on_after(timeout_s):
            await self._connections.connect(peer_id)
            return
        raise _too_slow(peer_id, timeout_s)

    async def connect_address(self, address: str, *, timeout_s: float) -> str:
        """Connect to the peer at a full multiaddr, learn its addresses, and return its id. Raises DialError."""
        bare, peer_id = split_address(address)
        if peer_id == self.peer_id:
            return peer_id
        with trio.move_on_after(timeout_s):
            if not self._connections.live(peer_id):
                await self._connections.dial(peer_id, (bare,), vouched=True)
            self.book.add(peer_id, (bare,))
            await self._say_hello(peer_id)  # or wait for the hello that the dial has started
            return peer_id
        raise _too_slow(address, timeout_s)

    def learn(self, peer_id: str, addresses: Iterable[str], *, told_by: str) -> None:
        """Note addresses of a peer that a peer has reported: as vouched for, as claims, or not at all.

        The peers that the run names are believed, and other anchors about themselves; about others these report claims,
        if we know no better. In a run, other peers may report only themselves: a guest that has proved a scarce
        credential any address, as claims; strangers only the IP address at which we see them. Peers seen through a
        relay, or not connected, must not lead us into a network of ours that is not theirs.
        """
        if peer_id == self.peer_id:
            return
        told, by, own = list(islice(addresses, self._limits.addresses_per_peer)), told_by, told_by == peer_id
        if (known := self.admissions).is_named(by) or (own and known.is_anchor(by)):
            self.book.add(peer_id, told)
        elif not known.guarded or (known.is_trusted(by) if own else known.is_anchor(by) and not self.book.get(peer_id)):
            self.book.claim(peer_id, told)
        elif own:
            seen_at = self._connections.remote_ip(peer_id)
            self.book.claim(peer_id, [address for address in told if self._may_be_at(address, seen_at)])

    def _may_be_at(self, address: str, seen_at: str | None) -> bool:
        """Whether a peer that we see at an IP address (None: not directly) may have us dial this address."""
        try:
            ip = ip_of(address)
            if ip is None or (seen_at is not None and not is_circuit(address)):
                return ip is not None and seen_at is not None and ip_address(ip) == ip_address(seen_at)
            within = closed_range(ip)
        except (ValueError, IndexError):
            return False  # no multiaddr
        return within is None or within in {closed_range(own) for own in self._own_ips()}

    def _own_ips(self) -> set[str]:
        ips = (ip_of(address) for address in (*self.listening(), *self.reach.announce))
        return {ip for ip in ips if ip is not None}

    async def verify(self, peer_id: str) -> bool:
        """Dial a connected peer at the addresses that it claims. Returns whether it answered; then others may know."""
        return await self._connections.verify(peer_id)

    async def disconnect(self, peer_id: str) -> None:
        await self._connections.disconnect(peer_id)

    def watch(self, peers: Iterable[str], cause: str = "") -> None:
        """Replace the peers watched for `cause`. The heartbeat watches the peers of all causes."""
        self._watched[cause] = frozenset(peers) - {self.peer_id}
        self._heartbeat.watch(frozenset().union(*self._watched.values()))

    @property
    def suspects(self) -> frozenset[str]:
        """Watched peers that are dead or frozen."""
        return self._heartbeat.suspects

    async def wait_suspect(self, peer_id: str) -> None:
        """Return once a watched peer is suspect."""
        await self._heartbeat.wait_suspect(peer_id)

    @property
    def stood_still_until(self) -> float:
        """When our own event loop was last frozen for half a second or more, in trio's time; -inf if never.

        Other peers may have given us up meanwhile, and their message about it may be on its way."""
        return self._heartbeat.stood_still_until

    async def run(self) -> None:
        """Run the background tasks of the host, until cancelled."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._heartbeat.run)
            nursery.start_soon(self._turns.run)
            nursery.start_soon(self.counts.run)
            nursery.start_soon(self._bulk.run)
            nursery.start_soon(self.flows.run)
            nursery.start_soon(self.traversal.run)

    async def listen_bulk(self, port: int) -> None:
        """Open the port of the bulk transport. Raises ResourceError if it is taken."""
        if not self.reach.listen:
            return
        try:
            await self._bulk.listen(self.reach.listen[0].split("/")[2], port)
        except OSError as error:
            problem = f"the bulk port {port} cannot be opened ({error.strerror})"
            raise ResourceError(f"{problem}: choose another, or 0 for any free one") from error

    async def close(self) -> None:
        """Close every connection."""
        self.traversal.stop()
        self._bulk.close()
        self.flows.close()
        async with trio.open_nursery() as nursery:
            for peer in self._connections.connected:
                nursery.start_soon(self._connections.disconnect, peer)

    async def _on_greeted_stream(self, stream: YamuxStream) -> None:
        peer = str(stream.muxed_conn.peer_id)
        await self.rpc.server.serve(StreamChannel(peer, stream, owes_greeting=True, expects_greeting=False))

    async def _on_stream(self, stream: Any) -> None:
        """Serve a stream on which the library has exchanged the greetings."""
        peer = str(stream.muxed_conn.peer_id)
        channel = StreamChannel(peer, stream.muxed_stream, owes_greeting=False, expects_greeting=False)
        await self.rpc.server.serve(channel)

    async def _ask_for_bulk(self, peer: str, request: OfferRequest) -> Offer:
        return (await self.rpc.call(peer, OFFER, request, timeout_s=_HELLO_S)).body

    async def _on_hello(self, call: Call[Addresses]) -> Addresses:
        self.learn(call.peer, call.body.addresses, told_by=call.peer)
        return Addresses(list(self.addresses))

    async def _ask_addresses(self, peer_id: str) -> tuple[str, ...]:
        await self._say_hello(peer_id)
        return tuple(address for address in self.book.get(peer_id) if not is_circuit(address))

    async def _say_hello(self, peer_id: str) -> None:
        """Exchange addresses, so that each side can dial the other. One exchange at a time with each peer."""
        if self.traversal.is_relay(peer_id):
            return
        under_way = self._greeting.get(peer_id)
        if under_way is not None:
            await under_way.wait()
            return
        done = self._greeting[peer_id] = trio.Event()
        try:
            reply = await self.rpc.call(peer_id, HELLO, Addresses(list(self.addresses)), timeout_s=_HELLO_S)
            self.learn(peer_id, reply.body.addresses, told_by=peer_id)
        except BarnraiseError:
            return  # the peer will learn our addresses when it asks
        finally:
            del self._greeting[peer_id]
            done.set()

    def listening(self) -> list[str]:
        """Return the bound addresses: every interface for a wildcard, the actual port for port 0."""
        found: list[str] = []
        for listener in self.libp2p.get_network().listeners.values():
            with suppress(OSError):  # the listener is closing
                found.extend(bound for address in listener.get_addrs() for bound in expand_wildcard(str(address)))
        return list(dict.fromkeys(found))


@asynccontextmanager
async def open_host(
    identity: Identity,
    events: EventLog,
    reach: Reach = LOCAL,
    *,
    caps: Caps = (None, None),
    bulk_port: int | None = 0,
    limits: NetLimits = _LIMITS,
) -> AsyncIterator[Host]:
    """Run a host that listens and answers inside the block. `bulk_port`: the port of the bulk transport at the first
    address of `reach.listen`: 0 for any free one, None for no listener. Behind a firewall it should be an open port; if
    it cannot be reached, payloads take libp2p streams.

    Raises ConfigError for a bad address and ResourceError for a port that is taken.
    """
    apply_fixes()
    listen = [listen_address(address) for address in reach.listen]
    announce = [announced_address(address, identity.peer_id) for address in reach.announce]
    for relay in reach.relays:
        split_address(relay)  # checked here, where no nursery wraps the error
    failure: BaseException | None = None
    libp2p_host = new_host(
        key_pair=create_new_key_pair(identity.seed),
        muxer_preference="YAMUX",
        connection_config=ConnectionConfig(
            max_connections=limits.connections,
            high_watermark=limits.connections,
            min_connections=0,
            low_watermark=0,
            max_connections_per_peer=limits.connections_per_peer,
        ),
        announce_addrs=announce or None,
    )
    network: Any = libp2p_host.get_network()
    network.retry_config = RetryConfig(max_retries=0)
    network.auto_connector.maybe_connect = _dial_no_peer
    for address in reach.listen:
        check_port_free(address)
    harden(libp2p_host)
    try:
        async with trio.open_nursery() as nursery:
            host = Host(identity, events, reach, caps, limits, libp2p_host, nursery)
            async with libp2p_host.run(listen_addrs=listen):
                missing = [str(address) for address in listen if str(address) not in network.listeners]
                if missing:
                    failure = ResourceError(f"cannot listen on {missing[0]}: choose this machine's address by --listen")
                else:
                    for listener in (each for tcp in network.listeners.values() for each in tcp.listeners):
                        accept_in_turn(listener, turns_of(network))
                    nursery.start_soon(host.run)
                    try:
                        if bulk_port is not None:
                            await host.listen_bulk(bulk_port)
                        yield host
                    except (Exception, BaseExceptionGroup) as error:  # noqa: BLE001 - raised below, outside the nurseries
                        failure = error
                    finally:
                        with trio.CancelScope(shield=True), trio.move_on_after(_GOODBYE_S):
                            await host.close()
                            await network.close()
            nursery.cancel_scope.cancel()
    finally:
        if failure is not None:  # they would wrap it, and a cancellation would take its place
            raise failure


async def _dial_no_peer() -> None:
    """Replace the library's own dialling of up to half of `max_connections`: we choose the peers to dial."""


def _too_slow(target: str, timeout_s: float) -> DialError:
    return DialError(f"{target} could not be reached within {timeout_s:g} s: check that the peer is running", "timeout")
