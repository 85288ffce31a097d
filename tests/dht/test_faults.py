"""Nodes in child processes, killed and frozen."""

from dataclasses import replace

import pytest
import trio

from tests.dht.support.local_swarm import CARDS, HASTY, Child, local_swarm, start_child

pytestmark = pytest.mark.process

CHILDREN = 5
TTL_S = 8.0  # a child may stand still for five seconds
ALIVE_TTL_S = 30.0  # the one that must stay visible: for twenty
# A read returns what it has at its timeout, and this process may have stood still meanwhile.
PATIENT = replace(HASTY, reply_timeout_s=4.0, lookup_budget_s=8.0, probe_timeout_s=5.0)


async def test_killed_and_frozen_nodes_are_dropped_and_thawed_ones_return() -> None:
    async with local_swarm() as swarm, trio.open_nursery() as nursery:
        here = await swarm.grow(3, PATIENT)
        children: dict[int, Child] = {}

        async def start(number: int) -> None:
            ttl_s = ALIVE_TTL_S if number == CHILDREN - 1 else TTL_S
            children[number] = await start_child(nursery, [here[0].address], "key", number, ttl_s)

        async with trio.open_nursery() as starting:
            for number in range(CHILDREN):
                starting.start_soon(start, number)

        reader = here[1]
        for child in children.values():
            await reader.facts.wait("dht_peer_found", peer=child.peer)
        everyone = {child.peer for child in children.values()}
        with trio.fail_after(300):
            while (await reader.node.get(CARDS, "key")).keys() != everyone:
                pass

        in_order = [children[number] for number in range(CHILDREN)]
        killed, frozen, alive = in_order[:2], in_order[2:4], in_order[4:]
        for child in killed:
            child.kill()
        for child in frozen:
            child.freeze()
        seen: set[str] = everyone
        with trio.fail_after(300):
            while seen != {child.peer for child in alive}:
                seen = set(await reader.node.get(CARDS, "key"))
                assert {child.peer for child in alive} <= seen  # live nodes are always visible
        for member in here:
            for child in (*killed, *frozen):
                if member.facts.all("dht_peer_found", peer=child.peer):  # as the reader has; others may not have met it
                    await member.facts.wait("dht_peer_lost", peer=child.peer)
                with trio.fail_after(300):  # on a busy machine it may have been lost and found before
                    while child.peer in member.node.peers:
                        await member.node.get(CARDS, "key")
        for child in frozen:
            child.thaw()
        with trio.fail_after(300):
            while seen != {child.peer for child in (*frozen, *alive)}:
                seen = set(await reader.node.get(CARDS, "key"))
        nursery.cancel_scope.cancel()


async def test_a_node_cut_off_from_most_peers_suspects_a_split() -> None:
    async with local_swarm() as swarm, trio.open_nursery() as nursery:
        left = await swarm.add(tuning=HASTY)
        children = [await start_child(nursery, [left.address], "key", number, TTL_S) for number in range(2)]
        for child in children:
            await left.facts.wait("dht_peer_found", peer=child.peer)
        with trio.fail_after(300):
            while left.node._router.split.suspected:  # on a busy machine it may have been
                await trio.sleep(0.02)
        left.facts.seen.clear()
        for child in children:
            child.freeze()  # to the one node left this looks like a cut cable
        await left.facts.wait("dht_split_suspected", why="peers lost")
        assert left.node._router.split.suspected
        for child in children:
            child.thaw()
        await left.facts.wait("dht_split_healed")
        with trio.fail_after(300):
            while len(await left.node.get(CARDS, "key")) < 2:
                pass
        nursery.cancel_scope.cancel()
