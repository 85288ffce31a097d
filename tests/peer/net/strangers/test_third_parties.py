"""What others tell of addresses, and how many connections that costs a third party, which listens there and counts."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import trio

from peer.errors import DialError
from peer.events import EventLog
from peer.identity import Identity
from peer.net.host import Host, open_host
from peer.net.strangers import claims
from peer.net.strangers.claims import FAILURES_AT_ONE_MAX
from tests.peer.net.test_rpc import hosts

TRIES = 60


class ThirdParty:
    """Listens at some ports of 127.0.0.1, and hangs up on all that connect."""

    def __init__(self, ports: list[int]) -> None:
        self.addresses = [f"/ip4/127.0.0.1/tcp/{port}" for port in ports]
        self.connections = 0

    async def hang_up(self, stream: trio.SocketStream) -> None:
        self.connections += 1
        await stream.aclose()


@asynccontextmanager
async def third_party(ports: int = 1) -> AsyncIterator[ThirdParty]:
    listeners = [(await trio.open_tcp_listeners(0, host="127.0.0.1"))[0] for _ in range(ports)]
    third = ThirdParty([listener.socket.getsockname()[1] for listener in listeners])
    async with trio.open_nursery() as nursery:
        nursery.start_soon(trio.serve_listeners, third.hang_up, listeners)
        yield third
        nursery.cancel_scope.cancel()


@asynccontextmanager
async def server_and_guest(named: bool = False) -> AsyncIterator[tuple[Host, Host]]:
    """A host of a served model, where proof is enough, and a guest of it."""
    async with hosts() as (server, guest, _):
        server.admissions.guard()
        server.admissions.proof_is_enough = True
        server.admissions.grant(guest.peer_id, "member", trusted=True)
        if named:
            server.admissions.trust("head", [guest.peer_id])
        yield server, guest


async def dials(server: Host, peers: list[str]) -> None:
    for peer in peers:
        with pytest.raises(DialError):
            await server.connect(peer, timeout_s=60)


async def test_a_guests_word_of_others_costs_a_third_party_one_connection() -> None:
    invented = [Identity.generate().peer_id for _ in range(TRIES)]
    async with third_party() as third, server_and_guest() as (server, guest):
        for peer in invented:
            server.learn(peer, third.addresses, told_by=guest.peer_id)
        await dials(server, invented)
        assert third.connections == 1


async def test_a_guests_word_displaces_no_address_of_others() -> None:
    peer = Identity.generate().peer_id
    async with server_and_guest() as (server, guest):
        server.book.claim(peer, ["/ip4/127.0.0.1/tcp/4001"])
        server.learn(peer, ["/ip4/127.0.0.1/tcp/4002"], told_by=guest.peer_id)
        assert server.book.get(peer) == ("/ip4/127.0.0.1/tcp/4001",)


@pytest.mark.parametrize("ports", [1, 16])
async def test_what_is_believed_costs_a_third_party_a_bounded_number(
    ports: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a guest's own record, and by a peer that the run names."""
    monkeypatch.setattr(claims, "PORT_CLOSED_MIN_S", 0.01)  # else the pauses alone would bound it
    invented = [Identity.generate().peer_id for _ in range(TRIES)]
    async with third_party(ports) as third, server_and_guest(named=True) as (server, guest):
        for peer in invented:
            server.learn(peer, third.addresses, told_by=guest.peer_id)
        await dials(server, invented)
        assert 1 <= third.connections <= FAILURES_AT_ONE_MAX


async def test_a_peer_that_was_found_at_an_address_is_dialled_there_as_often_as_need_be() -> None:
    config = open_host(identity=Identity.generate(), events=EventLog())
    async with (
        third_party(4) as third,
        server_and_guest(named=True) as (server, guest),
        config as honest,
    ):
        server.learn(honest.peer_id, honest.addresses, told_by=guest.peer_id)
        await server.connect(honest.peer_id, timeout_s=60)
        for peer in [Identity.generate().peer_id for _ in range(TRIES)]:
            server.learn(peer, third.addresses, told_by=guest.peer_id)
            await dials(server, [peer])
        await server.disconnect(honest.peer_id)
        await server.connect(honest.peer_id, timeout_s=60)
        assert server.is_connected(honest.peer_id)
