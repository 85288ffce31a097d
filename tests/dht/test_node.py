"""Healthy nodes over real sockets."""

import time
from dataclasses import replace
from typing import Any

import pytest
import trio

from dht.node import DEFAULT_TUNING, NodeConfig, Schema, open_node
from dht.protocol import (
    FETCH,
    FIND,
    LEAVE,
    STORE,
    FetchReply,
    FetchRequest,
    FindReply,
    FindRequest,
    LeaveRequest,
)
from dht.records import OversizeRecord, WrongSchema, WrongSigner
from peer.errors import DialError
from peer.identity import Identity
from peer.net.method import Call, Empty, Method
from tests.dht.support.local_swarm import BRISK, CARDS, RUN, Card, bare_host, local_swarm


async def test_alone() -> None:
    async with local_swarm() as swarm:
        alone = await swarm.add()
        assert await alone.node.get(CARDS, "key") == {}
        assert await alone.node.put(CARDS, "key", Card(1), ttl_s=9) == 1
        entries = await alone.node.get(CARDS, "key")
        assert entries.keys() == {alone.id}
        assert entries[alone.id].value == Card(1)
        assert await alone.node.get(CARDS, "other key") == {}


async def test_a_record_expires_unless_it_is_put_again() -> None:
    async with local_swarm() as swarm:
        owner, reader = await swarm.grow(2)
        assert await owner.node.put(CARDS, "key", Card(1), ttl_s=0.3) == 2
        assert await owner.node.put(CARDS, "key", Card(2), ttl_s=30) == 2
        assert (await reader.node.get(CARDS, "key"))[owner.id].value == Card(2)
        assert await owner.node.put(CARDS, "key", Card(3), ttl_s=0.3) == 2
        with trio.fail_after(300):
            while await reader.node.get(CARDS, "key"):
                pass


@pytest.mark.parametrize("replicas", [1, 64])
async def test_records_of_all_are_seen_by_all_in_a_swarm_larger_than_k(replicas: int) -> None:
    """In one that counts as large, k nodes and the bootstrap keep a record; in one that counts as small, all do."""
    async with local_swarm() as swarm:
        patient = replace(
            DEFAULT_TUNING, replicas=replicas, reply_timeout_s=15.0, lookup_budget_s=40.0, probe_timeout_s=40.0
        )
        k = DEFAULT_TUNING.stores
        stores = {14} if replicas > 14 else {k, k + 1}
        members = await swarm.grow(14, patient)
        for member in members if replicas > 14 else ():
            for other in {other.id for other in members} - {member.id} - member.node.peers:
                await member.facts.wait("dht_peer_found", peer=other)
        for number, member in enumerate(members):
            assert await member.node.put(CARDS, "key", Card(number), ttl_s=600) in stores
        for member in members:
            entries = await member.node.get(CARDS, "key")
            assert {entry.value.number for entry in entries.values()} == set(range(14))
            assert all(peer == entry.peer for peer, entry in entries.items())
        holding = [member for member in members if member.node.stored[0]]
        assert len(holding) in stores


async def test_stores_that_are_all_silent_are_asked_once_more() -> None:
    """A machine that stands still for a second hides nobody from one that keeps no records itself."""
    async with local_swarm() as swarm:
        owner = await swarm.add()
        assert await owner.node.put(CARDS, "key", Card(1), ttl_s=600) == 1
        reader = await swarm.add(tuning=replace(BRISK, reply_timeout_s=0.5))
        serve, asked, again = owner.node._server._fetch, 0, trio.Event()

        async def fetch(call: Call[FetchRequest]) -> tuple[FetchReply, bytes]:
            nonlocal asked
            asked += 1
            if asked > 1:
                again.set()
            await again.wait()
            return await serve(call)

        owner.host.rpc.server._methods.pop(FETCH.name)
        owner.host.rpc.register(FETCH, fetch)
        assert (await reader.node.get(CARDS, "key")).keys() == {owner.id}


async def test_a_goodbye_removes_a_node_and_its_records_at_once() -> None:
    async with local_swarm() as swarm:
        stays, leaves = await swarm.grow(2)
        await leaves.node.put(CARDS, "key", Card(1), ttl_s=30)
        assert leaves.id in await stays.node.get(CARDS, "key")
        await leaves.stop()
        await stays.facts.wait("dht_peer_left", peer=leaves.id)
        assert await stays.node.get(CARDS, "key") == {}
        assert stays.node.peers == frozenset()
        assert not stays.node._router.split.suspected


async def test_a_node_asks_no_peer_after_its_goodbye(monkeypatch: pytest.MonkeyPatch) -> None:
    async with local_swarm() as swarm:
        stays = await swarm.add()
        leaves = await swarm.add(
            tuning=replace(BRISK, leave_timeout_s=2.0)
        )  # long enough for several of its regular calls
        said: list[str] = []
        call = leaves.host.rpc.call

        async def noted(peer: str, method: Method[Any, Any], *rest: Any, **options: Any) -> Any:
            await trio.lowlevel.checkpoint()  # let cancelled calls end
            said.append(method.name)
            return await call(peer, method, *rest, **options)

        async def mute(call: Call[LeaveRequest]) -> Empty:
            await trio.sleep_forever()
            return Empty()

        monkeypatch.setattr(leaves.host.rpc, "call", noted)
        monkeypatch.delitem(stays.host.rpc.server._methods, LEAVE.name)
        stays.host.rpc.register(LEAVE, mute)
        await leaves.stop()
        assert LEAVE.name in said
        assert set(said[said.index(LEAVE.name) :]) == {LEAVE.name}


async def test_a_record_from_before_the_goodbye_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dht.router.GOODBYE_S", 600.0)
    async with local_swarm() as swarm:
        stays, leaves = await swarm.add(), await swarm.add()
        await stays.facts.wait("dht_peer_found", peer=leaves.id)
        assert await leaves.node.put(CARDS, "key", Card(1), ttl_s=600) == 2
        call = leaves.host.rpc.call

        async def late(peer: str, method: Method[Any, Any], *rest: Any, **options: Any) -> Any:
            if method.name == STORE.name:
                await call(peer, LEAVE, LeaveRequest(RUN), timeout_s=60)
            return await call(peer, method, *rest, **options)

        monkeypatch.setattr(leaves.host.rpc, "call", late)
        assert await leaves.node.put(CARDS, "key", Card(2), ttl_s=600) == 1
        assert not await stays.node.get(CARDS, "key")
        monkeypatch.setattr(leaves.host.rpc, "call", call)
        assert await leaves.node.put(CARDS, "key", Card(3), ttl_s=600) == 2, "it is back"


async def test_a_call_from_before_the_goodbye_does_not_bring_the_node_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dht.router.GOODBYE_S", 600.0)
    async with local_swarm() as swarm, bare_host() as leaves:
        stays = await swarm.add()

        async def find(call: Call[FindRequest]) -> FindReply:
            await leaves.rpc.call(stays.id, LEAVE, LeaveRequest(RUN), timeout_s=60)
            return FindReply((), True, time.time())

        async def ask() -> None:
            await leaves.rpc.call(stays.id, FIND, FindRequest(RUN, leaves.addresses, bytes(32)), timeout_s=60)

        leaves.rpc.register(FIND, find)
        await leaves.connect_address(stays.address, timeout_s=60)
        await ask()
        await stays.facts.wait("dht_peer_found", peer=leaves.peer_id)
        await stays.node._router.ask_nearest(leaves.peer_id, 0, 60)  # answered after its goodbye
        assert stays.node.peers == frozenset()
        await ask()  # as if sent before the goodbye
        assert stays.node.peers == frozenset()
        assert len(stays.facts.all("dht_peer_found")) == 1
        monkeypatch.setattr("dht.router.GOODBYE_S", 0.0)
        await ask()
        assert len(stays.facts.all("dht_peer_found")) == 2


async def test_a_restart_with_a_slower_clock_overtakes_its_old_record() -> None:
    identity = Identity.generate()
    async with local_swarm() as swarm:
        store = await swarm.add()
        before = await swarm.add(identity=identity)
        assert await before.node.put(CARDS, "key", Card(1), ttl_s=30) == 2
        after = await swarm.add(identity=identity, wall=lambda: time.time() - 5.0)
        assert await after.node.put(CARDS, "key", Card(2), ttl_s=30) == 2
        assert (await store.node.get(CARDS, "key"))[identity.peer_id].value == Card(2)


async def test_a_node_with_a_wrong_clock_takes_part_and_is_told() -> None:
    async with local_swarm() as swarm:
        right = await swarm.grow(3)
        wrong = await swarm.add(wall=lambda: time.time() + 3600.0)
        told = await wrong.facts.wait("dht_clock_wrong")
        assert isinstance(told.fields["peers_ahead_s"], float)
        assert told.fields["peers_ahead_s"] == pytest.approx(-3600.0, abs=3.0)
        assert await wrong.node.put(CARDS, "key", Card(1), ttl_s=30) == 4
        assert await right[0].node.put(CARDS, "key", Card(0), ttl_s=30) == 4
        for member in [*right, wrong]:
            entries = await member.node.get(CARDS, "key")
            assert entries.keys() == {wrong.id, right[0].id}


async def test_of_two_clocks_none_is_corrected_and_records_are_refused() -> None:
    async with local_swarm() as swarm:
        await swarm.add()
        slow = await swarm.add(wall=lambda: time.time() - 3600.0)
        assert await slow.node.put(CARDS, "key", Card(1), ttl_s=9) == 1  # itself only
        refused = await slow.facts.wait("dht_put_refused")
        assert refused.fields["why"] == ["ExpiredRecord"]
        assert "clock" in str(refused.fields["remedy"])


async def test_runs_do_not_mix() -> None:
    async with local_swarm() as swarm:
        ours = await swarm.add()
        async with bare_host() as host:
            with pytest.raises(DialError, match="belongs to run"):
                async with open_node(host, NodeConfig("another run", [ours.address], required=True), [CARDS]):
                    pass
        assert ours.node.peers == frozenset()


async def test_a_writer_gets_the_error_that_every_store_would_raise() -> None:
    mine = Schema("mine", Card, ttl_max_s=30.0, size_max=100, signer=lambda key, peer: key == peer)
    async with local_swarm() as swarm:
        member = await swarm.add(schemas=[mine])
        with pytest.raises(WrongSigner):
            await member.node.put(mine, "another peer", Card(1), ttl_s=9)
        with pytest.raises(OversizeRecord):
            await member.node.put(mine, member.id, Card(1, "x" * 200), ttl_s=9)
        with pytest.raises(WrongSchema):
            await member.node.put(mine, member.id, Card(1), ttl_s=31)
        with pytest.raises(ValueError, match="not given to open_node"):
            await member.node.put(CARDS, "key", Card(1), ttl_s=9)
        assert await member.node.put(mine, member.id, Card(1), ttl_s=9) == 1


async def test_expired_records_are_not_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dht.reader.SWEEP_S", 0.0)
    ahead_s = 0.0
    async with local_swarm() as swarm:
        owner = await swarm.add(wall=lambda: time.time() + ahead_s)
        for number in range(20):
            await owner.node.put(CARDS, "key", Card(number), ttl_s=5)
            assert (await owner.node.get(CARDS, "key"))[owner.id].value == Card(number)
            ahead_s += 10
        kept = owner.node._reader._opened
        assert 1 <= len(kept) <= 4, "each refresh of a record stays in memory"
        await owner.node.get(CARDS, "key")
        assert len(kept) >= 1, "a fresh record is checked again at each reading"
