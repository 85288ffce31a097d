"""Who takes part in a run right now: one short-lived signed record a peer, refreshed by its owner.

Joiners find the group through these records, `peer status` and the monitor read nothing else. A record is gone
`TTL_S` after its owner last refreshed it, so the view is never older than that.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated, Final, Literal

import msgspec
import trio

from dht.node import Node
from dht.records import Schema
from peer.errors import BarnraiseError
from peer.events import EventLog
from peer.net.host import Host
from swarm.protocol.head import Head
from swarm.protocol.version import VERSION
from swarm.run.sections import STAGES_MAX

TTL_S: Final = 9.0
REFRESH_S: Final = 2.5
NAME_CHARS_MAX: Final = 64
ADDRESSES_MAX: Final = 8

Text = Annotated[str, msgspec.Meta(max_length=128)]
Address = Annotated[str, msgspec.Meta(max_length=256)]
Stage = Annotated[int, msgspec.Meta(ge=-1, lt=STAGES_MAX)]
Amount = Annotated[float, msgspec.Meta(ge=0.0, le=1e18)]  # no NaN, no infinity: others compute with it
Role = Literal["full", "stage", "feeder", "coordinator"]


class MemberRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What a peer publishes of itself. Shown to people; nothing here is trusted by rounds. `speed` in inner steps a
    second, `at` seconds since the Unix epoch, bytes since the peer started.

    Of a pipeline: the `stage` where it is or, if `ready_at` lies ahead, where it is going (-1: none, as feeders and the
    coordinator), `source` the stage that it came from (-1: none), `since` when it chose, both times seconds since the
    Unix epoch. `queue`: micro-batches that wait for it, `rate`: how many a second were counted there lately,
    `service_s`: seconds of its own work on one, smoothed; 0 while not known, as are `download_bytes_s` (measured) and
    `memory_bytes` (what it has for a stage). `pinned`: its owner chose the stage, it does not move."""

    session: Text
    name: Text
    role: Role
    version: Text
    addresses: Annotated[list[Address], msgspec.Meta(max_length=ADDRESSES_MAX)]
    term: int
    round: int
    head: bytes
    state_hash: bytes
    members: int
    phase: Text
    speed: float
    loss: float | None
    val_loss: float | None
    tokens: int
    bytes_up: int
    bytes_down: int
    joined_at: float
    at: float
    stage: Stage = -1
    source: Stage = -1
    queue: Amount = 0.0
    service_s: Amount = 0.0
    rate: Amount = 0.0
    download_bytes_s: Amount = 0.0
    memory_bytes: Amount = 0.0
    since: Amount = 0.0
    ready_at: Amount = 0.0
    has_text: bool = True
    pinned: bool = False

    def moving(self, now: float) -> bool:
        """Whether it is still on its way to its stage."""
        return self.stage >= 0 and self.ready_at > now


@dataclass(frozen=True, kw_only=True)
class LocalStatus:
    """What only a peer itself knows of what it publishes: see `MemberRecord`."""

    session: str
    name: str
    role: Role
    phase: str
    joined_at: float
    speed: float = 0.0
    loss: float | None = None
    val_loss: float | None = None
    stage: int = -1
    source: int = -1
    queue: float = 0.0
    service_s: float = 0.0
    rate: float = 0.0
    download_bytes_s: float = 0.0
    memory_bytes: float = 0.0
    since: float = 0.0
    ready_at: float = 0.0
    has_text: bool = True
    pinned: bool = False


def member_record(host: Host, head: Head, own: LocalStatus) -> MemberRecord:
    """The record of a peer that stands at `head`, now."""
    return MemberRecord(
        session=own.session,
        name=own.name[:NAME_CHARS_MAX],
        role=own.role,
        version=VERSION,
        addresses=list(host.addresses[:ADDRESSES_MAX]),
        term=head.term,
        round=head.round,
        head=head.hash,
        state_hash=head.state_hash,
        members=len(head.members),
        phase=own.phase,
        speed=own.speed,
        loss=own.loss,
        val_loss=own.val_loss,
        tokens=head.tokens,
        bytes_up=host.bytes_up,
        bytes_down=host.bytes_down,
        joined_at=own.joined_at,
        at=time.time(),
        stage=own.stage,
        source=own.source,
        queue=own.queue,
        service_s=own.service_s,
        rate=own.rate,
        download_bytes_s=own.download_bytes_s,
        memory_bytes=own.memory_bytes,
        since=own.since,
        ready_at=own.ready_at,
        has_text=own.has_text,
        pinned=own.pinned,
    )


MEMBERS: Final = Schema[MemberRecord](
    name="member", type=MemberRecord, ttl_max_s=60.0, size_max=4096, signer=lambda key, peer: True
)


MemberView = Callable[[], Mapping[str, MemberRecord]]
"""The records of everybody else in the run, by peer id."""


class Membership:
    """Publishes this peer's record and follows those of the others; addresses go to the host's book."""

    def __init__(
        self, node: Node, host: Host, run_id: str, member_record: Callable[[], MemberRecord], events: EventLog
    ) -> None:
        self._node, self._host, self._run_id = node, host, run_id
        self._describe = member_record
        self._events = events
        self.view: dict[str, MemberRecord] = {}

    async def run(self) -> None:
        """Refresh and read for ever. A network that fails for a while is no reason to stop."""
        while True:
            await self.announce()
            with self._told_if_stale():
                await self.read()
            await trio.sleep(REFRESH_S)

    async def announce(self) -> None:
        """Publish at once what others decide by."""
        with self._told_if_stale():
            await self._node.put(MEMBERS, self._run_id, self._describe(), TTL_S)

    async def read(self) -> dict[str, MemberRecord]:
        """Who is there now, by peer id."""
        entries = await self._node.get(MEMBERS, self._run_id)
        view = {peer: entry.value for peer, entry in entries.items()}
        for peer in view.keys() - self.view.keys():
            self._events.emit("member_joined", peer=peer, name=view[peer].name)
        for peer in self.view.keys() - view.keys():
            self._events.emit("member_left", peer=peer, name=self.view[peer].name)
        for peer, record in view.items():
            if peer != self._host.peer_id:
                self._host.book.add(peer, record.addresses)
        self.view = view
        return view

    def has_left(self, peer: str) -> bool:
        """Whether we have heard its goodbye, and nothing of it since."""
        return self._node.has_left(peer)

    @contextmanager
    def _told_if_stale(self) -> Iterator[None]:
        try:
            yield
        except BarnraiseError as error:
            self._events.emit("membership_stale", reason=str(error))
