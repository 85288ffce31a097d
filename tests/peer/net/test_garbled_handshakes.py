"""A peer that answers a handshake with garbage costs one dial, not the host."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import Any

import pytest
import trio
from libp2p.network.exceptions import SwarmException
from libp2p.peer.id import ID
from libp2p.relay.circuit_v2.pb.circuit_pb2 import HopMessage, Status
from libp2p.relay.circuit_v2.utils import read_delimited_msg, write_delimited_msg
from multiaddr import Multiaddr

from peer.errors import DialError
from peer.events import EventLog
from peer.identity import Identity
from peer.net.host import Host, open_host
from peer.net.nat.circuit_relay import HOP
from peer.net.reach import LOCAL

_NOISE = b"\x13/multistream/1.0.0\n\x07/noise\n"
GARBAGE = {
    "an invalid point": b"\x00\x60" + bytes(96),  # ValueError
    "a wrong tag": b"\x00\x60" + b"\x01" * 96,  # InvalidTag
    "a key that is too short": b"\x00\x01\x01",  # NoiseValueError
}


def _host() -> AbstractAsyncContextManager[Host]:
    return open_host(identity=Identity.generate(), events=EventLog(), reach=LOCAL)


@pytest.mark.parametrize("garbage", GARBAGE)
async def test_a_garbled_handshake_at_the_far_end_of_a_circuit(garbage: str) -> None:
    async def hop(stream: Any) -> None:
        await read_delimited_msg(stream, HopMessage)
        await write_delimited_msg(stream, HopMessage(type=HopMessage.STATUS, status=Status.OK))
        await stream.write(_NOISE + GARBAGE[garbage])

    async with _host() as relay, _host() as caller:
        relay.libp2p.set_stream_handler(HOP, hop)
        circuit = f"{relay.addresses[0]}/p2p-circuit/p2p/{Identity.generate().peer_id}"
        with pytest.raises(DialError):
            await caller.connect_address(circuit, timeout_s=30)
        assert await caller.connect_address(relay.addresses[0], timeout_s=30) == relay.peer_id


@pytest.mark.parametrize("garbage", GARBAGE)
async def test_a_garbled_handshake_of_a_dialled_peer(garbage: str) -> None:
    async def answer(stream: trio.SocketStream) -> None:
        await stream.send_all(_NOISE + GARBAGE[garbage])
        async for _ in stream:
            pass

    async with _host() as caller, trio.open_nursery() as nursery:
        (listener,) = await nursery.start(partial(trio.serve_tcp, host="127.0.0.1"), answer, 0)
        port = listener.socket.getsockname()[1]
        peer = ID.from_base58(Identity.generate().peer_id)
        network = caller.libp2p.get_network()
        network.peerstore.add_addrs(peer, [Multiaddr(f"/ip4/127.0.0.1/tcp/{port}")], 60)
        with pytest.raises(SwarmException):
            await network.dial_peer(peer)
        nursery.cancel_scope.cancel()
