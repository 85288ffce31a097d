"""The end of a run, for a joiner, for the peer that measures, and for feeders."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest
import trio
from trio.testing import MockClock

from peer.errors import NoQuorum
from swarm.membership.completion import (
    COMPLETE,
    FETCH_S,
    FETCHING,
    LOOK_EVERY_S,
    MEASURING,
    SERVE_S,
    TOO_LATE_S,
    WANTING,
    check_run_alive,
    run_is_over,
    wait_for_others,
)
from swarm.membership.member_record import MemberRecord
from tests.swarm.placement.test_stage_choice import record
from tests.swarm.support.swarm_harness import RUN_TOML, open_swarm

ROUNDS = 2
TWO_STAGES = (
    RUN_TOML.replace("max_seq_len = 128", "max_seq_len = 128\ntie_embeddings = false")
    + """
[pipeline]
stages = 2
"""
)
T = TypeVar("T")


@pytest.mark.process
async def test_no_peer_is_left_with_an_earlier_round(tmp_path: Path) -> None:
    """A joiner comes in the last round, while the only member is stopped: the member waits until the joiner has it."""
    async with open_swarm(tmp_path, rounds=ROUNDS, min_peers=1) as swarm:
        member = swarm.join("member", fault=f"stop:before_send:{ROUNDS}")
        await member.wait_stopped()
        joiner = swarm.join("late")
        await swarm.coordinator.wait_for("member_joined", lambda fields: fields["name"] == "late")
        await joiner.wait_for("worker_ready")  # it is waited for a minute
        member.thaw()
        finished = [await peer.wait_for("run_finished") for peer in (member, joiner)]
        assert {(f.fields["round"], f.fields["state_hash"]) for f in finished} == {(ROUNDS, member.state_hash)}
        assert [await peer.wait_exit() for peer in (member, joiner)] == [0, 0]
        swarm.check_agreement()


@pytest.mark.soak  # a minute, in which a record expires; the rules are tested below on a clock of their own
@pytest.mark.process
async def test_the_last_measurement_is_waited_for(tmp_path: Path) -> None:
    """A replica of stage 0 freezes with its last vote: the others of that stage wait for it before they measure.
    Meanwhile its record expires, and all other peers stand at the last round."""
    async with open_swarm(tmp_path, rounds=ROUNDS, min_peers=4, steps=10, run=TWO_STAGES) as swarm:
        scripts = {name: tmp_path / f"{name}.script" for name in ("p1", "p2", "p3")}
        first = {name: swarm.join(name, "--stage", "0", fault=f"@{script}") for name, script in scripts.items()}
        peers: dict[str, str] = {}
        for name in first:
            joined = await swarm.coordinator.wait_for("member_joined", lambda f, name=name: f["name"] == name)  # type: ignore[misc]
            peers[joined.fields["peer"]] = name
        *_, victim = (peers[peer] for peer in sorted(peers))  # the first of a commit's members measures
        scripts[victim].write_text(f"stop:before_vote:{ROUNDS}")
        last = swarm.join("last", "--stage", "1")
        left = [peer for name, peer in first.items() if name != victim]
        assert [await peer.wait_exit() for peer in (*left, last)] == [0, 0, 0]
        assert first[victim].is_stopped
        first[victim].kill()
        assert ROUNDS in [f.fields["round"] for peer in left for f in peer.all("val_evaluated")], swarm.transcript()


class Readings:
    """A membership whose records are scripted: at first, and then with every reading."""

    def __init__(self, *views: dict[str, MemberRecord]) -> None:
        self.view, self._rest = views[0], list(views[1:])
        self.read_so_far = 0
        self.gone = set[str]()

    def others(self) -> dict[str, MemberRecord]:
        return self.view

    def has_left(self, peer: str) -> bool:
        return peer in self.gone

    async def announce(self) -> None:
        pass

    async def read(self) -> None:
        self.read_so_far += 1
        if self._rest:
            self.view = self._rest.pop(0)


def always(value: T) -> Callable[[], T]:
    return lambda: value


def at(round: int, role: str = "stage", phase: str = "finished") -> MemberRecord:
    return record(0 if role == "stage" else -1, round=round, role=role, phase=phase)


async def test_no_peer_leaves_while_one_measures(autojump_clock: MockClock) -> None:
    for trains in (True, False):
        readings: Any = Readings({"a": at(3, phase=MEASURING), "b": at(3)}, {"a": at(3), "b": at(3)})
        await run_is_over(readings, 3, trains=trains)
        assert readings.read_so_far == 1


async def test_a_peer_missing_from_a_reading_is_waited_for(autojump_clock: MockClock) -> None:
    """A store that stood still lacks its record."""
    whole = {"a": at(3), "b": at(3)}
    readings: Any = Readings({"a": at(2), "b": at(3)}, {"b": at(3)}, {"b": at(3)}, whole)
    await run_is_over(readings, 3, trains=True)
    assert readings.view == whole


async def test_a_peer_that_said_goodbye_is_not_waited_for(autojump_clock: MockClock) -> None:
    readings: Any = Readings({"a": at(2), "b": at(3)}, {"b": at(3)})
    readings.gone.add("a")
    await run_is_over(readings, 3, trains=True)
    assert readings.read_so_far == 1


async def test_a_feeder_relies_on_regular_readings_until_the_end(autojump_clock: MockClock) -> None:
    readings: Any = Readings({"a": at(1), "b": at(2)}, {"a": at(3), "b": at(2)}, {"a": at(3)})
    with trio.move_on_after(100 * LOOK_EVERY_S) as waiting:
        await run_is_over(readings, 3, trains=False)
    assert waiting.cancelled_caught and readings.read_so_far == 0
    await readings.read()  # as every membership does now and then
    await run_is_over(readings, 3, trains=False)
    assert readings.view == {"a": at(3)}, "the peer that was behind is gone: its record has expired"


async def test_a_feeder_leaves_when_only_the_coordinator_is_left(autojump_clock: MockClock) -> None:
    for view, over in (({}, False), ({"c": at(2, "coordinator")}, False), ({"c": at(3, "coordinator")}, True)):
        readings: Any = Readings(view)
        with trio.move_on_after(10 * LOOK_EVERY_S) as waiting:
            await run_is_over(readings, 3, trains=False)
        assert waiting.cancelled_caught is not over


async def test_a_peer_that_comes_too_late_is_told(autojump_clock: MockClock) -> None:
    alone, mate = {"c": at(3, "coordinator")}, {"c": at(3, "coordinator"), "a": at(2)}
    for view in (alone, mate):
        with pytest.raises(NoQuorum, match="peer export"), trio.fail_after(2 * TOO_LATE_S):
            await check_run_alive(always(view), "c", 3, lambda: True)
    seen: list[dict[str, MemberRecord]] = [{}, {"c": at(2, "coordinator")}, {"x": at(3, "coordinator")}]
    for view, waits in (*((view, True) for view in (*seen, {**alone, "a": at(3)})), (alone, False)):
        with trio.move_on_after(10 * TOO_LATE_S) as waiting:
            await check_run_alive(always(view), "c", 3, always(waits))
        assert waiting.cancelled_caught


async def test_the_coordinator_is_waited_for_until_it_has_the_last_state(autojump_clock: MockClock) -> None:
    fetching, kept = at(3, "coordinator", FETCHING), at(3, "coordinator", COMPLETE)
    readings: Any = Readings({"c": fetching}, *({"c": fetching} for _ in range(1000)), {"c": kept})
    await wait_for_others(readings, 3, "c")
    assert readings.view == {"c": kept}, "a fetch may take longer than a minute"
    for missing in ({"c": at(3, "coordinator", WANTING)}, {"c": at(2, "coordinator")}):
        readings = Readings(missing)
        with trio.fail_after(2 * SERVE_S):
            await wait_for_others(readings, 3, "c")
    fetches: Any = Readings({"c": fetching})
    with trio.fail_after(2 * FETCH_S):
        await wait_for_others(fetches, 3, "c")
    await run_is_over(Readings({"c": at(3, "coordinator", WANTING)}), 3, trains=False)  # type: ignore[arg-type]


async def test_a_coordinator_that_is_started_at_the_same_time_is_waited_for(autojump_clock: MockClock) -> None:
    """It is found some seconds later: a peer that restarts alone with the last round of all left it without that."""
    wants = {"c": at(1, "coordinator")}
    readings: Any = Readings({}, {}, {}, wants, wants, {"c": at(3, "coordinator", COMPLETE)})
    await wait_for_others(readings, 3, "c")
    assert readings.view["c"].phase == COMPLETE
    with trio.fail_after(SERVE_S / 2):  # it may be gone for good
        await wait_for_others(Readings({}), 3, "c")  # type: ignore[arg-type]


async def test_who_fetches_from_the_coordinator_is_not_too_late(autojump_clock: MockClock) -> None:
    for phase, waits in ((COMPLETE, True), (FETCHING, True), (WANTING, False)):
        view = {"c": at(3, "coordinator", phase)}
        late = False
        with trio.move_on_after(10 * TOO_LATE_S):
            try:
                await check_run_alive(always(view), "c", 3, lambda: True)
            except NoQuorum:
                late = True
        assert late is not waits
