"""Our peers at a relay, ours and go-libp2p's. Real NATs are in `tests/processes/test_nat.py`."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace

import msgspec
import pytest
import trio
from libp2p.exceptions import BaseLibp2pError
from libp2p.peer.id import ID
from libp2p.peer.peerinfo import PeerInfo
from multiaddr import Multiaddr

from peer.errors import DialError
from peer.events import EventLog
from peer.identity import Identity
from peer.net.host import Host, open_host
from peer.net.method import Call, Method
from peer.net.nat.reachability import probe
from peer.net.reach import LOCAL
from peer.net.relay.ledger import RelayLimits
from peer.net.relay.server import open_relay
from tests.support.nat.go_relay import find_daemon, open_go_relay

pytestmark = pytest.mark.process


class Note(msgspec.Struct, frozen=True):
    text: str


ECHO: Method[Note, Note] = Method("test/echo", Note, Note)


async def _echo(call: Call[Note]) -> Note:
    return call.body


@asynccontextmanager
async def _ours() -> AsyncIterator[str]:
    async with open_relay(Identity.generate(), LOCAL, RelayLimits()) as relay:
        yield relay.addresses[0]


@asynccontextmanager
async def _gos() -> AsyncIterator[str]:
    async with open_go_relay() as relay:
        yield relay.address


@pytest.fixture(params=["ours", "go"])
def relay(request: pytest.FixtureRequest) -> AbstractAsyncContextManager[str]:
    """Yields the address of a relay, which runs inside its block."""
    if request.param == "go" and find_daemon() is None:
        pytest.skip("hivemind's daemon is not installed: on Linux x86-64 run `make tools`")
    return _ours() if request.param == "ours" else _gos()


@asynccontextmanager
async def a_host(*relays: str) -> AsyncIterator[Host]:
    config = open_host(identity=Identity.generate(), events=EventLog(), reach=replace(LOCAL, relays=relays))
    placed = trio.Event()
    async with config as host:
        host.rpc.register(ECHO, _echo)
        host.traversal.changed = placed.set
        with trio.fail_after(300):
            while relays and not host.traversal.addresses:
                await placed.wait()
        yield host


def _circuits(host: Host) -> list[str]:
    return [address for address in host.addresses if "/p2p-circuit/" in address]


async def test_hole_11_a_peer_is_reached_by_its_circuit_address(
    relay: AbstractAsyncContextManager[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("peer.net.nat.traversal._DIAL_BACK_S", 60.0)  # before it punches a hole instead
    async with relay as address, a_host(address) as hidden, a_host() as caller:
        circuits = _circuits(hidden)
        assert circuits == [f"{address}/p2p-circuit/p2p/{hidden.peer_id}"]
        with pytest.raises(BaseLibp2pError):  # the library cannot dial such an address
            await caller.libp2p.connect(PeerInfo(ID.from_base58(hidden.peer_id), [Multiaddr(circuits[0])]))

        caller.book.add(hidden.peer_id, circuits)
        reply = await caller.rpc.call(hidden.peer_id, ECHO, Note("through the relay"), timeout_s=60)
        assert reply.body == Note("through the relay")
        assert address.rpartition("/")[2] not in caller.connected
        found = await probe(caller, hidden.peer_id, timeout_s=60)
        assert found.kind == "public"  # no NAT here, so it dials back


async def test_a_peer_that_left_its_relay_is_told_apart_from_a_dead_relay(
    relay: AbstractAsyncContextManager[str],
) -> None:
    async with a_host() as caller:
        async with relay as address:
            async with a_host(address) as hidden:
                circuits = _circuits(hidden)
            with trio.fail_after(300):
                answer = "the relay cannot reach it"
                while "the relay cannot reach it" in answer:  # it has not noticed yet that the peer is gone
                    with pytest.raises(DialError) as caught:
                        await caller.connect_address(circuits[0], timeout_s=60)
                    answer = str(caught.value)
            assert "no reservation there any more" in answer
        with pytest.raises(DialError):
            await caller.connect_address(circuits[0], timeout_s=60)
