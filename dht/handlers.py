"""The handlers of the calls between nodes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import trio

from dht.key import as_int
from dht.pages import FRAMING_BYTES_MAX, RecordPages
from dht.protocol import (
    FETCH,
    FIND,
    LEAVE,
    PAGE_BYTES,
    STORE,
    FetchReply,
    FetchRequest,
    FindReply,
    FindRequest,
    LeaveRequest,
    StoreReply,
    StoreRequest,
    WrongNamespace,
)
from dht.records import ENVELOPE_BYTES_MAX, Schema, StaleRecord, WrongSigner, check_delivery, open_record
from dht.router import Router
from dht.storage import Storage
from peer.net.rpc import Call, Empty


class DhtHandlers:
    """Handlers of the four calls, registered at the host's rpc. Their errors reach the caller by class name."""

    def __init__(self, router: Router, storage: Storage, schemas: Mapping[str, Schema[Any]]) -> None:
        for schema in schemas.values():
            if schema.size_max + ENVELOPE_BYTES_MAX + 2 * FRAMING_BYTES_MAX > PAGE_BYTES:
                raise ValueError(f"schema {schema.name!r} allows {schema.size_max} bytes: a record must fit in a page")
        self._router = router
        self._storage = storage
        self._schemas = schemas
        self._pages = RecordPages(storage)
        rpc = router.host.rpc
        rpc.register(FIND, self._find)
        rpc.register(STORE, self._store)
        rpc.register(FETCH, self._fetch)
        rpc.register(LEAVE, self._leave)

    async def _find(self, call: Call[FindRequest]) -> FindReply:
        self._check_namespace(call.body.namespace)
        knew = call.peer in self._router.table
        nodes = self._router.contacts(as_int(call.body.target), call.peer)
        self._router.called(call.peer, call.body.addresses)
        return FindReply(nodes, knew, self._router.clock.raw())

    async def _store(self, call: Call[StoreRequest]) -> StoreReply:
        """Keep a record. Only its signer may deliver it, so no peer fills a store in another's name or replays it."""
        self._check_namespace(call.body.namespace)
        self._router.called(call.peer, call.body.addresses)
        signed = call.body.record
        if signed.signer != call.peer:
            raise WrongSigner(f"{call.peer} delivers a record of {signed.signer}: only its signer may")
        record = open_record(signed, self._router.namespace, self._schemas)
        check_delivery(record, self._router.clock.now())
        clock_s = self._router.clock.raw()
        age_s = self._router.clock.now() - record.body.issued_us / 1e6
        if self._router.left_since(call.peer, trio.current_time() - age_s):  # it was on its way before the goodbye
            return StoreReply(kept=False, newest_us=0, clock_s=clock_s)
        try:
            self._storage.put(record, trio.current_time(), self._router.origin(call.peer))
        except StaleRecord as error:
            return StoreReply(kept=False, newest_us=error.newest_us, clock_s=clock_s)
        return StoreReply(kept=True, newest_us=record.body.issued_us, clock_s=clock_s)

    async def _fetch(self, call: Call[FetchRequest]) -> tuple[FetchReply, bytes]:
        self._check_namespace(call.body.namespace)
        self._router.called(call.peer, call.body.addresses)
        asked = call.body
        return self._pages.page(asked.digest, asked.page, asked.edition, trio.current_time(), self._router.clock.raw())

    async def _leave(self, call: Call[LeaveRequest]) -> Empty:
        self._check_namespace(call.body.namespace)
        self._storage.drop_signer(call.peer)
        self._router.left(call.peer)
        return Empty()

    def _check_namespace(self, namespace: str) -> None:
        if namespace != self._router.namespace:
            raise WrongNamespace(f"this peer belongs to run {self._router.namespace[:16]}: use an invite of that run")
