"""When a gossip run is over, by its peers' records."""

from __future__ import annotations

from pathlib import Path

import trio
from trio.testing import MockClock

from peer.events import Event, EventLog
from swarm.coordinator.gossip_end import GossipEnd
from swarm.membership.member_record import MemberRecord
from swarm.run.home import Home
from tests.swarm.placement.test_stage_choice import record


def at(*rounds: int) -> dict[str, MemberRecord]:
    return {str(index): record(-1, round=number, role="full") for index, number in enumerate(rounds)}


def test_it_is_over_with_the_last_round_of_the_last_peer(tmp_path: Path) -> None:
    end = GossipEnd(Home(tmp_path), 9, EventLog())
    views = [at(), at(0, -1), at(9, 8), at(8), at(9), at()]
    assert [end.sees(view.values()) for view in views] == [False, False, False, False, True, True]
    assert not GossipEnd(Home(tmp_path), 9, EventLog()).sees(at().values()), "nobody has come yet"
    feeder = record(-1, round=9, role="coordinator")
    assert not GossipEnd(Home(tmp_path), 9, EventLog()).sees([feeder]), "no peer that trains"


async def test_it_is_remembered(tmp_path: Path, autojump_clock: MockClock) -> None:
    for view in (at(9), at()):
        log, seen = EventLog(), list[Event]()
        with log.subscribed(seen.append), trio.fail_after(60):
            end = GossipEnd(Home(tmp_path), 9, log)
            await end.run(lambda view=view: view)  # type: ignore[misc]
        assert end.is_over and [(event.name, event.fields["round"]) for event in seen] == [("run_completed", 9)]
    await GossipEnd(Home(tmp_path), 0, EventLog()).run(at)
