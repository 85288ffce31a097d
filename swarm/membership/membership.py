"""The peers that take part right now: one short-lived signed record a peer, refreshed by the peer itself.

`Membership` publishes records of any type with a name and addresses (`dht.records.Schema`); those of a training run are
`swarm.membership.member_record`. A record is gone `TTL_S` after its peer last refreshed it, so a view is never older.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Final, Generic, Protocol, TypeVar

import trio

from dht.node import Node
from dht.records import Schema
from peer.catalogue.groups import MemberJoined, MemberLeft, MembershipStale
from peer.errors import BarnraiseError
from peer.events import EventLog
from peer.net.host import Host

TTL_S: Final = 9.0
REFRESH_S: Final = 2.5
LOOK_AGAIN_S: Final = 0.5


class PeerRecord(Protocol):
    """Fields of every record of a peer: a name for display, the peer's activity, and the multiaddrs to dial."""

    @property
    def name(self) -> str: ...

    @property
    def role(self) -> str: ...

    @property
    def addresses(self) -> Sequence[str]: ...


RecordT = TypeVar("RecordT", bound=PeerRecord)


async def read_records(node: Node, host: Host, schema: Schema[RecordT], key: str) -> dict[str, RecordT]:
    """Return the records under `key`, by peer id; the host learns the addresses of other peers."""
    entries = await node.get(schema, key)
    records = {peer: entry.value for peer, entry in entries.items()}
    for peer, record in records.items():
        if peer != host.peer_id:
            host.learn(peer, record.addresses, told_by=peer)
    return records


class Membership(Generic[RecordT]):
    """Publishes this peer's record under `key` and follows the records of the other peers there.

    `describe` returns this peer's record as it is now. `view` holds the records last read, this peer's among them.
    """

    def __init__(
        self,
        node: Node,
        host: Host,
        schema: Schema[RecordT],
        key: str,
        describe: Callable[[], RecordT],
        events: EventLog | None = None,
    ) -> None:
        """`events`: log for peers that come and go; None: the host's."""
        self._node, self._host, self._schema, self._key = node, host, schema, key
        self._describe = describe
        self._events = host.events if events is None else events
        self.view: Mapping[str, RecordT] = {}
        self._reads = 0
        self._looking, self._looked_at = trio.Lock(), float("-inf")

    async def run(self) -> None:
        """Publish and read until cancelled. A network failure is reported as `membership_stale`, and retried."""
        while True:
            await self.announce()
            with self._failures_told():
                await self.read()
            await trio.sleep(REFRESH_S)

    async def announce(self) -> None:
        """Publish this peer's record at once."""
        with self._failures_told():
            await self._node.put(self._schema, self._key, self._describe(), TTL_S)

    async def read(self) -> None:
        """Bring `view` up to date. Raises NetworkError."""
        self._reads += 1
        before, events = self.view, self._events
        self.view = await read_records(self._node, self._host, self._schema, self._key)
        for peer in self.view.keys() - before.keys():
            record = self.view[peer]
            events.emit(MemberJoined(peer=peer, name=record.name, role=record.role))
        for peer in before.keys() - self.view.keys():
            events.emit(MemberLeft(peer=peer, name=before[peer].name, role=before[peer].role))

    def others(self) -> Mapping[str, RecordT]:
        """The records in `view` but this peer's own."""
        return {peer: record for peer, record in self.view.items() if peer != self._host.peer_id}

    async def knows(self, peer: str) -> bool:
        """Whether this peer is connected or has a record. One that is newer than `view` is looked for, once for all who
        ask meanwhile and after a pause, as others may make us ask."""
        reads = self._reads
        if peer in self.view or self._host.is_connected(peer):
            return True
        async with self._looking:
            if self._reads == reads:
                await trio.sleep_until(self._looked_at + LOOK_AGAIN_S)
                self._looked_at = trio.current_time()
                with self._failures_told():
                    await self.read()
        return peer in self.view

    def has_left(self, peer: str) -> bool:
        """Whether this peer has said goodbye, and published nothing since."""
        return self._node.has_left(peer)

    @contextmanager
    def _failures_told(self) -> Iterator[None]:
        try:
            yield
        except BarnraiseError as error:
            self._events.emit(MembershipStale(reason=str(error)))
