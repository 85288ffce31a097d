"""At most so many members of one address prefix take part in one head."""

from __future__ import annotations

import trio
import trio.testing

from swarm.protocol.head import Member
from swarm.protocol.join_requests import JOIN_REQUESTS_MAX, REQUEST_LASTS_S, WAITING_FACTOR, JoinRequests
from swarm.protocol.prefix_cap import FullPrefixes, admit

CROWD, HOME = "198.51.100.0/24", "203.0.113.0/24"


def named(*peers: str) -> list[Member]:
    return [Member(peer, "s") for peer in peers]


def test_newcomers_of_a_full_prefix_wait_and_members_stay() -> None:
    crowd = named(*(f"sybil{i}" for i in range(200)))
    honest = named("honest")[0]
    newcomers = [*((member, CROWD) for member in crowd), (honest, HOME)]

    admission = admit(newcomers, [HOME, CROWD, CROWD, CROWD], per_prefix=8, room=60)
    assert admission.admitted == (*crowd[:5], honest), "three of the prefix are members already"
    assert admission.waiting == {CROWD: 195}

    over = admit([(member, CROWD) for member in crowd], [CROWD] * 9, per_prefix=8, room=60)
    assert over.admitted == () and over.waiting == {CROWD: 200}, "nobody is put out"

    small = admit(newcomers, [], per_prefix=8, room=3)
    assert small.admitted == tuple(crowd[:3])
    assert not admit([(honest, HOME)], [], per_prefix=8, room=-1).admitted


def test_each_full_prefix_is_told_of_once_until_it_has_room() -> None:
    full = FullPrefixes()
    crowd = [(member, CROWD) for member in named("a", "b", "c")]
    assert full.fresh(admit(crowd, [], per_prefix=1, room=9)) == {CROWD: 2}
    assert full.fresh(admit(crowd, [], per_prefix=1, room=9)) == {}
    assert full.fresh(admit(crowd[:1], [], per_prefix=1, room=9)) == {}
    assert full.fresh(admit(crowd, [CROWD], per_prefix=1, room=9)) == {CROWD: 3}


async def test_a_crowd_of_one_prefix_takes_no_room_from_other_newcomers(autojump_clock: trio.testing.MockClock) -> None:
    requests = JoinRequests(per_prefix=8)
    for number in range(2 * JOIN_REQUESTS_MAX):
        requests.add(Member(f"sybil{number}", "s"), CROWD)
    assert len(requests._waiting) == 8 * WAITING_FACTOR
    requests.add(Member("honest", "s"), HOME)
    found = requests.ready(60, [HOME, HOME])
    assert len(found.admitted) == 9 and Member("honest", "s") in found.admitted

    await trio.sleep(REQUEST_LASTS_S + 1)
    requests.add(Member("late", "s"), CROWD)
    assert requests.ready(60, ()).admitted == (Member("late", "s"),), "the crowd's requests are over"
