"""At most so many members of one address prefix take part in one head."""

from __future__ import annotations

from swarm.protocol.prefix_cap import ASKING_MAX, ASKS_AGAIN_S, PrefixCap

CROWD, HOME = "198.51.100.0/24", "203.0.113.0/24"
INSIDE = {"home": HOME, "first": CROWD, "second": CROWD, "third": CROWD}


def test_newcomers_of_a_full_prefix_wait_and_members_stay() -> None:
    cap = PrefixCap(8)
    let_in = [number for number in range(200) if cap.lets_in(f"sybil{number}", CROWD, INSIDE, 0.0)]
    assert let_in == [0, 1, 2, 3, 4], "three of the prefix are members already"
    assert cap.lets_in("honest", HOME, INSIDE, 0.0)
    assert cap.lets_in("sybil2", CROWD, INSIDE, 1.0), "it keeps its place"
    assert cap.newly_full() == {CROWD: 195}

    crowded = {f"member{number}": CROWD for number in range(9)}
    assert PrefixCap(8).lets_in("member3", CROWD, crowded, 0.0), "a member that comes back"
    assert not PrefixCap(8).lets_in("newcomer", CROWD, crowded, 0.0)


def test_a_place_is_free_once_its_holder_asks_no_more_or_is_in_the_head() -> None:
    cap = PrefixCap(1)
    assert cap.lets_in("a", CROWD, {}, 0.0) and not cap.lets_in("b", CROWD, {}, 1.0)
    assert not cap.lets_in("b", CROWD, {"a": CROWD}, 2.0), "as a member it counts once"
    assert cap.lets_in("b", CROWD, {}, 2.0 + ASKS_AGAIN_S)


def test_each_full_prefix_is_told_of_once_until_it_has_room() -> None:
    cap = PrefixCap(1)
    cap.lets_in("a", CROWD, {}, 0.0)
    for peer, told in (("b", {CROWD: 1}), ("c", {}), ("b", {})):
        assert not cap.lets_in(peer, CROWD, {}, 1.0)
        assert cap.newly_full() == told
    later = 1.0 + 2 * ASKS_AGAIN_S
    assert cap.lets_in("a", CROWD, {}, later) and cap.newly_full() == {}
    assert not cap.lets_in("b", CROWD, {}, later) and cap.newly_full() == {CROWD: 1}


def test_a_crowd_of_many_prefixes_takes_bounded_memory() -> None:
    cap = PrefixCap(1)
    for number in range(2 * ASKING_MAX):
        cap.lets_in(f"sybil{number}", f"prefix {number}", {}, 0.0)
        cap.lets_in(f"other{number}", f"prefix {number}", {}, 0.0)
    assert len(cap._let_in) == len(cap._waiting) == ASKING_MAX
