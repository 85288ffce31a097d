"""Pages of a key: encoded once a change, shared by all that ask, none of them above 64 KiB."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest
import trio

from dht.key import record_key
from dht.node import StorageLimits
from dht.origin import TRUSTED
from dht.pages import KEPT_BYTES_MAX, RecordPages, decode_page
from dht.protocol import PAGE_BYTES, PAGES_MAX
from dht.records import open_record, sign_record
from dht.storage import Storage
from peer.errors import ProtocolViolation
from peer.identity import Identity
from tests.dht.support.local_swarm import CARDS, RUN, Card, local_swarm
from tests.dht.test_storage import record
from tests.peer.support.honest import TIMED
from tests.peer.support.scene import scene

KEY = record_key("run", "s", "key")
CLOCK_S = 1e9
SIGNERS = [f"{number:052}" for number in range(1024)]


def store_of(records: int, size: int = 2500) -> tuple[Storage, RecordPages]:
    storage = Storage()
    for signer in SIGNERS[:records]:
        storage.put(record(signer, "key", 1, size=size), 0.0, TRUSTED)
    return storage, RecordPages(storage)


def read_all(pages: RecordPages, now: float = 0.0) -> tuple[list[str], int]:
    """Return the signers in all pages of a key, and the number of pages."""
    first, payload = pages.page(KEY, 0, 0, now, CLOCK_S)
    payloads = [payload]
    for number in range(1, first.pages):
        reply, payload = pages.page(KEY, number, first.edition, now, CLOCK_S)
        assert (reply.pages, reply.edition) == (first.pages, first.edition)
        payloads.append(payload)
    assert all(len(payload) <= PAGE_BYTES for payload in payloads)
    return [held.signed.signer for payload in payloads for held in decode_page(payload)], len(payloads)


@pytest.mark.parametrize("size", [150, 2500, 60_000])
def test_all_records_are_in_pages_of_64_kib(size: int) -> None:
    records = 1024 if size < 60_000 else PAGES_MAX
    _, pages = store_of(records, size)
    signers, count = read_all(pages)
    assert signers == SIGNERS[:records]
    assert count <= records * (size + 64) // (PAGE_BYTES - 2 * size) + 1 if size < 60_000 else count == PAGES_MAX


def test_a_page_is_encoded_once_a_change() -> None:
    storage, pages = store_of(100)
    reply, page = pages.page(KEY, 0, 0, 1.0, CLOCK_S)
    again, same = pages.page(KEY, 0, 0, 3.0, CLOCK_S)
    assert same is page, "one copy for all calls"
    assert (reply.age_s, again.age_s) == (0.0, 2.0)
    assert decode_page(page)[0].remaining_s == 8.0
    storage.put(record(SIGNERS[0], "key", 2), 4.0, TRUSTED)
    changed, other = pages.page(KEY, 0, 0, 4.0, CLOCK_S)
    assert changed.edition != reply.edition and other != page
    _, second = pages.page(KEY, 1, reply.edition, 4.0, CLOCK_S)
    held = {item.signed.signer for payload in (page, second) for item in decode_page(payload)}
    assert len(held) > len(decode_page(page)), "a reading goes on with the edition that it began with"


def test_pages_of_a_forgotten_edition_are_those_of_the_latest() -> None:
    storage, pages = store_of(1024)
    first, _ = pages.page(KEY, 0, 0, 0.0, CLOCK_S)
    for issued in range(2, 5):
        storage.put(record(SIGNERS[0], "key", issued), 0.0, TRUSTED)
        latest, _ = pages.page(KEY, 0, 0, 0.0, CLOCK_S)
        assert pages.size_bytes <= KEPT_BYTES_MAX
    reply, page = pages.page(KEY, 1, first.edition, 0.0, CLOCK_S)
    assert reply.edition == latest.edition and decode_page(page)
    reply, page = pages.page(KEY, PAGES_MAX - 1, latest.edition, 0.0, CLOCK_S)
    assert decode_page(page) == []


def test_keys_without_records_are_not_kept() -> None:
    storage, pages = store_of(1)
    for number in range(1000):
        reply, page = pages.page(number.to_bytes(32, "big"), 0, 0, 0.0, CLOCK_S)
        assert (reply.pages, reply.edition, decode_page(page)) == (1, 0, [])
    assert pages.size_bytes == 0
    storage.drop_signer(SIGNERS[0])
    assert storage.edition(KEY) == 0


def test_a_page_that_is_none_is_a_violation() -> None:
    with pytest.raises(ProtocolViolation):
        decode_page(b"\xff")


async def test_a_reader_gets_all_pages() -> None:
    """Of peers that no caps hold: records of a closed run."""
    cards: Any = replace(CARDS, scarce=True)
    async with local_swarm() as swarm:
        for _ in range(2):
            await swarm.add(schemas=[cards], limits=StorageLimits(bytes_per_key=1 << 20))
        reader, store = swarm.members
        await reader.facts.wait("dht_peer_found", peer=store.id)
        issued_us = int(time.time() * 1e6)
        for number in range(300):
            card = Card(number, "x" * 400)
            signed = sign_record(Identity.generate(), RUN, cards, "key", card, ttl_s=600.0, issued_us=issued_us)
            store.node._storage.put(open_record(signed, RUN, {CARDS.name: cards}), trio.current_time())
        entries = await reader.node.get(cards, "key")
        assert sorted(entry.value.number for entry in entries.values()) == list(range(300))


@pytest.mark.process
@TIMED
async def test_pages_that_are_never_read_cost_one_copy(timed: bool) -> None:
    """Seven identities fetch a full key 150 times each, and read nothing."""
    child = "tests.dht.support.full_key_child"
    async with scene(module=child) as honest:
        before, quiet = await honest.figures(), await honest.caller.latency()
        async with honest.under("pages", 7, 150, module=child):
            if timed:
                await honest.caller.check_beside(quiet)
            await honest.figures()
        assert honest.most - before.resident <= 32 << 20
