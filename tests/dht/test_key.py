from hypothesis import given
from hypothesis import strategies as st

from dht.key import as_bytes, as_int, bucket_index, distance, nearest, node_key, record_key

points = st.integers(min_value=0, max_value=2**256 - 1)
names = st.text(max_size=20)


@given(points, points, points)
def test_distance_is_a_metric_with_one_point_at_each_distance(a: int, b: int, c: int) -> None:
    assert (distance(a, b) == 0) == (a == b)
    assert distance(a, b) == distance(b, a)
    assert distance(a, c) <= distance(a, b) + distance(b, c)
    assert distance(a, distance(a, b)) == b  # unidirectional: from a, exactly b lies at that distance


@given(points, points)
def test_bucket_covers_distances_of_one_power_of_two(a: int, b: int) -> None:
    index = bucket_index(a, b)
    if a == b:
        assert index == 0
    else:
        assert 2 ** (index - 1) <= distance(a, b) < 2**index


@given(points)
def test_points_survive_the_wire(point: int) -> None:
    assert len(as_bytes(point)) == 32
    assert as_int(as_bytes(point)) == point


@given(st.tuples(names, names, names), st.tuples(names, names, names))
def test_record_keys_are_equal_only_for_the_same_triple(a: tuple[str, str, str], b: tuple[str, str, str]) -> None:
    assert (record_key(*a) == record_key(*b)) == (a == b)


def test_record_keys_do_not_run_together() -> None:
    assert record_key("run", "ab", "c") != record_key("run", "a", "bc")


@given(points, st.sets(st.text(min_size=1, max_size=8), max_size=40), st.integers(0, 50))
def test_nearest_are_the_nearest(target: int, peers: set[str], count: int) -> None:
    chosen = nearest(target, peers, count)
    assert len(chosen) == min(count, len(peers))
    worst = max((distance(node_key(peer), target) for peer in chosen), default=0)
    assert all(distance(node_key(peer), target) >= worst for peer in peers - set(chosen))
