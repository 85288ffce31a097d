"""Reading: ask several stores, check every record, keep the newest valid one of each signer."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from typing import Any, Final, TypeVar, cast

import msgspec
import trio

from dht.key import record_key
from dht.protocol import FETCH, FetchRequest, HeldRecord
from dht.records import (
    ExpiredRecord,
    FutureRecord,
    Record,
    RecordEntry,
    Schema,
    WrongSchema,
    check_age,
    is_expired,
    open_record,
)
from dht.router import PeerFault, Router
from dht.storage import Storage, Stored
from peer.decoding import MALFORMED, told
from peer.errors import ProtocolViolation
from peer.identity import Signed
from peer.net.rpc import Buffer

T = TypeVar("T")

OPENED_MAX: Final = 4096
NEWEST_MAX: Final = 8192
SWEEP_S: Final = 10.0  # between two removals of expired records
CHECKS_PER_TURN: Final = 32  # signatures checked before other tasks may run (54 us each)

_encoder: Final = msgspec.msgpack.Encoder()
_decoder: Final = msgspec.msgpack.Decoder(list[HeldRecord])


def encode_held(stored: Iterable[Stored], now: float) -> bytes:
    """Return the payload of a fetch: records with the time that is left for each. `decode_held` reads it."""
    return _encoder.encode([HeldRecord(item.record.signed, item.expires_at - now) for item in stored])


def decode_held(payload: Buffer) -> list[HeldRecord]:
    """Return the records in the payload of a fetch. Raises ProtocolViolation."""
    try:
        return _decoder.decode(payload)
    except MALFORMED as error:
        raise ProtocolViolation(f"records that do not decode: {told(error)}") from error


class Reader:
    """The reads of one node. Remembers checked records, and the newest issue time of each signer."""

    def __init__(self, router: Router, storage: Storage, schemas: Mapping[str, Schema[Any]]) -> None:
        self._router = router
        self._storage = storage
        self._schemas = schemas
        self._opened: OrderedDict[Signed, Record] = OrderedDict()
        self._next_sweep = 0.0
        self._newest_us: OrderedDict[tuple[bytes, str], int] = OrderedDict()

    async def get(self, schema: Schema[T], key: str) -> dict[str, RecordEntry[T]]:
        """See `Node.get`."""
        digest = record_key(self._router.namespace, schema.name, key)
        now = trio.current_time()
        if now >= self._next_sweep:
            self._forget_expired(now)
        local = encode_held(self._storage.get(digest, now), now)
        stores = [peer for peer in await self._router.closest(digest) if peer != self._router.host.peer_id]
        replies = await self._fetch_from(stores, digest)
        freshest: dict[str, tuple[Record, float]] = {}
        for store, payload in [(self._router.host.peer_id, local), *replies]:
            try:
                await self._merge(decode_held(payload), digest, freshest)
            except ProtocolViolation as error:
                self._router.ban(store, f"served a bad record: {error}")
        return {
            signer: RecordEntry(signer, cast(T, record.value), time.time() + remaining_s)
            for signer, (record, remaining_s) in freshest.items()
            if self._is_newest(record)
        }

    async def _merge(
        self, held: Iterable[HeldRecord], digest: bytes, freshest: dict[str, tuple[Record, float]]
    ) -> None:
        """Add one store's records. Raises ProtocolViolation at the first that an honest store would not hold."""
        for number, (signed, remaining_s) in enumerate((item.signed, item.remaining_s) for item in held):
            if number % CHECKS_PER_TURN == CHECKS_PER_TURN - 1:
                await trio.lowlevel.checkpoint()
            record = self._open(signed)
            if record.digest != digest:
                raise WrongSchema(f"a record of {record.body.key!r} was served under another key")
            try:
                check_age(record, self._router.clock.now())
            except (ExpiredRecord, FutureRecord):
                continue  # clocks differ: no proof of malice
            best, best_s = freshest.get(record.signer, (None, 0.0))
            remaining_s = min(max(remaining_s, 0.0), record.ttl_s)
            if best is None or record.body.issued_us > best.body.issued_us:
                freshest[record.signer] = (record, remaining_s)
            elif record.body.issued_us == best.body.issued_us:
                freshest[record.signer] = (best, max(best_s, remaining_s))

    def _open(self, signed: Signed) -> Record:
        record = self._opened.get(signed)
        if record is None:
            record = self._opened[signed] = open_record(signed, self._router.namespace, self._schemas)
            if len(self._opened) > OPENED_MAX:
                self._opened.popitem(last=False)
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
        self._newest_us.move_to_end(name)
        if len(self._newest_us) > NEWEST_MAX:
            self._newest_us.popitem(last=False)
        return True

    async def _fetch_from(self, stores: list[str], digest: bytes) -> list[tuple[str, Buffer]]:
        """Return the answers of `readers` stores, the nearest that answer in time. Silent ones are replaced."""
        router, tuning = self._router, self._router.tuning
        wanted = min(router.readers, len(stores))
        request = FetchRequest(router.namespace, router.addresses(), digest)
        waiting = list(stores)
        in_flight: dict[str, float] = {}  # store -> asked at
        replies: list[tuple[str, Buffer]] = []
        progress = trio.Event()

        async def fetch(store: str) -> None:
            try:
                reply = await router.ask(store, FETCH, request, router.reply_timeout_s(store))
            except PeerFault:
                pass  # the router has updated the view
            else:
                replies.append((store, reply.payload))
            del in_flight[store]
            progress.set()

        extra = 0
        with trio.move_on_after(tuning.reply_timeout_s):
            async with trio.open_nursery() as nursery:
                while len(replies) < wanted and (waiting or in_flight):
                    while waiting and len(in_flight) < wanted - len(replies) + extra:
                        store = waiting.pop(0)
                        in_flight[store] = trio.current_time()
                        nursery.start_soon(fetch, store)
                    with trio.move_on_after(tuning.hedge_s) as silence:
                        await progress.wait()
                    progress = trio.Event()
                    extra += 1 if silence.cancelled_caught else 0
                nursery.cancel_scope.cancel()
        for store, asked_at in in_flight.items():
            if trio.current_time() - asked_at >= tuning.hedge_s:
                router.suspect(store)  # so that the next read does not wait for it again
        return replies
