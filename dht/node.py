"""The DHT's interface: put and get of typed, signed, expiring records.

    members = Schema("member", MemberRecord, ttl_max_s=30, size_max=2048, signer=lambda key, peer: True)
    config = NodeConfig(run_id, invite.addresses, cache=home / "peers.json")
    async with open_node(host, config, [members]) as node:
        await node.put(members, "group-0", record, ttl_s=9)
        for peer, entry in (await node.get(members, "group-0")).items(): ...

A node that never calls `put` only serves the others, as a meeting point does.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final, TypeVar

import trio

from dht.bootstrap import Bootstrap
from dht.clock import NEGLIGIBLE_S, SwarmClock
from dht.config import DEFAULT_TUNING, DhtConfig, NodeConfig
from dht.handlers import DhtHandlers
from dht.origin import TRUSTED
from dht.places import Places
from dht.protocol import LEAVE, STORE, LeaveRequest, StoreReply, StoreRequest
from dht.reader import Reader
from dht.records import (
    CLOCK_TOLERANCE_S,
    ExpiredRecord,
    FutureRecord,
    Record,
    RecordEntry,
    Schema,
    StaleRecord,
    StoreFull,
    open_record,
    sign_record,
)
from dht.router import PeerFault, Router
from dht.storage import Storage, StorageLimits
from peer.errors import DialError, RemoteError
from peer.net.host import Host
from peer.net.rpc import ask_each
from peer.notifier import beside_block

__all__ = ["DEFAULT_TUNING", "DhtConfig", "Node", "NodeConfig", "RecordEntry", "Schema", "StorageLimits", "open_node"]

T = TypeVar("T")

# How far ahead of the clock a record may be issued to overtake an older one. A store must still accept it, and neither
# clock is corrected by less than NEGLIGIBLE_S. Issue times beyond that are soon overtaken by the clock.
OVERTAKE_MAX_S: Final = CLOCK_TOLERANCE_S - 2 * NEGLIGIBLE_S


class Node:
    """One node of the DHT of a run. Made by `open_node`."""

    def __init__(self, router: Router, storage: Storage, schemas: Sequence[Schema[Any]]) -> None:
        self._router = router
        self._host = router.host
        self._storage = storage
        self._schemas = {schema.name: schema for schema in schemas}
        self._places = Places(router)
        self._reader = Reader(router, self._places, storage, self._schemas)
        self._server = DhtHandlers(router, storage, self._schemas)
        self._last_issued_us = 0
        self._refusals: dict[tuple[str, str], frozenset[str]] = {}

    def has_left(self, peer: str) -> bool:
        """Return whether a peer has said goodbye and sent nothing since."""
        return self._router.has_left(peer)

    @property
    def peers(self) -> frozenset[str]:
        """The other nodes that are thought to be alive (in a big network: those in the routing table)."""
        return frozenset(self._router.table)

    @property
    def stored(self) -> tuple[int, int]:
        """Number and bytes of the records that this node keeps."""
        return len(self._storage), self._storage.size_bytes

    def now(self) -> float:
        """Return Unix time in seconds, corrected by the other nodes' clocks if this machine's is wrong."""
        return self._router.clock.now()

    @property
    def clock_disagreement_s(self) -> float:
        """Seconds by which the other nodes' clocks (their median) are ahead of this machine's; 0 if none was seen."""
        return self._router.clock.disagreement_s

    async def put(self, schema: Schema[T], key: str, value: T, ttl_s: float) -> int:
        """Publish a value under our own peer id for `ttl_s` seconds; refresh it by putting it again.

        Returns how many stores took it. If 0, the event `dht_put_refused` says why. Takes milliseconds in a healthy
        swarm, about 2 s at most. Raises OversizeRecord, WrongSchema or WrongSigner if no store would take it.
        """
        self._check_known(schema)
        taken = 0
        for _ in range(2):
            record = self._sign(schema, key, value, ttl_s)
            taken, newest_us = await self._store_everywhere(record)
            if newest_us <= record.body.issued_us:
                break
            self._last_issued_us = newest_us  # our clock was set back, or ran ahead before a restart: overtake
        return taken

    async def get(self, schema: Schema[T], key: str) -> dict[str, RecordEntry[T]]:
        """Return the newest valid record of each signer under a key, by peer id.

        Asks our own store and several others, and checks every record again. Takes less than 2 s, and up to
        `probe_timeout_s` more if no store answers.
        """
        self._check_known(schema)
        return await self._reader.get(schema, key)

    def _check_known(self, schema: Schema[T]) -> None:
        known = self._schemas.get(schema.name)  # which may have a check of this run's beside
        if known is None or known.type is not schema.type:
            raise ValueError(f"schema {schema.name!r} was not given to open_node, so other nodes do not keep it either")

    def _sign(self, schema: Schema[T], key: str, value: T, ttl_s: float) -> Record:
        self._last_issued_us = max(self._last_issued_us + 1, int(self.now() * 1e6))
        signed = sign_record(
            self._host.identity,
            self._router.namespace,
            self._schemas[schema.name],
            key,
            value,
            ttl_s=ttl_s,
            issued_us=self._last_issued_us,
        )
        return open_record(signed, self._router.namespace, self._schemas)

    async def _store_everywhere(self, record: Record) -> tuple[int, int]:
        """Return how many stores took a record, and the issue time of the newest one that a store holds.

        A time later than we may issue is not believed: with it, all other stores would refuse us.
        """
        taken, newest_us, refused = 0, 0, set[str]()

        async def store_at(peer: str) -> None:
            nonlocal taken, newest_us
            try:
                reply = await self._store_at(peer, record)
            except (RemoteError, StoreFull) as error:
                refused.add(error.code if isinstance(error, RemoteError) else type(error).__name__)
                return
            except PeerFault:
                return  # a dead peer; the router has noted it
            taken += reply.kept
            if reply.newest_us <= (self.now() + OVERTAKE_MAX_S) * 1e6:
                newest_us = max(newest_us, reply.newest_us)

        async with trio.open_nursery() as nursery:
            for peer in await self._places.stores(record.digest):
                nursery.start_soon(store_at, peer)
        self._report_refusals(record, frozenset(refused))
        return taken, newest_us

    async def _store_at(self, peer: str, record: Record) -> StoreReply:
        router = self._router
        if peer == self._host.peer_id:
            try:
                self._storage.put(record, trio.current_time(), TRUSTED)
            except StaleRecord as error:
                return StoreReply(kept=False, newest_us=error.newest_us, clock_s=router.clock.raw())
            return StoreReply(kept=True, newest_us=record.body.issued_us, clock_s=router.clock.raw())
        request = StoreRequest(router.namespace, router.addresses(), record.signed)
        return (await router.ask(peer, STORE, request, router.reply_timeout_s(peer))).body

    def _report_refusals(self, record: Record, refused: frozenset[str]) -> None:
        """Emit an event when the reasons for which stores refuse a key change, not at every refresh."""
        name = (record.body.schema, record.body.key)
        if refused and refused != self._refusals.get(name):
            wrong_clock = refused & {ExpiredRecord.__name__, FutureRecord.__name__}
            self._router.events.emit(
                "dht_put_refused",
                schema=record.body.schema,
                key=record.body.key,
                why=sorted(refused),
                remedy="set this machine's clock (for instance by NTP)" if wrong_clock else None,
            )
        if refused:
            self._refusals[name] = refused
        else:
            self._refusals.pop(name, None)

    async def leave(self) -> None:
        """Say goodbye, so that other nodes drop us and our records at once instead of at expiry."""
        told = dict.fromkeys(self.peers & self._host.connected, LeaveRequest(self._router.namespace))
        await ask_each(self._host.rpc, LEAVE, told, self._router.tuning.leave_timeout_s)


@asynccontextmanager
async def open_node(
    host: Host, config: NodeConfig, schemas: Sequence[Schema[Any]], wall: Callable[[], float] = time.time
) -> AsyncIterator[Node]:
    """Join the DHT of a run over `host` and take part in it until the block ends.

    The block begins once a peer has answered or all have failed; the first node of a run just starts. A node that
    reaches no peer, now or later, keeps trying in the background. `wall` is this machine's clock, in Unix time.

    Raises DialError, with each address and why it failed, if `config.required` and no peer answered.
    """
    async with beside_block() as nursery:
        router = Router(host, config, SwarmClock(wall), nursery)
        node = Node(router, Storage(config.limits, host.is_connected), schemas)
        contact = Bootstrap(router, config.bootstrap, config.cache, config.met)
        try:
            try:
                await contact.join()
            except DialError:
                if config.required:
                    raise
            nursery.start_soon(contact.run)
            nursery.start_soon(router.verify_strangers)
            yield node
        finally:
            nursery.cancel_scope.cancel()  # first: a peer that we ask after our goodbye takes us for alive
            with trio.CancelScope(shield=True):
                await node.leave()
            contact.save_cache()
