"""Circuit Relay v2, the client's half (https://github.com/libp2p/specs/blob/master/relay/circuit-v2.md).

Three exchanges of small messages: `reserve` a slot at a relay, `connect` through a relay to a peer with a reservation,
and `accept` a peer that the relay connects to us. The result is an ordinary connection, authenticated and encrypted end
to end, whose bytes the relay forwards. The library has a client too, but it reserves on every dial, looks for relays on
its own and remembers addresses for 68 years.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import trio
from google.protobuf.message import DecodeError
from libp2p.connection_types import ConnectionType
from libp2p.custom_types import TProtocol
from libp2p.exceptions import BaseLibp2pError
from libp2p.network.connection.raw_connection import RawConnection
from libp2p.network.exceptions import SwarmException
from libp2p.peer.id import ID
from libp2p.relay.circuit_v2.pb.circuit_pb2 import HopMessage, PeerId, Status, StopMessage
from libp2p.utils.varint import encode_varint_prefixed, read_varint_prefixed_bytes_limited
from multiaddr import Multiaddr

from peer.net.libp2p_fixes.dialing import GARBLED
from peer.net.stream_channel import LOST

HOP: Final = TProtocol("/libp2p/circuit/relay/0.2.0/hop")
STOP: Final = TProtocol("/libp2p/circuit/relay/0.2.0/stop")
MESSAGE_BYTES_MAX: Final = 4096
_ACCEPT_S: Final = 10.0
_SHORTEST_S: Final = 60.0


Message = TypeVar("Message", HopMessage, StopMessage)


class CircuitRefused(BaseLibp2pError):
    """The relay refused; `status` is its name for the reason, in capitals."""

    def __init__(self, status: str) -> None:
        super().__init__(f"the relay answered {status}")
        self.status = status


@dataclass(frozen=True)
class Reservation:
    """The limits that a relay grants."""

    held_s: float
    """How long the reservation lasts, in seconds."""
    circuit_s: int
    """Seconds that a circuit may last; 0 for no limit."""
    circuit_bytes: int
    """Bytes that a circuit may carry; 0 for no limit."""


async def reserve(host: Any, relay: ID) -> Reservation:
    """Take or renew a reservation at a connected relay.

    Raises CircuitRefused, or what the library raises when the connection ends.
    """
    stream, reply = await _ask(host, relay, HopMessage(type=HopMessage.RESERVE))
    await stream.close()
    held_s = max(_SHORTEST_S, reply.reservation.expire - time.time())
    return Reservation(held_s, reply.limit.duration, reply.limit.data)


async def connect(host: Any, relay: ID, peer: ID) -> Any:
    """Return a SwarmConn to `peer` through a connected relay at which `peer` holds a reservation.

    Raises as `reserve`, and SwarmException when `peer` answers the handshake with garbage.
    """
    stream, _ = await _ask(host, relay, HopMessage(type=HopMessage.CONNECT, peer=PeerId(id=peer.to_bytes())))
    try:
        return await host.get_network().upgrade_outbound_raw_conn(_raw(stream, relay, peer, True), peer)
    except GARBLED as error:
        await stream.reset()
        raise SwarmException(f"the handshake with {peer} failed: {error!r}") from error
    except BaseException:
        await stream.reset()
        raise


async def accept(host: Any, stream: Any) -> Any:
    """Answer one `STOP` stream and return the muxed connection of the caller, None if that fails.

    The Noise handshake says who the caller is; the relay's claim is ignored.
    """
    with trio.move_on_after(_ACCEPT_S):
        try:
            message = await read_message(stream, StopMessage)
            if message.type == StopMessage.CONNECT:
                await write_message(stream, StopMessage(type=StopMessage.STATUS, status=Status.OK))
                raw = _raw(stream, stream.muxed_conn.peer_id, ID(message.peer.id), False)
                return await host.get_network().upgrade_inbound_raw_conn(raw, raw.get_transport_addresses()[0])
            refusal = StopMessage(type=StopMessage.STATUS, status=Status.UNEXPECTED_MESSAGE)
            await write_message(stream, refusal)
        except (*LOST, *GARBLED, DecodeError):
            pass  # a relay that sends nonsense, or a caller that fails the handshake
    await stream.reset()
    return None


async def read_message(stream: Any, kind: type[Message]) -> Message:
    """Read one message. Raises DecodeError, or what the library raises for one that is too long or does not end."""
    message = kind()
    message.ParseFromString(await read_varint_prefixed_bytes_limited(stream, MESSAGE_BYTES_MAX))
    return message


async def write_message(stream: Any, message: HopMessage | StopMessage, prefix: bytes = b"") -> None:
    """Write one message, behind `prefix`."""
    await stream.write(prefix + encode_varint_prefixed(message.SerializeToString()))


async def _ask(host: Any, relay: ID, request: HopMessage) -> tuple[Any, HopMessage]:
    """Return the stream and the relay's reply on it. Raises CircuitRefused unless the reply is OK."""
    stream = await host.new_stream(relay, [HOP])
    try:
        await write_message(stream, request)
        reply = await read_message(stream, HopMessage)
        if reply.type != HopMessage.STATUS or reply.status != Status.OK:
            known = reply.status in Status.values()
            raise CircuitRefused(Status.Name(reply.status) if known else f"status {reply.status}")
    except DecodeError as error:
        await stream.reset()
        raise CircuitRefused("with garbage") from error
    except BaseException:
        await stream.reset()
        raise
    return stream, reply


def _raw(stream: Any, relay: ID, peer: ID, initiator: bool) -> RawConnection:
    address = Multiaddr(f"/p2p/{relay}/p2p-circuit/p2p/{peer}")
    return RawConnection(stream, initiator, ConnectionType.RELAYED, [address])
