"""Joining, staying connected, rejoining."""

import socket
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
import trio

from dht.node import NodeConfig, open_node
from peer.errors import DialError
from peer.identity import Identity
from tests.dht.support.local_swarm import BRISK, CARDS, RUN, Card, Facts, bare_host, local_swarm
from tests.support.ports import free_port, refusing_port

ABSENT = Identity.generate().peer_id


def address(port: int, peer: str = ABSENT) -> str:
    return f"/ip4/127.0.0.1/tcp/{port}/p2p/{peer}"


async def test_failures_are_told_apart_by_address_in_one_event_and_in_the_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with local_swarm() as swarm, bare_host() as host:
        other = await swarm.add()
        facts = Facts(host.events)
        with refusing_port() as refusing, socket.socket() as mute, host.events.subscribed(facts.note):
            mute.bind(("127.0.0.1", 0))
            mute.listen(8)
            addresses = {
                "refused": address(refusing),
                "timeout": address(mute.getsockname()[1]),
                "wrong_peer": address(int(other.address.split("/")[4])),
            }
            connect = host.connect_address

            async def tired_of_the_mute_one(where: str, *, timeout_s: float) -> str:
                return await connect(where, timeout_s=1.0 if where == addresses["timeout"] else timeout_s)

            monkeypatch.setattr(host, "connect_address", tired_of_the_mute_one)
            with pytest.raises(DialError) as raised:
                async with open_node(
                    host, NodeConfig(RUN, list(addresses.values()), required=True, tuning=BRISK), [CARDS]
                ):
                    pass
        assert raised.value.reason == "wrong_peer"
        (event,) = facts.all("dht_bootstrap_failed")
        told = event.fields["failed"]
        assert isinstance(told, list)
        assert len(told) == 3
        for reason, where in addresses.items():
            assert f"{where}: {reason}" in str(raised.value)
            assert any(line.startswith(f"{where}: {reason}") for line in told)


async def test_a_node_starts_alone_and_joins_when_its_bootstrap_is_up() -> None:
    port, identity = free_port(), Identity.generate()
    async with local_swarm() as swarm:
        early = await swarm.add([address(port, identity.peer_id)])
        assert early.facts.all("dht_bootstrap_failed")
        assert await early.node.put(CARDS, "key", Card(1), ttl_s=9) == 1
        late = await swarm.add([], identity=identity, listen=f"/ip4/127.0.0.1/tcp/{port}")
        await early.facts.wait("dht_peer_found", peer=late.id)
        await early.facts.wait("dht_bootstrap_reached")
        assert await early.node.put(CARDS, "key", Card(2), ttl_s=9) == 2


async def test_one_good_bootstrap_of_several_is_enough() -> None:
    async with local_swarm() as swarm:
        good = await swarm.add()
        with socket.socket() as mute:
            mute.bind(("127.0.0.1", 0))
            mute.listen(8)
            joiner = await swarm.add([address(mute.getsockname()[1]), good.address])
        assert good.id in joiner.node.peers
        assert not joiner.facts.all("dht_bootstrap_failed")  # it did not wait for the mute one


async def test_rejoins_from_the_cache_when_every_bootstrap_is_gone(tmp_path: Path) -> None:
    cache, identity = tmp_path / "peers.json", Identity.generate()
    async with local_swarm() as swarm:
        bootstrap = await swarm.add()
        stays = await swarm.add()
        first_life = await swarm.add(identity=identity, cache=cache)
        gone = bootstrap.address
        await first_life.stop()
        await bootstrap.stop()
        second_life = await swarm.add([gone], identity=identity, cache=cache, required=True)
        assert stays.id in second_life.node.peers
        assert await second_life.node.put(CARDS, "key", Card(1), ttl_s=9) == 2


async def test_a_cache_of_dead_peers_is_an_error_only_if_required(tmp_path: Path) -> None:
    cache = tmp_path / "peers.json"
    async with local_swarm() as swarm:
        await swarm.add()
        joiner = await swarm.add(cache=cache)
        await joiner.stop()
        await swarm.members[0].stop()
        alone = await swarm.add([], cache=cache)
        assert alone.node.peers == frozenset()
        async with bare_host() as host:
            with pytest.raises(DialError, match="fresh invite"):
                async with open_node(host, NodeConfig(RUN, [], cache, required=True, tuning=BRISK), [CARDS]):
                    pass


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe", b'{"addresses": {"nobody": ["nowhere"]}}'])
async def test_a_damaged_cache_adds_nothing_and_is_replaced(tmp_path: Path, content: bytes) -> None:
    cache = tmp_path / "peers.json"
    cache.write_bytes(content)
    async with local_swarm() as swarm:
        other = await swarm.add()
        joiner = await swarm.add(cache=cache)
        await joiner.stop()
        assert other.id in cache.read_text()


async def test_an_unwritable_cache_is_an_event(tmp_path: Path) -> None:
    blocked = tmp_path / "a file"
    blocked.write_text("not a folder")
    async with local_swarm() as swarm:
        await swarm.add()
        joiner = await swarm.add(cache=blocked / "peers.json")
        await joiner.facts.wait("dht_cache_unwritable")
        assert await joiner.node.put(CARDS, "key", Card(1), ttl_s=9) == 2


async def test_two_networks_that_never_met_become_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """hivemind #624: four peers, two networks, each with its own bootstrap; then one peer learns of both."""
    port, identity = free_port(), Identity.generate()
    async with local_swarm() as swarm:
        left = [await swarm.add([])]
        left.append(await swarm.add([left[0].address]))
        between = await swarm.add([left[0].address, address(port, identity.peer_id)])
        connect, turned_away, complete, met = between.host.connect_address, trio.Event(), trio.Event(), trio.Event()

        async def connect_when_complete(where: str, *, timeout_s: float) -> str:
            if identity.peer_id in where and not complete.is_set():
                turned_away.set()
                raise DialError("one peer is no network yet.", "refused")
            return await connect(where, timeout_s=timeout_s)

        monkeypatch.setattr(between.host, "connect_address", connect_when_complete)
        with trio.fail_after(300):
            await turned_away.wait()  # so that no earlier attempt is under way
        right = [await swarm.add([], identity=identity, listen=f"/ip4/127.0.0.1/tcp/{port}")]
        right.append(await swarm.add([right[0].address]))
        await right[0].facts.wait("dht_peer_found", peer=right[1].id)

        for member in (*left, *right):  # their own lookups might join the two networks first

            async def refresh(really: Callable[[], Awaitable[None]] = member.node._router.refresh) -> None:
                await met.wait()
                await really()

            monkeypatch.setattr(member.node._router, "refresh", refresh)
        complete.set()
        await between.facts.wait("dht_split_suspected", why="disjoint views")
        await between.facts.wait("dht_split_healed")
        met.set()
        for member in [*left, *right, between]:
            others = {other.id for other in swarm.members} - {member.id}
            for other in others - member.node.peers:
                await member.facts.wait("dht_peer_found", peer=other)
        for member in [*left, *right, between]:
            assert await member.node.put(CARDS, "key", Card(1), ttl_s=600) == 5
        for member in [*left, *right, between]:
            assert len(await member.node.get(CARDS, "key")) == 5
