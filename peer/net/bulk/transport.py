"""The bulk transport: big payloads between directly reachable peers by TLS 1.3, without the cost of Noise and Yamux.

Authentication comes from libp2p. Over the authenticated connection the caller asks for an offer: a port, the hash of
the listener's certificate, and a token that opens one connection. The caller checks the hash before it sends the token,
and the listener knows the peer to which it gave the token, so both sides are authenticated. All calls from one peer to
another share a connection (`peer.net.bulk.link`), with the frames, limits and deadlines of any call. Where it cannot be
made (NAT, firewall, a relayed peer), calls take libp2p streams.

A socket is kept only if an offer was made to its network, that of a peer's connections to us. Few may be in their
handshake, and links of strangers give way to those of trusted peers (`strangers.shares`).
"""

from __future__ import annotations

import secrets
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Final, Protocol

import msgspec
import trio

from peer.errors import BarnraiseError, ConnectionLost, NotAdmitted
from peer.net.admissions import Admissions
from peer.net.backoff import Backoff
from peer.net.bulk.link import BulkConnection, Serve
from peer.net.bulk.tls import Certificate, TlsSocket, client_context
from peer.net.libp2p_fixes.sockets import set_keepalive
from peer.net.method import Call, Method
from peer.net.rate_limit import Meter
from peer.net.rpc_server import RpcServer
from peer.net.strangers.shares import Handshakes, Slots, address_group
from peer.net.strangers.turns import IdleTurns, accept_in_turn
from peer.net.wire import Channel

_TOKEN_BYTES: Final = 32
_TOKEN_S: Final = 20.0
_TOKENS_PER_PEER: Final = 16
_HANDSHAKE_S: Final = 5.0
_DIAL_S: Final = 3.0
_HANDSHAKES_MAX: Final = 32
_HANDSHAKES_PER_GROUP_MAX: Final = 16
_CONNECTIONS_PER_PEER: Final = 6  # one each way; new ones may arrive before we know that the last have ended
_CONNECTIONS_MAX: Final = 512
_IDLE_S: Final = 60.0
_SERVER_IDLE_S: Final = 2 * _IDLE_S  # the caller closes first, so that it never uses a connection that we are closing
_RETRY_S: Final = 30.0

Ask = Callable[[str, "OfferRequest"], Awaitable["Offer"]]


class OfferRequest(msgspec.Struct, frozen=True):
    """Asks for one connection."""

    flow: bool = False
    """It is for a flow, not for calls (`peer.net.flow`)."""


class Offer(msgspec.Struct, frozen=True):
    """The listener of the bulk transport."""

    port: Annotated[int, msgspec.Meta(ge=0, lt=1 << 16)]
    """0: no connection is to be had."""
    fingerprint: Annotated[bytes, msgspec.Meta(max_length=32)]
    """Hash of the listener's certificate."""
    token: Annotated[bytes, msgspec.Meta(max_length=_TOKEN_BYTES)]
    """Opens one connection."""


OFFER: Final = Method("net/bulk", OfferRequest, Offer, access="client", urgent=True)


class FlowAcceptor(Protocol):
    """Takes the connections of flows (`peer.net.flow.flows`)."""

    @property
    def served(self) -> bool:
        """Whether this host takes flows."""

    async def accept(self, peer: str, wire: TlsSocket) -> None:
        """Serve a flow that a peer has opened, until it ends."""


@dataclass(frozen=True)
class _Offered:
    """A token that we gave out."""

    peer: str
    until: float
    groups: frozenset[str]
    """The networks from which it may be used: those of the peer's connections to us."""
    flow: bool


class BulkTransport:
    """The listener of one host, and its connections to the listeners of others.

    `remote_ips` returns the IP addresses at which we see a connected peer."""

    def __init__(
        self,
        nursery: trio.Nursery,
        ask: Ask,
        server: RpcServer,
        meter: Meter,
        remote_ips: Callable[[str], Iterable[str]],
        admissions: Admissions,
        turns: IdleTurns,
    ) -> None:
        self._nursery = nursery
        self._ask = ask
        self._server = server
        self._meter = meter
        self._certificate = Certificate.generate()
        self._client = client_context()
        self._port = 0
        self._remote_ips = remote_ips
        self._turns = turns
        self._tokens: dict[bytes, _Offered] = {}
        self.on_refused: Callable[[str], None] = lambda cap: None
        """Called when a connection gives way because a cap is reached, with the name of the cap."""
        self._handshakes = Handshakes(_HANDSHAKES_MAX, _HANDSHAKES_PER_GROUP_MAX)
        self._handshakes.on_given_way = lambda: self.on_refused("bulk_handshakes")
        self._slots: Slots[BulkConnection] = Slots(_CONNECTIONS_MAX, admissions, _last_used)
        self._ours: dict[str, BulkConnection] = {}
        """The connections for calls that we begin, by peer."""
        self._links: defaultdict[str, set[BulkConnection]] = defaultdict(set)
        """All connections by peer, also those that the peer made and those that we are leaving."""
        self._dials: dict[str, trio.Event] = {}
        self.flows: FlowAcceptor | None = None
        """Takes the connections of flows."""
        self._failed = Backoff(_RETRY_S, _RETRY_S, factor=1)

    def counts(self) -> dict[str, int]:
        """Return the connections, those in their handshake, and our dials under way."""
        connections = sum(map(len, self._links.values()))
        return {"bulk": connections, "bulk_handshakes": len(self._handshakes), "bulk_dials": len(self._dials)}

    @property
    def sockets(self) -> tuple[TlsSocket, ...]:
        """The sockets of all connections."""
        return tuple(link.tls for links in self._links.values() for link in links)

    async def listen(self, ip: str, port: int) -> None:
        """Accept connections at `ip`; port 0 takes any free one. Raises OSError if the port is taken."""
        listeners = await trio.open_tcp_listeners(port, host=ip)
        self._port = listeners[0].socket.getsockname()[1]
        for listener in listeners:
            accept_in_turn(listener, self._turns)
        self._nursery.start_soon(trio.serve_listeners, self._accept, listeners)

    async def offer(self, call: Call[OfferRequest]) -> Offer:
        """Answer `OFFER`. Raises NotAdmitted if this peer takes no flows."""
        if call.body.flow and (self.flows is None or not self.flows.served):
            raise NotAdmitted("this peer takes no flows: ask one that serves a model")
        now = trio.current_time()
        self._tokens = {token: offered for token, offered in self._tokens.items() if offered.until > now}
        mine = sum(offered.peer == call.peer for offered in self._tokens.values())
        groups = frozenset(address_group(ip) for ip in self._remote_ips(call.peer))
        if not self._port or mine >= _TOKENS_PER_PEER or not groups:
            return Offer(0, b"", b"")
        token = secrets.token_bytes(_TOKEN_BYTES)
        self._tokens[token] = _Offered(call.peer, now + _TOKEN_S, groups, call.body.flow)
        return Offer(self._port, self._certificate.fingerprint, token)

    async def channel(self, peer: str, ip: str) -> Channel | None:
        """Open a channel to `peer`, which has the address `ip`. Returns None where that fails."""
        if not self._is_open(peer) and not self._failed.paused(peer):
            if peer not in self._dials:
                self._dials[peer] = trio.Event()
                self._nursery.start_soon(self._connect, peer, ip)
            await self._dials[peer].wait()
        return self._ours[peer].channel() if self._is_open(peer) else None

    async def dial_flow(self, peer: str, ip: str) -> TlsSocket:
        """Return a connection for a flow with `peer`, which has the address `ip`. Raises ConnectionLost or OSError."""
        if self._failed.paused(peer):
            raise ConnectionLost(f"{peer} could not be reached at {ip} lately")
        try:
            return await self._dial(peer, ip, OfferRequest(flow=True))
        except (OSError, ConnectionLost):
            self._failed.failed(peer)
            raise

    def abort(self, peer: str) -> None:
        """Drop every connection with a peer that no longer answers. The next call dials again at once."""
        for link in self._links.get(peer, ()):
            link.close()
        self._failed.reset(peer)

    def leave(self, peer: str) -> None:
        """Close our connection to a peer that is gone, once the calls on it have ended. It closes its own."""
        if peer in self._ours:
            self._ours[peer].leave()

    def close(self) -> None:
        for peer in self._links:
            self.abort(peer)

    async def run(self) -> None:
        """Close idle connections, until cancelled."""
        while True:
            await trio.sleep(_IDLE_S / 4)
            now = trio.current_time()
            for link in (link for links in self._links.values() for link in links):
                timeout_s = _IDLE_S if link is self._ours.get(link.peer) else _SERVER_IDLE_S
                if link.idle_since is not None and now - link.idle_since > timeout_s:
                    link.leave()

    def _is_open(self, peer: str) -> bool:
        return peer in self._ours and self._ours[peer].is_open

    async def _connect(self, peer: str, ip: str) -> None:
        try:
            link = self._ours[peer] = self._link(peer, await self._dial(peer, ip, OfferRequest()), None)
            self._nursery.start_soon(self._read, link)
        except (OSError, BarnraiseError):
            self._failed.failed(peer)
        finally:
            self._dials.pop(peer).set()

    def _link(self, peer: str, tls: TlsSocket, serve: Serve | None) -> BulkConnection:
        link = BulkConnection(self._nursery, peer, tls, self._meter, self._server.penalize, serve)
        self._links[peer].add(link)
        return link

    async def _read(self, link: BulkConnection) -> None:
        """Read a connection until it ends."""
        try:
            await link.run()
        finally:
            self._links[link.peer].discard(link)
            if not self._links[link.peer]:
                del self._links[link.peer]
            if self._ours.get(link.peer) is link:
                del self._ours[link.peer]

    async def _dial(self, peer: str, ip: str, request: OfferRequest) -> TlsSocket:
        with trio.move_on_after(_DIAL_S):
            offer = await self._ask(peer, request)
            if not offer.port:
                raise ConnectionLost(f"{peer} has no bulk transport")
            stream = await trio.open_tcp_stream(ip, offer.port)
            set_keepalive(stream)
            tls = TlsSocket(stream, self._client, server_side=False)
            try:
                await tls.handshake()
                if not secrets.compare_digest(tls.peer_fingerprint, offer.fingerprint):
                    raise ConnectionLost(f"another peer answers for {peer} at {ip} port {offer.port}")
                await tls.send(offer.token)
            except BaseException:
                tls.close()
                raise
            return tls
        raise ConnectionLost(f"the bulk transport of {peer} did not answer within {_DIAL_S:g} s")

    async def _accept(self, stream: trio.SocketStream) -> None:
        try:
            group = address_group(stream.socket.getpeername()[0])
            if not self._expects(group):
                stream.socket.close()
                return
            set_keepalive(stream)
            with closing(TlsSocket(stream, self._certificate.context, server_side=True)) as tls:
                offered = await self._authenticate(tls, group)
                if offered is not None and offered.flow and self.flows is not None:
                    await self.flows.accept(offered.peer, tls)
                elif offered is not None and not offered.flow:
                    await self._hold(self._link(offered.peer, tls, partial(self._serve_in_turn, group)), group)
        except OSError:  # it ended before we accepted it
            return

    def _expects(self, group: str) -> bool:
        """Return whether a peer in this network holds an offer."""
        now = trio.current_time()
        return any(group in offered.groups and now < offered.until for offered in self._tokens.values())

    async def _hold(self, link: BulkConnection, group: str) -> None:
        """Read a connection that was made to us until it ends. Another one may end for it."""
        loser = self._slots.add(link, link.peer, group)
        if loser is not None:
            self.on_refused("bulk")
            loser.close()
        try:
            await self._read(link)
        finally:
            self._slots.remove(link)

    async def _serve_in_turn(self, group: str, call: Channel) -> bool:
        await self._turns.take(group, call.peer)
        return await self._server.serve(call)

    async def _authenticate(self, tls: TlsSocket, group: str) -> _Offered | None:
        """Return the offer whose token opens this connection from `group`, None if there is none."""
        token = memoryview(bytearray(_TOKEN_BYTES))
        got = 0
        try:
            with self._handshakes.count(group), trio.move_on_after(_HANDSHAKE_S):
                await tls.handshake(partial(self._turns.take, group))
                while got < _TOKEN_BYTES:
                    got += await tls.receive_into(token[got:])
        except ConnectionLost:
            return None
        offered = self._tokens.pop(bytes(token), None)
        if offered is None or got < _TOKEN_BYTES or trio.current_time() >= offered.until or group not in offered.groups:
            return None
        crowded = len(self._links.get(offered.peer, ())) >= _CONNECTIONS_PER_PEER
        return None if crowded and not offered.flow else offered


def _last_used(link: BulkConnection) -> float:
    return float("inf") if link.idle_since is None else link.idle_since
