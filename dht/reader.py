"""Reading: ask several stores, check every record, keep the newest valid one of each signer.

Of signers that are not trusted, a reading takes STRANGERS_BYTES_MAX at most, of our own store first, then of trusted
stores: many free identities cost it no more than that.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from math import inf
from typing import Any, Final, TypeVar, cast

import trio

from dht.key import record_key
from dht.pages import decode_page
from dht.places import Places, ReadPlan
from dht.protocol import FETCH, FetchReply, FetchRequest, HeldRecord
from dht.records import (
    ExpiredRecord,
    FutureRecord,
    Record,
    RecordEntry,
    Schema,
    UnknownSchema,
    UnvouchedRecord,
    WrongSchema,
    check_age,
    is_expired,
    open_record,
    signed_size,
)
from dht.router import PeerFault, Router
from dht.storage import Storage
from peer.bounds import Latest
from peer.errors import ProtocolViolation
from peer.identity import Signed
from peer.net.rpc import Reply
from peer.notifier import Notifier

T = TypeVar("T")

OPENED_MAX: Final = 4096
NEWEST_MAX: Final = 8192
SWEEP_S: Final = 10.0  # between two removals of expired records
STRANGERS_BYTES_MAX: Final = 64 << 10
PAGES_AT_ONCE: Final = 16  # of one store: half of the calls that a client may have open
CHECKS_PER_TURN: Final = 32  # signatures checked before other tasks may run (54 us each)


class _StrangersRoom:
    """The limits of one reading for signers that are not trusted."""

    def __init__(self, size_bytes: float) -> None:
        self._size_bytes: dict[str, int] = {}
        self._left = size_bytes

    def admits(self, signed: Signed) -> bool:
        """Return whether there is room for a record, and if so count it: once a signer, at its largest."""
        growth = max(0, signed_size(signed) - self._size_bytes.get(signed.signer, 0))
        if growth > self._left:
            return False
        self._left -= growth
        self._size_bytes[signed.signer] = max(signed_size(signed), self._size_bytes.get(signed.signer, 0))
        return True


class Reader:
    """The reads of one node. Remembers checked records, and the newest issue time of each signer."""

    def __init__(self, router: Router, places: Places, storage: Storage, schemas: Mapping[str, Schema[Any]]) -> None:
        self._router = router
        self._places = places
        self._storage = storage
        self._schemas = schemas
        self._opened = Latest[Signed, Record](OPENED_MAX)
        self._next_sweep = 0.0
        self._newest_us = Latest[tuple[bytes, str], int](NEWEST_MAX)

    async def get(self, schema: Schema[T], key: str) -> dict[str, RecordEntry[T]]:
        """See `Node.get`."""
        digest = record_key(self._router.namespace, schema.name, key)
        now = trio.current_time()
        if now >= self._next_sweep:
            self._forget_expired(now)
        own = [HeldRecord(item.record.signed, item.expires_at - now) for item in self._storage.get(digest, now)]
        replies = await self._fetch(digest)
        replies.sort(key=lambda reply: not self._router.is_trusted(reply[0]))
        freshest: dict[str, tuple[Record, float]] = {}
        room = _StrangersRoom(inf if self._schemas[schema.name].scarce else STRANGERS_BYTES_MAX)
        await self._merge(own, digest, freshest, room)
        for store, reply in replies:
            try:
                await self._merge(decode_page(reply.payload), digest, freshest, room, reply.body.age_s)
            except ProtocolViolation as error:
                self._router.ban(store, f"served a bad record: {error}")
        return {
            signer: RecordEntry(signer, cast(T, record.value), time.time() + remaining_s)
            for signer, (record, remaining_s) in freshest.items()
            if self._is_newest(record)
        }

    async def _merge(
        self,
        held: Iterable[HeldRecord],
        digest: bytes,
        freshest: dict[str, tuple[Record, float]],
        room: _StrangersRoom,
        age_s: float = 0.0,
    ) -> None:
        """Add records of a store, encoded `age_s` ago. Raises ProtocolViolation at the first that none may hold."""
        for number, (signed, remaining_s) in enumerate((item.signed, item.remaining_s) for item in held):
            if number % CHECKS_PER_TURN == CHECKS_PER_TURN - 1:
                await trio.lowlevel.checkpoint()
            foreign = not self._is_trusted(signed.signer)
            if foreign and signed_size(signed) <= STRANGERS_BYTES_MAX and not room.admits(signed):
                continue  # one that no store may hold is told below
            try:
                record = self._open(signed)
            except UnvouchedRecord:
                continue  # the store may not know of a ban yet
            except UnknownSchema as error:
                raise WrongSchema(f"it was served under the key of another schema: {error}") from error
            if record.digest != digest:
                raise WrongSchema(f"a record of {record.body.key!r} was served under another key")
            try:
                check_age(record, self._router.clock.now())
            except (ExpiredRecord, FutureRecord):
                continue  # clocks differ: no proof of malice
            best, best_s = freshest.get(record.signer, (None, 0.0))
            remaining_s = min(remaining_s - age_s, record.ttl_s)
            if remaining_s <= 0:
                continue  # its page was encoded before it expired
            if best is None or record.body.issued_us > best.body.issued_us:
                freshest[record.signer] = (record, remaining_s)
            elif record.body.issued_us == best.body.issued_us:
                freshest[record.signer] = (best, max(best_s, remaining_s))

    def _is_trusted(self, signer: str) -> bool:
        return signer == self._router.host.peer_id or self._router.is_trusted(signer)

    def _open(self, signed: Signed) -> Record:
        record = self._opened.get(signed)
        if record is None:
            record = self._opened[signed] = open_record(signed, self._router.namespace, self._schemas)
        return record

    def _forget_expired(self, now: float) -> None:
        """Drop checked records that have expired: a member signs a new one every few seconds."""
        self._next_sweep = now + SWEEP_S
        clock_s = self._router.clock.now()
        for signed in [signed for signed, record in self._opened.items() if is_expired(record, clock_s)]:
            del self._opened[signed]

    def _is_newest(self, record: Record) -> bool:
        """Return whether no newer record of the signer was ever seen, so that no store can bring an old one back."""
        name = (record.digest, record.signer)
        newest_us = self._newest_us.get(name, 0)
        if record.body.issued_us < newest_us:
            return False
        self._newest_us[name] = record.body.issued_us
        return True

    async def _fetch(self, digest: bytes) -> list[tuple[str, Reply[FetchReply]]]:
        """Return the pages of a key's stores. If none answers, a machine is frozen, perhaps ours: they are asked once
        more, for as long as a probe. A reading without an answer would show an empty run."""
        tuning = self._router.tuning
        pages: list[tuple[str, Reply[FetchReply]]] = []
        for timeout_s in (tuning.reply_timeout_s, tuning.probe_timeout_s):
            if not pages:
                plan = await self._places.plan_read(digest)
                pages = await self._fetch_from(plan, digest, timeout_s)
        return pages

    async def _fetch_from(self, plan: ReadPlan, digest: bytes, timeout_s: float) -> list[tuple[str, Reply[FetchReply]]]:
        """Return the pages of the plan's stores, those that come in time. Silent stores are replaced."""
        router, tuning = self._router, self._router.tuning
        waiting = [*plan.first, *plan.further]
        in_flight: dict[str, float] = {}  # store -> asked at
        answered: set[str] = set()
        pages: list[tuple[str, Reply[FetchReply]]] = []
        progress = Notifier()

        async def fetch(store: str) -> None:
            with suppress(*PeerFault):  # the router has updated the view
                await self._fetch_pages(store, digest, timeout_s, pages)
                answered.add(store)
                timeout.deadline = min(timeout.deadline, trio.current_time() + tuning.reply_timeout_s)
            del in_flight[store]
            progress.notify()

        def is_over() -> bool:
            return len(answered) >= plan.wanted and in_flight.keys().isdisjoint(plan.first)

        extra = 0
        with trio.move_on_after(timeout_s) as timeout:
            async with trio.open_nursery() as nursery:
                while not is_over() and (waiting or in_flight):
                    while waiting and len(in_flight) < plan.wanted - len(answered) + extra:
                        store = waiting.pop(0)
                        in_flight[store] = trio.current_time()
                        nursery.start_soon(fetch, store)
                    extra += not await progress.wait(tuning.hedge_s)
                nursery.cancel_scope.cancel()
        for store, asked_at in in_flight.items():
            if trio.current_time() - asked_at >= tuning.hedge_s:
                router.suspect(store)  # so that the next read does not wait for it again
        return pages

    async def _fetch_pages(
        self, store: str, digest: bytes, timeout_s: float, pages: list[tuple[str, Reply[FetchReply]]]
    ) -> None:
        """Append the pages of one store as they come. Raises PeerFault if the first one does not."""
        router, limit = self._router, trio.CapacityLimiter(PAGES_AT_ONCE)

        async def fetch(number: int, edition: int) -> FetchReply:
            request = FetchRequest(router.namespace, router.addresses(), digest, number, edition)
            reply = await router.ask(store, FETCH, request, max(timeout_s, router.reply_timeout_s(store)))
            pages.append((store, reply))
            return reply.body

        async def fetch_further(number: int, edition: int) -> None:
            async with limit:
                with suppress(*PeerFault):  # other stores have the same records
                    await fetch(number, edition)

        first = await fetch(0, 0)
        async with trio.open_nursery() as nursery:
            for number in range(1, first.pages):
                nursery.start_soon(fetch_further, number, first.edition)
