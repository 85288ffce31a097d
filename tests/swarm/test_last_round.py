"""The end of a run, for one who is about to join it, and for feeders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from swarm.membership import MemberRecord
from swarm.parting import LOOK_EVERY_S, run_is_over
from tests.swarm.swarm_harness import open_swarm
from tests.swarm.test_moving import record

ROUNDS = 2


@pytest.mark.process
async def test_nobody_is_left_alone_with_an_earlier_round(tmp_path: Path) -> None:
    """A joiner comes in the last round, while the members stand still; they see to it that it has that round, too."""
    async with open_swarm(tmp_path, rounds=ROUNDS, steps=100) as swarm:
        members = [swarm.join("p1"), swarm.join("p2")]
        await swarm.committed(1, *members)
        for member in members:
            member.freeze()
        joiner = swarm.join("late")
        await swarm.coordinator.wait_for("member_joined", lambda fields: fields["name"] == "late")
        for member in members:
            member.thaw()
        everybody = (*members, joiner)
        finished = [await peer.wait_for("run_finished", timeout_s=120) for peer in everybody]
        assert {(f.fields["round"], f.fields["state_hash"]) for f in finished} == {(ROUNDS, members[0].state_hash)}
        assert [await peer.wait_exit(90) for peer in everybody] == [0, 0, 0]
        swarm.check_agreement()


class Readings:
    """What is in the records: at first, and then with every reading."""

    def __init__(self, *views: dict[str, MemberRecord]) -> None:
        self.view, self._rest = views[0], list(views[1:])
        self.read_so_far = 0

    async def read(self) -> None:
        self.read_so_far += 1
        self.view = self._rest.pop(0)


def at(round: int, role: str = "stage") -> MemberRecord:
    return record(0 if role == "stage" else -1, round=round, role=role)


async def test_a_feeder_reads_nothing_by_itself_until_the_end_is_near(autojump_clock: MockClock) -> None:
    readings: Any = Readings({"a": at(1), "b": at(2)}, {"a": at(3), "b": at(2)}, {"a": at(3)})
    with trio.move_on_after(100 * LOOK_EVERY_S) as waiting:
        await run_is_over(readings, lambda: readings.view, 3, trains=False)
    assert waiting.cancelled_caught and readings.read_so_far == 0
    await readings.read()  # as everybody does now and then
    await run_is_over(readings, lambda: readings.view, 3, trains=False)
    assert readings.view == {"a": at(3)}, "who was behind is gone: its record has expired"


async def test_a_feeder_goes_once_the_coordinator_alone_is_left_at_the_end(autojump_clock: MockClock) -> None:
    for view, over in (({}, False), ({"c": at(2, "coordinator")}, False), ({"c": at(3, "coordinator")}, True)):
        readings: Any = Readings(view)
        with trio.move_on_after(10 * LOOK_EVERY_S) as waiting:
            await run_is_over(readings, lambda readings=readings: readings.view, 3, trains=False)
        assert waiting.cancelled_caught is not over
