from dht.partition import LOST_MAX, SplitWatch, views_disjoint


def test_losing_most_peers_is_suspicious_until_enough_are_back() -> None:
    watch = SplitWatch()
    for peer in "abc":
        watch.peer_lost(peer, 0.0)
    assert watch.judge(alive=3, now=0.0) is None
    watch.peer_lost("d", 1.0)
    assert watch.judge(alive=2, now=1.0) == "suspected"
    assert watch.suspected
    assert watch.judge(alive=2, now=1.0) is None  # told once
    assert watch.lost == ("d", "c", "b", "a")
    watch.peer_back("a")
    watch.peer_back("b")
    assert watch.judge(alive=4, now=2.0) == "healed"


def test_the_only_other_peer_lost_is_suspicious() -> None:
    watch = SplitWatch()
    watch.peer_lost("a", 0.0)
    assert watch.judge(alive=0, now=0.0) == "suspected"


def test_peers_lost_long_ago_are_forgotten() -> None:
    watch = SplitWatch(window_s=60.0)
    watch.peer_lost("a", 0.0)
    assert watch.judge(alive=0, now=0.0) == "suspected"
    assert watch.judge(alive=0, now=61.0) == "healed"
    assert watch.lost == ()


def test_the_list_of_lost_peers_is_bounded() -> None:
    watch = SplitWatch()
    for number in range(LOST_MAX + 10):
        watch.peer_lost(f"peer-{number}", float(number))
    assert len(watch.lost) == LOST_MAX
    assert watch.lost[0] == f"peer-{LOST_MAX + 9}"


def test_disjoint_views() -> None:
    assert views_disjoint({"a"}, {"b"}, knew_us=False)
    assert not views_disjoint({"a"}, {"a", "b"}, knew_us=False)
    assert not views_disjoint({"a"}, {"b"}, knew_us=True)
    assert not views_disjoint(set(), {"b"}, knew_us=False)
    assert not views_disjoint({"a"}, set(), knew_us=False)
