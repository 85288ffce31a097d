"""The lookup against simulated networks: no sockets, no clock."""

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from dht.key import nearest, node_key
from dht.lookup import QUERIES_MAX, Lookup
from dht.routing_table import RoutingTable

WIDTH = 8


class Network:
    """Nodes that have joined one after another, each by a lookup of itself, as real ones do."""

    def __init__(self, size: int, seed: int) -> None:
        self.random = random.Random(seed)
        self.peers = [f"node-{seed}-{number}" for number in range(size)]
        self.tables = {peer: RoutingTable(peer) for peer in self.peers}
        self.dead: set[str] = set()
        for number, peer in enumerate(self.peers[1:], start=1):
            self.tables[peer].heard(self.peers[self.random.randrange(number)], 0.0)
            self.lookup(peer, node_key(peer))

    def lookup(self, asker: str, target: int) -> tuple[list[str], int]:
        lookup = Lookup(target, WIDTH, 3, self.tables[asker].nearest(target, 16), exclude=[asker])
        queries, in_flight = 0, []
        while not lookup.finished:
            in_flight += lookup.take()
            assert 0 < len(in_flight) <= 3
            peer = in_flight.pop(self.random.randrange(len(in_flight)))  # answers come in any order
            queries += 1
            if peer in self.dead:
                lookup.failed(peer)
                self.tables[asker].remove(peer)
                continue
            answer = [near for near in self.tables[peer].nearest(target, 17) if near != asker][:16]
            self.tables[peer].heard(asker, 0.0)
            self.tables[asker].heard(peer, 0.0)
            lookup.answered(peer, answer)
        return lookup.result(), queries


@settings(max_examples=5, deadline=None)
@given(st.integers(0, 1000))
def test_finds_exactly_the_nearest_in_a_healthy_network(seed: int) -> None:
    network = Network(120, seed)
    target = node_key(f"target-{seed}")
    asker = network.random.choice(network.peers)
    found, queries = network.lookup(asker, target)
    assert found == nearest(target, set(network.peers) - {asker}, WIDTH)
    assert queries <= 30


@settings(max_examples=5, deadline=None)
@given(st.integers(0, 1000))
def test_finds_the_nearest_alive_with_a_third_dead(seed: int) -> None:
    network = Network(120, seed)
    network.dead = set(network.random.sample(network.peers, 40))
    target = node_key(f"target-{seed}")
    alive = set(network.peers) - network.dead
    asker = network.random.choice(sorted(alive))
    found, _ = network.lookup(asker, target)
    best = nearest(target, alive - {asker}, WIDTH)
    assert len(found) == WIDTH
    assert len(set(found) & set(best)) >= WIDTH - 1
    assert not set(found) & network.dead


def test_a_lookup_without_peers_is_finished() -> None:
    lookup = Lookup(0, WIDTH, 3, [])
    assert lookup.finished
    assert lookup.take() == []
    assert lookup.result() == []


def test_hostile_answers_cannot_make_a_lookup_endless() -> None:
    target = 0
    invented = sorted((f"invented-{number}" for number in range(5000)), key=node_key)  # nearest to 0 first
    lookup = Lookup(target, WIDTH, 3, ["liar"])
    asked = 0
    while not lookup.finished:
        for peer in lookup.take():
            asked += 1
            lookup.answered(peer, [invented.pop() for _ in range(16)])  # ever nearer ones
    assert asked == QUERIES_MAX


def test_a_failed_peer_is_not_asked_again() -> None:
    lookup = Lookup(0, WIDTH, 3, ["a", "b"])
    assert set(lookup.take()) == {"a", "b"}
    lookup.failed("a")
    lookup.answered("b", ["a"])
    assert lookup.finished
    assert lookup.result() == ["b"]


def test_silence_raises_the_number_of_queries() -> None:
    lookup = Lookup(0, WIDTH, 2, [f"peer-{number}" for number in range(6)])
    first = lookup.take()
    assert len(first) == 2
    assert lookup.take() == []
    assert len(lookup.take(extra=2)) == 2
    assert set(first) <= set(lookup.pending())
