"""Membership over a record type of its own, between real nodes on 127.0.0.1."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import msgspec
import pytest
import trio

from dht.node import NodeConfig, open_node
from dht.records import Schema
from peer.events import Event, EventLog
from peer.identity import Identity
from peer.net.host import Host, open_host
from swarm.membership import membership as module
from swarm.membership.member_record import MEMBERS
from swarm.membership.membership import Membership, read_records
from tests.dht.support.local_swarm import BRISK
from tests.swarm.membership.test_bans import record

NAMESPACE, MODEL = "network", "a served model"


class ServerRecord(msgspec.Struct, frozen=True):
    """What a peer that serves blocks might publish: nothing of a training run."""

    name: str
    addresses: list[str]
    first: int
    end: int

    @property
    def role(self) -> str:
        return "server"


SERVERS = Schema[ServerRecord]("server", ServerRecord, ttl_max_s=60.0, size_max=1024, signer=lambda key, peer: True)


@dataclass
class Server:
    """A peer that publishes the blocks it serves."""

    host: Host
    name: str
    first: int
    membership: Membership[ServerRecord] = field(init=False)
    events: list[Event] = field(default_factory=list)

    def describe(self) -> ServerRecord:
        return ServerRecord(self.name, list(self.host.addresses), self.first, self.first + 2)

    def told(self, name: str) -> list[object]:
        return [event.fields["name"] for event in self.events if event.name == name]

    async def until(self, holds: Callable[[], bool]) -> None:
        with trio.fail_after(300):
            while not holds():
                await trio.sleep(0.01)


@asynccontextmanager
async def open_server(name: str, first: int, bootstrap: tuple[str, ...] = ()) -> AsyncIterator[Server]:
    log = EventLog()
    async with open_host(identity=Identity.generate(), events=log) as host:
        server = Server(host, name, first)
        async with open_node(host, NodeConfig(NAMESPACE, bootstrap, tuning=BRISK), [MEMBERS, SERVERS]) as node:
            server.membership = Membership(node, host, SERVERS, MODEL, server.describe)
            with log.subscribed(server.events.append):
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(server.membership.run)
                    yield server
                    nursery.cancel_scope.cancel()


async def test_any_record_type_is_published_refreshed_and_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "REFRESH_S", 0.1)
    async with open_server("one", 0) as one:
        async with open_server("two", 2, one.host.addresses) as two:
            both = {one.host.peer_id, two.host.peer_id}
            for server in (one, two):
                await server.until(lambda server=server: server.membership.view.keys() == both)  # type: ignore[misc]
            assert one.membership.others() == {two.host.peer_id: two.describe()}
            assert isinstance(one.membership.others()[two.host.peer_id], ServerRecord)
            two.first = 4
            await one.until(lambda: one.membership.others()[two.host.peer_id].first == 4)
            left = two.host.peer_id
        await one.until(lambda: one.membership.has_left(left) and not one.membership.others())
        assert sorted(one.told("member_joined")) == ["one", "two"] and one.told("member_left") == ["two"]  # type: ignore[type-var]


async def test_records_of_two_types_do_not_mix() -> None:
    """A training run's record and a server's record of one peer, under one key: the run's id."""
    async with (
        open_host(identity=Identity.generate(), events=EventLog()) as host,
        open_node(host, NodeConfig(NAMESPACE, tuning=BRISK), [MEMBERS, SERVERS]) as node,
    ):
        server = ServerRecord("one", [], 0, 2)
        await node.put(SERVERS, NAMESPACE, server, 60.0)
        await node.put(MEMBERS, NAMESPACE, record("s"), 60.0)
        assert await read_records(node, host, SERVERS, NAMESPACE) == {host.peer_id: server}
        assert await read_records(node, host, MEMBERS, NAMESPACE) == {host.peer_id: record("s")}
