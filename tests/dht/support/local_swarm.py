"""Real DHT nodes on 127.0.0.1 for the tests: in this process, each with its own host, or in child processes."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
import trio

from dht.node import DhtConfig, Node, NodeConfig, Schema, StorageLimits, open_node
from peer.events import Event, EventLog
from peer.identity import Identity
from peer.net.host import Host, open_host
from peer.net.reach import Reach
from tests.support.forking.children import open_child

RUN = "run-under-test"

# Background work runs several times a second instead of every half minute, and timeouts are long: all nodes live in one
# process, which stands still for seconds on a busy machine. No peer is probed for so short a silence, because a peer
# under probe gets no records, and tests count the stores of a record.
BRISK = DhtConfig(
    reply_timeout_s=15.0,
    lookup_budget_s=40.0,
    bootstrap_timeout_s=40.0,
    refresh_s=0.4,
    refresh_max_s=15.0,
    relookup_s=0.4,
    checkup_s=0.4,
    redial_min_s=0.1,
    redial_max_s=0.5,
    redial_strangers_max_s=0.5,
    probe_timeout_s=40.0,
    leave_timeout_s=5.0,
)
# For tests with silent nodes.
HASTY = replace(
    BRISK, reply_timeout_s=0.75, lookup_budget_s=1.2, bootstrap_timeout_s=5.0, probe_timeout_s=1.5, refresh_max_s=0.4
)


class Card(msgspec.Struct):
    number: int
    text: str = ""


CARDS: Schema[Card] = Schema("card", Card, ttl_max_s=600.0, size_max=500, signer=lambda key, peer: True)


@dataclass
class Facts:
    """The events of a log, and a way to wait for more."""

    log: EventLog = field(default_factory=EventLog)
    seen: list[Event] = field(default_factory=list)
    _changed: trio.Event = field(default_factory=trio.Event)

    def note(self, event: Event) -> None:
        self.seen.append(event)
        self._changed.set()
        self._changed = trio.Event()

    def all(self, name: str, **fields: Any) -> list[Event]:
        return [event for event in self.seen if event.name == name and fields.items() <= event.fields.items()]

    async def wait(self, name: str, **fields: Any) -> Event:
        with trio.move_on_after(60):
            while not self.all(name, **fields):
                await self._changed.wait()
        assert self.all(name, **fields), f"no {name} {fields} within a minute, only {self.seen}"
        return self.all(name, **fields)[0]


@dataclass
class Member:
    """A node in this process. `stop()` makes it say goodbye and leave."""

    host: Host
    node: Node
    facts: Facts
    _stopping: trio.Event = field(default_factory=trio.Event)
    _stopped: trio.Event = field(default_factory=trio.Event)

    @property
    def id(self) -> str:
        return self.host.peer_id

    @property
    def address(self) -> str:
        return self.host.addresses[0]

    async def stop(self) -> None:
        self._stopping.set()
        await self._stopped.wait()


@asynccontextmanager
async def bare_host(identity: Identity | None = None, listen: str = "/ip4/127.0.0.1/tcp/0") -> AsyncIterator[Host]:
    """Run a host without a node, for instance an attacker's."""
    config = open_host(identity=identity or Identity.generate(), events=EventLog(), reach=Reach((listen,)))
    async with config as host:
        yield host


class LocalSwarm:
    """A group of nodes, each a task of one nursery."""

    def __init__(self, nursery: trio.Nursery) -> None:
        self._nursery = nursery
        self.members: list[Member] = []

    async def add(
        self,
        bootstrap: Sequence[str] | None = None,
        *,
        identity: Identity | None = None,
        listen: str = "/ip4/127.0.0.1/tcp/0",
        cache: Path | None = None,
        namespace: str = RUN,
        tuning: DhtConfig = BRISK,
        limits: StorageLimits = StorageLimits(),  # noqa: B008
        wall: Callable[[], float] = time.time,
        schemas: Sequence[Schema[Any]] = (CARDS,),
        required: bool = False,
        prepare: Callable[[Host], None] = lambda host: None,
    ) -> Member:
        """Start one more node; by default its bootstrap is the first one. `prepare` gets the host before its node."""
        if bootstrap is None:
            bootstrap = [self.members[0].address] if self.members else []

        async def live(task_status: Any) -> None:
            facts = Facts()
            config = open_host(identity=identity or Identity.generate(), events=facts.log, reach=Reach((listen,)))
            with facts.log.subscribed(facts.note):
                member: Member | None = None
                try:
                    async with config as host:
                        prepare(host)
                        async with open_node(
                            host, NodeConfig(namespace, bootstrap, cache, required, tuning, limits), schemas, wall
                        ) as node:
                            member = Member(host, node, facts)
                            task_status.started(member)
                            await member._stopping.wait()
                finally:
                    if member is not None:
                        member._stopped.set()

        member: Member = await self._nursery.start(live)
        self.members.append(member)
        return member

    async def grow(self, count: int, tuning: DhtConfig = BRISK) -> list[Member]:
        """Start nodes until there are `count`, in one network."""
        while len(self.members) < count:
            await self.add(tuning=tuning)
        return self.members


@asynccontextmanager
async def local_swarm() -> AsyncIterator[LocalSwarm]:
    """Run a swarm whose nodes end with the block."""
    async with trio.open_nursery() as nursery:
        yield LocalSwarm(nursery)
        nursery.cancel_scope.cancel()


@dataclass
class Child:
    """A node in a child process, which refreshes a record under `key`."""

    process: subprocess.Popen[bytes]
    peer: str
    address: str

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)

    def freeze(self) -> None:
        self.process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self.process.send_signal(signal.SIGCONT)


async def start_child(nursery: trio.Nursery, bootstrap: Sequence[str], key: str, number: int, ttl_s: float) -> Child:
    """Run tests/dht/support/node_child.py until the nursery is cancelled."""

    async def live(task_status: Any) -> None:
        async with open_child("tests.dht.support.node_child", key, str(number), str(ttl_s), *bootstrap) as child:
            task_status.started(child)
            await trio.sleep_forever()

    child = await nursery.start(live)
    hello = json.loads(await child.line())
    return Child(child.process, hello["peer"], hello["address"])
