"""The connections under flows: TLS where the peer can be dialled, else a libp2p stream."""

from __future__ import annotations

from typing import Any, Final

import trio
from libp2p.custom_types import TProtocol

from peer.errors import ConnectionLost
from peer.net.bulk.transport import OFFER, BulkTransport, OfferRequest
from peer.net.connections import Connections
from peer.net.flow.flow import FlowParts, FlowWire
from peer.net.flow.flows import Flows
from peer.net.rpc import Rpc
from peer.net.stream_channel import StreamChannel, greeting_of
from peer.net.wire import Channel

PROTOCOL: Final = "/barnraise/1/flow"
OFFER_S: Final = 10.0


class StreamWire:
    """A flow's connection over one libp2p stream."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel

    def send_now(self, view: memoryview) -> int:
        return 0  # the muxer's writes wait for the connection

    async def send_some(self, view: memoryview) -> int:
        await self._channel.send(view)
        return len(view)

    async def receive_into(self, view: memoryview) -> int:
        data = await self._channel.receive(len(view))
        view[: len(data)] = data
        return len(data)

    def close(self) -> None:
        self._channel.abandon()


def open_flows(
    nursery: trio.Nursery,
    libp2p_host: Any,
    rpc: Rpc,
    connections: Connections,
    bulk: BulkTransport,
    parts: FlowParts,
) -> Flows:
    """Return the flows of a host, which takes those of others from now on once they are served."""

    async def dial(peer: str) -> FlowWire:
        """Connect to a peer. Raises DialError, ConnectionLost, or RemoteError if it takes no flows."""
        try:
            ip = await connections.direct_ip(peer)
            if ip is not None:
                return await bulk.dial_flow(peer, ip)
        except (ConnectionLost, OSError):
            await trio.lowlevel.checkpoint()
        # The call introduces both, and tells whether the peer takes flows at all.
        await rpc.call(peer, OFFER, OfferRequest(flow=True), timeout_s=OFFER_S)
        return StreamWire(await connections.open_stream(peer, greeting_of(PROTOCOL)))

    flows = Flows(nursery, dial, parts, lambda: bulk.sockets)
    bulk.flows = flows

    async def on_stream(stream: Any) -> None:
        """Serve a stream on which the library has exchanged the greetings."""
        peer = str(stream.muxed_conn.peer_id)
        channel = StreamChannel(peer, stream.muxed_stream, owes_greeting=False, expects_greeting=False)
        await flows.accept(peer, StreamWire(channel))

    libp2p_host.set_stream_handler(TProtocol(PROTOCOL), on_stream)
    return flows
