"""Hostile peers: bad records sent to a store, served to a reader, and invented peers in lookups."""

import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace

import msgspec
import pytest
import trio

from dht.node import Schema, StorageLimits
from dht.protocol import (
    FETCH,
    FIND,
    STORE,
    Contact,
    FetchReply,
    FetchRequest,
    FindReply,
    FindRequest,
    HeldRecord,
    StoreReply,
    StoreRequest,
)
from dht.records import KIND, Body
from peer.errors import ConnectionLost, RemoteError
from peer.identity import Identity, Signed, sign_body
from peer.net.host import Host
from peer.net.rpc import Call
from tests.dht.support.local_swarm import CARDS, HASTY, RUN, Card, Member, bare_host, local_swarm

HONEST = Identity.generate()
MINE: Schema[Card] = Schema("mine", Card, ttl_max_s=30.0, size_max=500, signer=lambda key, peer: key == peer)
VALUE = msgspec.msgpack.encode(Card(1))


def body(**changes: object) -> Body:
    now_us = int(time.time() * 1e6)
    return msgspec.structs.replace(Body(RUN, "card", "key", VALUE, now_us, 9000), **changes)


async def deliver(attacker: Host, victim: Member, signed: Signed, namespace: str = RUN) -> StoreReply:
    await attacker.connect_address(victim.address, timeout_s=30)
    request = StoreRequest(namespace, attacker.addresses, signed)
    return (await attacker.rpc.call(victim.id, STORE, request, timeout_s=30)).body


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"issued_us": int((time.time() - 120) * 1e6)}, "ExpiredRecord"),
        ({"issued_us": int((time.time() + 86_400) * 1e6)}, "FutureRecord"),  # written when tests are collected
        ({"value": msgspec.msgpack.encode(Card(1, "x" * 600))}, "OversizeRecord"),
        ({"value": b"x" * 10_000}, "OversizeRecord"),
        ({"value": msgspec.msgpack.encode(["not", "a", "card"])}, "WrongSchema"),
        ({"schema": "unknown"}, "UnknownSchema"),
        ({"ttl_ms": 3_600_000}, "WrongSchema"),
        ({"namespace": "another run"}, "WrongSchema"),
        ({"schema": "mine", "key": HONEST.peer_id}, "WrongSigner"),
    ],
)
async def test_a_store_refuses_a_false_claim_by_its_name(changes: dict[str, object], code: str) -> None:
    async with local_swarm() as swarm, bare_host() as attacker:
        victim = await swarm.add(schemas=[CARDS, MINE])
        with pytest.raises(RemoteError) as refused:
            await deliver(attacker, victim, sign_body(attacker.identity, KIND, body(**changes)))
        assert refused.value.code == code
        penalties = victim.facts.all("peer_penalized", peer=attacker.peer_id)
        blameless = ("ExpiredRecord", "FutureRecord", "UnknownSchema")  # clocks differ, and versions
        assert bool(penalties) == (code not in blameless)
        assert victim.node.stored == (0, 0)
        assert not victim.facts.all("bug")


async def test_a_store_refuses_forged_foreign_and_replayed_records() -> None:
    async with local_swarm() as swarm, bare_host() as attacker:
        victim = await swarm.add()
        first, second = body(), body(value=msgspec.msgpack.encode(Card(2)), issued_us=body().issued_us + 1)
        old, new = (sign_body(attacker.identity, KIND, item) for item in (first, second))
        forged = msgspec.structs.replace(old, signature=bytes(64))
        foreign = sign_body(HONEST, KIND, first)
        for signed, code in [(forged, "ForgedRecord"), (foreign, "WrongSigner")]:
            with pytest.raises(RemoteError) as refused:
                await deliver(attacker, victim, signed)
            assert refused.value.code == code
        with pytest.raises(RemoteError) as refused:
            await deliver(attacker, victim, old, namespace="another run")
        assert refused.value.code == "WrongNamespace"
        assert (await deliver(attacker, victim, new)).kept
        replay = await deliver(attacker, victim, old)
        assert not replay.kept
        assert replay.newest_us == second.issued_us
        assert (await victim.node.get(CARDS, "key"))[attacker.peer_id].value == Card(2)


async def test_malformed_requests_are_refused_and_do_no_harm() -> None:
    async with local_swarm() as swarm, bare_host() as attacker:
        victim = await swarm.add()
        await attacker.connect_address(victim.address, timeout_s=30)
        for request in (
            FindRequest(RUN, attacker.addresses, b"short"),
            FindRequest(RUN, ("x" * 10_000,), bytes(32)),
            FindRequest(RUN, ("/ip4/127.0.0.1/tcp/1",) * 1000, bytes(32)),
        ):
            with pytest.raises(ConnectionLost):
                await attacker.rpc.call(victim.id, FIND, request, timeout_s=60)
        nonsense = FindRequest(RUN, ("nonsense", "/ip4/0.0.0.0/tcp/0", ""), bytes(32))
        reply = await attacker.rpc.call(victim.id, FIND, nonsense, timeout_s=30)
        assert reply.body.nodes == ()
        assert len(victim.facts.all("peer_penalized", peer=attacker.peer_id)) == 1, "a line now, and one in 10 s"
        assert not victim.facts.all("bug")


async def test_a_flood_stays_bounded_and_honest_records_live_on() -> None:
    limits = StorageLimits(records=200, records_per_signer=32, records_per_key=64)
    async with local_swarm() as swarm, bare_host() as attacker:
        victim = await swarm.add(limits=limits)
        honest = await swarm.add()
        assert await honest.node.put(CARDS, "key", Card(1), ttl_s=30) == 2
        codes = []
        for number in range(120):
            signed = sign_body(attacker.identity, KIND, body(key=f"key-{number}", ttl_ms=30_000))
            try:
                await deliver(attacker, victim, signed)
            except RemoteError as error:
                codes.append(error.code)
        assert codes == ["StoreFull"] * (120 - 32)
        assert victim.node.stored[0] == 33
        assert await honest.node.put(CARDS, "key", Card(2), ttl_s=30) == 2
        assert (await victim.node.get(CARDS, "key"))[honest.id].value == Card(2)


@asynccontextmanager
async def evil_store(
    served: Sequence[HeldRecord] | bytes, named: Sequence[Contact] = (), newest_us: Callable[[], int] | None = None
) -> AsyncIterator[Host]:
    """A host that answers every fetch and find with the same things. It keeps every record, or, with `newest_us`,
    claims to hold a newer one."""
    payload = served if isinstance(served, bytes) else msgspec.msgpack.encode(list(served))

    async def find(call: Call[FindRequest]) -> FindReply:
        return FindReply(tuple(named), True, time.time())

    async def store(call: Call[StoreRequest]) -> StoreReply:
        return StoreReply(kept=newest_us is None, newest_us=newest_us() if newest_us else 0, clock_s=time.time())

    async def fetch(call: Call[FetchRequest]) -> tuple[FetchReply, bytes]:
        return FetchReply(time.time()), payload

    async with bare_host() as host:
        host.rpc.register(FIND, find)
        host.rpc.register(STORE, store)
        host.rpc.register(FETCH, fetch)
        yield host


async def join_by(host: Host, member: Member) -> None:
    """Enter a node's routing table."""
    await host.connect_address(member.address, timeout_s=30)
    await host.rpc.call(member.id, FIND, FindRequest(RUN, host.addresses, bytes(32)), timeout_s=30)
    assert host.peer_id in member.node.peers


def held(signed: Signed) -> list[HeldRecord]:
    return [HeldRecord(signed, 9.0)]


LIES: dict[str, list[HeldRecord] | bytes] = {
    "forged": held(msgspec.structs.replace(sign_body(HONEST, KIND, body()), signature=bytes(64))),
    "wrong key": held(sign_body(HONEST, KIND, body(key="another key"))),
    "wrong schema": held(sign_body(HONEST, KIND, body(value=b"\xc0"))),
    "later schema": held(sign_body(HONEST, KIND, body(schema="later"))),
    "wrong signer": held(sign_body(HONEST, KIND, body(schema="mine", key="not his"))),
    "oversize": held(sign_body(HONEST, KIND, body(value=b"x" * 60_000))),
    "garbage": b"\xff\xfe\xfd",
}


@pytest.mark.parametrize("lie", LIES)
async def test_a_reader_bans_a_store_with_bad_records(lie: str) -> None:
    async with local_swarm() as swarm, evil_store(LIES[lie]) as evil:
        reader, honest = await swarm.grow(2)
        await honest.node.put(CARDS, "key", Card(1), ttl_s=30)
        await join_by(evil, reader)
        entries = await reader.node.get(CARDS, "key")
        assert entries.keys() == {honest.id}
        assert reader.facts.all("dht_peer_banned", peer=evil.peer_id)
        assert evil.peer_id not in reader.node.peers
        await evil.rpc.call(reader.id, FIND, FindRequest(RUN, evil.addresses, bytes(32)), timeout_s=30)
        assert evil.peer_id not in reader.node.peers


@pytest.mark.parametrize("ahead_s", [7.9, 19.0, 3600.0, None])
async def test_a_store_cannot_make_a_writer_issue_records_that_others_refuse(ahead_s: float | None) -> None:
    """A store claims a newer record: from so many seconds ahead, or (None) of a time that msgpack cannot write."""

    def newest_us() -> int:
        return (1 << 64) - 1 if ahead_s is None else int((time.time() + ahead_s) * 1e6)

    async with local_swarm() as swarm, evil_store([], newest_us=newest_us) as evil:
        writer, honest = await swarm.grow(2)
        await join_by(evil, writer)
        for number in range(4):
            assert await writer.node.put(CARDS, "key", Card(number), ttl_s=30) == 2
            assert (await honest.node.get(CARDS, "key"))[writer.id].value == Card(number)
        assert not writer.facts.all("dht_put_refused")


@pytest.mark.parametrize("clock_s", [-1.0, 1e12, float("nan"), float("inf")])
def test_replies_bound_their_clock(clock_s: float) -> None:
    for reply in (FindReply((), True, clock_s), StoreReply(True, 0, clock_s), FetchReply(clock_s)):
        encoded = msgspec.msgpack.encode(reply)
        with pytest.raises(msgspec.ValidationError):
            msgspec.msgpack.decode(encoded, type=type(reply))


async def test_a_store_cannot_bring_back_a_replaced_record() -> None:
    old = sign_body(HONEST, KIND, body(ttl_ms=30_000))
    newer = {"issued_us": body().issued_us + 1, "value": msgspec.msgpack.encode(Card(2))}
    new = sign_body(HONEST, KIND, body(ttl_ms=30_000, **newer))
    async with local_swarm() as swarm:
        reader = await swarm.add()
        async with evil_store(held(new)) as fresh:
            await join_by(fresh, reader)
            assert (await reader.node.get(CARDS, "key"))[HONEST.peer_id].value == Card(2)
        async with evil_store(held(old)) as stale:
            await join_by(stale, reader)
            assert await reader.node.get(CARDS, "key") == {}


async def test_a_store_cannot_prolong_a_record() -> None:
    expired = sign_body(HONEST, KIND, body(issued_us=int((time.time() - 60) * 1e6)))
    async with local_swarm() as swarm, evil_store(held(expired)) as evil:
        reader = await swarm.add()
        await join_by(evil, reader)
        assert await reader.node.get(CARDS, "key") == {}
    boasting = [HeldRecord(sign_body(HONEST, KIND, body()), 1e9)]
    async with local_swarm() as swarm, evil_store(boasting) as evil:
        reader = await swarm.add()
        await join_by(evil, reader)
        entry = (await reader.node.get(CARDS, "key"))[HONEST.peer_id]
        assert entry.expires_at <= time.time() + 9.0


async def test_invented_peers_cost_little_time_and_enter_no_table() -> None:
    """The invented peers have the address of a socket that accepts and stays silent."""
    async with local_swarm() as swarm:
        listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
        port = listeners[0].socket.getsockname()[1]
        invented = [Contact(Identity.generate().peer_id, (f"/ip4/127.0.0.1/tcp/{port}",)) for _ in range(16)]
        async with evil_store([], named=invented) as evil:
            # A probe finds the honest one alive, even if this process stands still.
            reader, honest = await swarm.grow(2, replace(HASTY, probe_timeout_s=40.0))
            with trio.fail_after(300):
                while await honest.node.put(CARDS, "key", Card(1), ttl_s=600) < 2:
                    pass
            await join_by(evil, reader)
            with trio.fail_after(300):  # less than waiting for the 16 one after another, three times
                for key in ("key", "cold key", "colder key"):
                    entries = await reader.node.get(CARDS, key)
                    assert entries.keys() == ({honest.id} if key == "key" else set())
            assert reader.node.peers <= {honest.id, evil.peer_id}
            with trio.fail_after(300):
                while reader.node.peers != {honest.id, evil.peer_id}:
                    await trio.sleep(0.02)
        await listeners[0].aclose()
