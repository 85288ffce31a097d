"""The handlers of the calls between nodes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import trio

from dht.key import as_int
from dht.protocol import (
    FETCH,
    FIND,
    LEAVE,
    STORE,
    FetchReply,
    FetchRequest,
    FindReply,
    FindRequest,
    LeaveReply,
    LeaveRequest,
    StoreReply,
    StoreRequest,
    WrongNamespace,
)
from dht.reader import encode_held
from dht.records import Schema, StaleRecord, WrongSigner, check_delivery, open_record
from dht.router import Router
from dht.storage import Storage
from peer.net.rpc import Call


class DhtHandlers:
    """Handlers of the four calls, registered at the host's rpc. Their errors reach the caller by class name."""

    def __init__(self, router: Router, storage: Storage, schemas: Mapping[str, Schema[Any]]) -> None:
        self._router = router
        self._storage = storage
        self._schemas = schemas
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
        now = trio.current_time()
        return FetchReply(self._router.clock.raw()), encode_held(self._storage.get(call.body.digest, now), now)

    async def _leave(self, call: Call[LeaveRequest]) -> LeaveReply:
        self._check_namespace(call.body.namespace)
        self._storage.drop_signer(call.peer)
        self._router.left(call.peer)
        return LeaveReply()

    def _check_namespace(self, namespace: str) -> None:
        if namespace != self._router.namespace:
            raise WrongNamespace(f"this peer belongs to run {self._router.namespace[:16]}: use an invite of that run")
