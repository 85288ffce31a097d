from hypothesis import given
from hypothesis import strategies as st

from dht.key import nearest, node_key
from dht.routing_table import BUCKET_SIZE, SPARES_PER_BUCKET, RoutingTable

OWN = "own"
peers = st.integers(0, 400).map(lambda number: f"peer-{number}")
steps = st.lists(st.tuples(st.sampled_from(["heard", "remove"]), peers), max_size=300)


@given(steps, st.integers(0, 2**256 - 1))
def test_table_is_bounded_and_answers_with_the_nearest_it_holds(script: list[tuple[str, str]], target: int) -> None:
    table = RoutingTable(OWN)
    for now, (action, peer) in enumerate(script):
        if action == "heard":
            is_new = table.heard(peer, float(now))
            assert not is_new or peer in table
        else:
            was_in = peer in table
            assert table.remove(peer) == was_in
            assert peer not in table
    held = set(table)
    assert len(table) == len(held)
    by_bucket: dict[int, int] = {}
    for peer in held:
        index = (node_key(OWN) ^ node_key(peer)).bit_length()
        by_bucket[index] = by_bucket.get(index, 0) + 1
    assert all(count <= BUCKET_SIZE for count in by_bucket.values())
    assert table.occupied() == sorted(by_bucket, reverse=True)
    assert table.nearest(target, 8) == nearest(target, held, 8)


def test_a_node_is_not_in_its_own_table() -> None:
    table = RoutingTable(OWN)
    assert not table.heard(OWN, 0.0)
    assert len(table) == 0


def far_peers(count: int) -> list[str]:
    """Peers of the farthest bucket of OWN."""
    own = node_key(OWN)
    numbers = (f"far-{number}" for number in range(100_000))
    far = (peer for peer in numbers if (own ^ node_key(peer)).bit_length() == 256)
    return [next(far) for _ in range(count)]


def test_new_peers_replace_only_dead_ones() -> None:
    table = RoutingTable(OWN)
    crowd = far_peers(BUCKET_SIZE + SPARES_PER_BUCKET + 5)
    members, newcomers = crowd[:BUCKET_SIZE], crowd[BUCKET_SIZE:]
    for now, peer in enumerate(crowd):
        assert table.heard(peer, float(now)) == (peer in members)
    assert set(table) == set(members)
    assert table.remove(members[3])
    assert set(table) == set(members) - {members[3]} | {newcomers[-1]}  # the freshest spare


def test_silent_peers_come_longest_silent_first() -> None:
    table = RoutingTable(OWN)
    for now, peer in enumerate(["a", "b", "c"]):
        table.heard(peer, float(now))
    table.heard("a", 10.0)
    assert table.silent_since(5.0) == ["b", "c"]
