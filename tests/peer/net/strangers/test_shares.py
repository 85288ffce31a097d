"""Slots of a listener: strangers displace each other within their share, and trusted peers displace strangers."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import trio
import trio.testing

from peer.net.admissions import Admissions
from peer.net.strangers.shares import AT_REST_S, Handshakes, SharedSlots, Slots, address_group

TOTAL = 80  # 20 for strangers, 10 of them for one group; 64 for all


@dataclass(eq=False)
class Holder:
    peer: str
    last_used: float = 0.0


@pytest.fixture
def admissions() -> Admissions:
    admissions = Admissions()
    admissions.guard()
    return admissions


def slots_of(admissions: Admissions) -> Slots[Holder]:
    return Slots(TOTAL, admissions, lambda holder: holder.last_used)


def fill(slots: Slots[Holder], count: int, group: str, begun: float = 0.0) -> list[Holder]:
    """Add strangers for which no other gives way, each a second younger than the one before."""
    added = [Holder(f"{group} {number}", begun + number) for number in range(count)]
    assert all(slots.add(holder, holder.peer, group) is None for holder in added)
    return added


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("203.0.113.7", "203.0.113.250", True),
        ("203.0.113.7", "203.0.112.7", False),
        ("127.0.0.1", "127.0.0.24", True),
        ("2001:db8:1:2::1", "2001:db8:1:2:ffff::9", True),
        ("2001:db8:1:2::1", "2001:db8:1:3::1", False),
        ("::ffff:203.0.113.7", "203.0.113.9", True),
        ("fe80::1%eth0", "fe80::2", True),
        ("", "", True),
    ],
)
def test_neighbours_count_together(one: str, other: str, same: bool) -> None:
    assert (address_group(one) == address_group(other)) is same


def test_the_stranger_idle_the_longest_gives_way_within_its_group(admissions: Admissions) -> None:
    slots = slots_of(admissions)
    strangers = fill(slots, 10, "a")
    others = fill(slots, 5, "b", begun=-100.0)
    strangers[0].last_used = 99.0  # it has called since
    newest = Holder("newest", 100.0)
    assert slots.add(newest, newest.peer, "a") is strangers[1]
    assert slots.add(Holder("next", 101.0), "next", "a") is strangers[2]
    assert slots.add(Holder("of b", 102.0), "of b", "b") is None
    assert others  # untouched


def test_strangers_of_many_groups_share_a_quarter_and_the_fullest_group_gives(admissions: Admissions) -> None:
    slots = slots_of(admissions)
    crowd = fill(slots, 9, "a")
    for number in range(11):
        fill(slots, 1, f"group {number}", begun=-100.0)
    newest = Holder("newest", 100.0)
    assert slots.add(newest, newest.peer, "z") is crowd[0]


def test_trusted_peers_hold_no_share_and_displace_strangers(admissions: Admissions) -> None:
    slots = slots_of(admissions)
    strangers = fill(slots, 10, "a") + fill(slots, 10, "b", begun=50.0)
    members = [Holder(f"member {number}") for number in range(64)]
    admissions.trust("head", [member.peer for member in members])
    losers = [slots.add(member, member.peer, "a") for member in members]
    assert losers[:44] == [None] * 44  # 80 % of all are taken then
    assert set(losers[44:]) == set(strangers)
    late = Holder("late member")
    admissions.trust("late", [late.peer])
    assert slots.add(late, late.peer, "c") is late, "no member gives way to another"
    slots.remove(members[0])
    assert slots.add(late, late.peer, "c") is None


def test_a_stranger_that_becomes_trusted_counts_no_longer(admissions: Admissions) -> None:
    slots = slots_of(admissions)
    for number in range(40):  # each is granted before the next one comes
        member = Holder(f"member {number}", number)
        assert slots.add(member, member.peer, "a") is None
        admissions.grant(member.peer, "member", trusted=True)


def test_a_host_of_no_run_gives_strangers_all_inbound_slots() -> None:
    slots = slots_of(Admissions())
    first = fill(slots, 32, "a")
    assert slots.add(Holder("one more", 100.0), "one more", "a") is first[0]
    fill(slots, 32, "b", begun=50.0)
    assert slots.add(Holder("too many", 200.0), "too many", "c") is first[1]


async def test_the_oldest_handshake_of_a_group_gives_way() -> None:
    handshakes = Handshakes(4, 2)
    ended: list[str] = []

    async def hold(name: str, group: str) -> None:
        with handshakes.count(group):
            await trio.sleep_forever()
        ended.append(name)

    async with trio.open_nursery() as nursery:
        for name in ("a1", "a2", "b1", "c1", "a3", "d1"):
            nursery.start_soon(hold, name, name[0])
            await trio.testing.wait_all_tasks_blocked()
        assert ended == ["a1", "a2"]  # for a3, and for d1 as the oldest of the fullest group
        nursery.cancel_scope.cancel()


def hold(slots: SharedSlots[Holder], count: int, group: str, used_at: float) -> list[Holder]:
    """Add holders that displace none, each a second younger than the one before."""
    added = [Holder(f"{group} {number}", used_at + number) for number in range(count)]
    assert [slots.add(holder, holder.peer, group) for holder in added] == [None] * count
    return added


async def test_a_lone_group_has_all_slots_and_gives_them_back_at_once(
    autojump_clock: trio.testing.MockClock,
) -> None:
    slots: SharedSlots[Holder] = SharedSlots(8, lambda holder: holder.last_used)
    now = trio.current_time()
    many = hold(slots, 8, "a", now)  # not one at rest
    late = Holder("late", now + 20)
    assert slots.add(late, late.peer, "a") is late, "of its own group none is at rest"
    others = [Holder(f"b {number}", float("inf")) for number in range(5)]
    given = [slots.add(holder, holder.peer, "b") for holder in others]
    assert given == [*many[:4], others[4]], "half of all for each of two groups"
    third = Holder("c", now)
    assert slots.add(third, third.peer, "c") in (many[4], others[0]) and len(slots) == 8


async def test_what_a_group_has_within_its_share_ends_only_at_rest(autojump_clock: trio.testing.MockClock) -> None:
    slots: SharedSlots[Holder] = SharedSlots(8, lambda holder: holder.last_used)
    now = trio.current_time()
    held = [hold(slots, 2, group, now) for group in "abcd"]
    fifth = Holder("fifth", now)
    assert slots.add(fifth, fifth.peer, "e") is fifth
    held[0][0].last_used = float("inf")
    await trio.sleep(AT_REST_S + 1.5)
    assert slots.add(fifth, fifth.peer, "e") is held[0][1] and len(slots) == 8


async def test_reserved_holders_go_first_and_give_way_to_no_others(autojump_clock: trio.testing.MockClock) -> None:
    slots: SharedSlots[Holder] = SharedSlots(8, lambda holder: holder.last_used, lambda holder: holder.peer[0] == "s")
    now = trio.current_time()
    clients = hold(slots, 2, "a", float("inf")) + hold(slots, 6, "b", now)
    servers = [Holder(f"s {number}", now - 100) for number in range(9)]
    losers = [slots.add(server, server.peer, "bcde"[number // 2]) for number, server in enumerate(servers[:8])]
    assert losers[:4] == clients[2:6] and set(losers[4:]) == {*clients[:2], *clients[6:]}
    client = Holder("client", now)
    assert slots.add(client, client.peer, "z") is client
    assert slots.add(servers[8], servers[8].peer, "z") is servers[0], "and they share like any others"


async def test_many_reserved_holders_of_one_group_are_like_any_others(autojump_clock: trio.testing.MockClock) -> None:
    """Where a run is open, any key is a member."""
    slots: SharedSlots[Holder] = SharedSlots(8, lambda holder: holder.last_used, lambda holder: True)
    servers = hold(slots, 8, "a", trio.current_time())
    others = [Holder(f"other {number}", trio.current_time()) for number in range(2)]
    assert [slots.add(holder, holder.peer, "b") for holder in others] == servers[:2]
