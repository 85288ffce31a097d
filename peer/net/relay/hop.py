"""Circuit Relay v2, the relay's half (https://github.com/libp2p/specs/blob/master/relay/circuit-v2.md).

Two requests of small messages: a peer reserves a place, or asks to be connected to a peer that has one. Then we open a
stream to that peer, over a connection that it keeps to us, and forward between the two streams.

py-libp2p has a relay too. It reserves for whatever peer a request names, so that one peer fills it with names. It caps
neither an address prefix nor the rate, and looks at a circuit's time only when bytes arrive. It keeps one circuit for
each peer, so the end of one closes the streams of another. One that reaches its cap gets a message of the relay's among
its bytes.
"""

from __future__ import annotations

import time
from contextlib import suppress
from typing import Any, Final

import trio
from google.protobuf.message import DecodeError
from libp2p.connection_types import ConnectionType
from libp2p.exceptions import ParseError
from libp2p.io.exceptions import MessageTooLarge
from libp2p.peer.id import ID
from libp2p.relay.circuit_v2.pb.circuit_pb2 import HopMessage, Limit, PeerId, Reservation, Status, StopMessage
from multiaddr import Multiaddr

from peer.net.address_prefix import prefix_of
from peer.net.host import Host
from peer.net.libp2p_fixes.identify import tell_observed_address
from peer.net.libp2p_fixes.peer_cleanup import OnConnections
from peer.net.libp2p_fixes.yamux_stream import YamuxStream
from peer.net.nat.circuit_relay import HOP, STOP, read_message, write_message
from peer.net.rate_limit import TokenBucket
from peer.net.relay.circuit import Forwarder, RelayCounts
from peer.net.relay.ledger import Full, RelayLedger, RelayLimits
from peer.net.strangers.allowances import Allowance
from peer.net.stream_channel import LOST, greeting_of

REQUEST_S: Final = 10.0
"""For a request to arrive, for an answer to leave, and for the called peer to answer."""
PEER_REQUESTS: Final = (128, 16.0)  # at once, and a second on average; here and below
PREFIX_REQUESTS: Final = (512, 64.0)

_STOP_GREETING: Final = greeting_of(STOP)


class _Refused(Exception):
    def __init__(self, status: Status.ValueType) -> None:
        super().__init__(Status.Name(status))
        self.status = status


class HopServer:
    """Answers the requests of peers at one host. It serves as long as the host runs."""

    def __init__(self, host: Host, limits: RelayLimits) -> None:
        self.peer_id: Final = host.peer_id
        self.addresses: Final = host.addresses
        """Full multiaddrs, in the form of `--relay`."""
        self._host = host
        self._network = host.libp2p.get_network()
        self._limits = limits
        self._ledger = RelayLedger(limits)
        self._counts = RelayCounts()
        rate = TokenBucket(limits.rate_bytes_per_s)
        self._forwarder = Forwarder(rate, self._counts, limits.circuit_s, limits.circuit_bytes)
        self._peer_requests = Allowance(*PEER_REQUESTS, trio.current_time)
        self._prefix_requests = Allowance(*PREFIX_REQUESTS, trio.current_time)
        self._network.register_notifee(OnConnections(lambda peer: None, self._ledger.forget))
        tell_observed_address(host.libp2p, HOP)
        host.libp2p.set_stream_handler(HOP, self._on_stream)

    def counts(self) -> RelayCounts:
        """Return what the relay does now and has done."""
        self._counts.reservations, self._counts.circuits = self._ledger.reservations, self._ledger.circuits
        return self._counts

    async def _on_stream(self, stream: Any) -> None:
        """Serve one request."""
        muxed: YamuxStream = stream.muxed_stream
        try:
            await self._serve(muxed)
        except _Refused as refused:
            self._counts.refused += 1
            with suppress(trio.TooSlowError, *LOST), trio.fail_after(REQUEST_S):
                await write_message(muxed, HopMessage(type=HopMessage.STATUS, status=refused.status))
                muxed.finish()
                return
            muxed.abandon()
        except (trio.TooSlowError, *LOST):
            muxed.abandon()

    async def _serve(self, stream: YamuxStream) -> None:
        """Raises _Refused, or TooSlowError or one of LOST when the peer does not ask or does not listen."""
        connection = stream.muxed_conn
        prefix = prefix_of((connection.get_remote_address() or (None, 0))[0])
        # First, so that few wait for the rest of their request.
        if not (self._peer_requests.take(str(connection.peer_id)) and self._prefix_requests.take(prefix)):
            raise _Refused(Status.RESOURCE_LIMIT_EXCEEDED)
        with trio.fail_after(REQUEST_S):
            request = await _request_on(stream)
        if connection.get_connection_type() == ConnectionType.RELAYED:
            raise _Refused(Status.PERMISSION_DENIED)
        if request.type == HopMessage.RESERVE:
            await self._reserve(stream, connection.peer_id, prefix)
        elif request.type == HopMessage.CONNECT and request.peer.id:
            await self._connect(stream, connection.peer_id, prefix, ID(request.peer.id))
        else:
            raise _Refused(Status.UNEXPECTED_MESSAGE)

    async def _reserve(self, stream: YamuxStream, peer: ID, prefix: str) -> None:
        """Reserve for the peer at the other end of the connection, whatever the request says."""
        try:
            self._ledger.reserve(peer, prefix)
        except Full:
            raise _Refused(Status.RESERVATION_REFUSED) from None
        granted = Reservation(
            expire=int(time.time()) + self._limits.reservation_s,
            addrs=[Multiaddr(address).to_bytes() for address in self._host.addresses],
        )
        answer = HopMessage(type=HopMessage.STATUS, status=Status.OK, reservation=granted, limit=self._limit())
        with trio.fail_after(REQUEST_S):
            await write_message(stream, answer)
        stream.finish()

    async def _connect(self, stream: YamuxStream, caller: ID, prefix: str, target: ID) -> None:
        if not self._ledger.holds(target):
            raise _Refused(Status.NO_RESERVATION)
        try:
            with self._ledger.circuit(caller, prefix, target):
                called = await self._call(target, caller)
                try:
                    with trio.fail_after(REQUEST_S):
                        answer = HopMessage(type=HopMessage.STATUS, status=Status.OK, limit=self._limit())
                        await write_message(stream, answer)
                    await self._forwarder.bridge(stream, called)
                finally:
                    called.abandon()
        except Full:
            raise _Refused(Status.RESOURCE_LIMIT_EXCEEDED) from None

    async def _call(self, target: ID, caller: ID) -> YamuxStream:
        """Return a stream on which `target` has accepted the caller. Raises _Refused."""
        connect = StopMessage(type=StopMessage.CONNECT, peer=PeerId(id=caller.to_bytes()), limit=self._limit())
        with trio.move_on_after(REQUEST_S):
            for connection in reversed(self._connections(target)):  # of a peer that came back the newest is alive
                try:
                    stream: YamuxStream = await connection.muxed_conn.open_stream()
                except LOST:
                    continue
                try:
                    await write_message(stream, connect, prefix=_STOP_GREETING)
                    await _expect(stream, _STOP_GREETING)
                    answer = await read_message(stream, StopMessage)
                except BaseException as error:
                    stream.abandon()
                    if isinstance(error, (*LOST, DecodeError)):
                        break
                    raise
                if answer.type == StopMessage.STATUS and answer.status == Status.OK:
                    return stream
                stream.abandon()
                break
        raise _Refused(Status.CONNECTION_FAILED)

    def _connections(self, peer: ID) -> list[Any]:
        """Return the peer's own connections to us, oldest first. We dial no peer."""
        found = self._network.get_connections(peer)
        return [c for c in found if not c.is_closed and c.get_connection_type() != ConnectionType.RELAYED]

    def _limit(self) -> Limit:
        return Limit(duration=self._limits.circuit_s, data=self._limits.circuit_bytes)


async def _request_on(stream: YamuxStream) -> HopMessage:
    """Raises _Refused for what is no request, or one of LOST."""
    try:
        request = await read_message(stream, HopMessage)
    except (DecodeError, ParseError, MessageTooLarge):
        raise _Refused(Status.MALFORMED_MESSAGE) from None
    if not request.HasField("type"):
        raise _Refused(Status.MALFORMED_MESSAGE)
    return request


async def _expect(stream: YamuxStream, greeting: bytes) -> None:
    """Read the greeting. Raises ParseError for another one: the peer does not speak the protocol."""
    got = b""
    while len(got) < len(greeting):
        got += await stream.read(len(greeting) - len(got))
    if got != greeting:
        raise ParseError("another protocol")
