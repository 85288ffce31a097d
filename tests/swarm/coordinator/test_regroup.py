"""The operator's regroup: asked by a file in the coordinator's home, answered by another."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import msgspec
import pytest
import trio

from peer.errors import ConfigError
from peer.identity import Identity
from swarm.coordinator.regroup import regroup_all
from swarm.coordinator.regroup_files import GroupOutcome, RegroupRequest, ask_coordinator
from swarm.run.home import Home
from tests.swarm.coordinator.run_scene import CoordinatedRun, open_run

pytestmark = pytest.mark.slow


async def ask(run: CoordinatedRun, *without: str, readmit: tuple[str, ...] = (), undo: bool = False) -> GroupOutcome:
    """Ask as `peer regroup` does, from another thread."""
    (outcome,) = await trio.to_thread.run_sync(partial(ask_coordinator, run.home.path, without, readmit, undo))
    return outcome


async def test_a_group_that_lost_its_majority_goes_on_when_the_operator_says_so(tmp_path: Path) -> None:
    async with open_run(tmp_path, min_peers=3) as run:
        left, *lost = replicas = [await run.enter() for _ in range(3)]
        group, gate = run.groups[0], trio.Event()
        await run.until(lambda: group.head.round >= 1)
        held = max(replica.head.round for replica in replicas) + 3
        for replica in replicas:  # else the group ends a round without the first to leave before the second has left
            replica.trainer.hold(held, gate)
        await run.until(lambda: all(replica.trainer.waiting for replica in replicas))
        for replica in lost:
            await run.leave(replica)
        stood = group.head
        await run.until(lambda: len(group.away) == 2)
        gate.set()
        gone = group.away
        outcome = await ask(run)
        assert (outcome.outcome, outcome.away, outcome.alone) == ("unnamed", gone, False) and group.head.term == 1
        outcome = await ask(run, gone[0])
        assert (outcome.outcome, outcome.away) == ("unnamed", gone[1:]) and group.head.term == 1
        outcome = await ask(run, *gone)
        assert (outcome.outcome, outcome.stage, outcome.term, outcome.members) == ("resumed", None, 2, 1)
        assert outcome.round >= stood.round
        await run.until(lambda: left.head.term == 2 and left.head.round > outcome.round)
        assert run.seen("regroup_asked") and [member.peer for member in group.head.members] == [left.peer]
        assert not run.home.regroup_request.exists() and not run.home.regroup_answer.exists()

        back = await run.enter(identity=Identity.generate())
        await run.until(lambda: group.head.has(back.driver.me))


async def test_a_group_that_goes_on_is_left_alone(tmp_path: Path) -> None:
    async with open_run(tmp_path, min_peers=2) as run:
        replicas = [await run.enter() for _ in range(2)]
        await run.until(lambda: run.groups[0].head.round >= 1)
        outcome = await ask(run)
        assert outcome.outcome == "withdrawn" and run.groups[0].head.term == 1
        at = run.groups[0].head.round
        await run.until(lambda: all(replica.head.round > at + 1 for replica in replicas))
        assert all(replica.head.term == 1 for replica in replicas)


async def test_rounds_are_taken_back_only_if_the_operator_says_so(tmp_path: Path) -> None:
    """The only peer that holds the last weights is gone. The other one stands before them."""
    async with open_run(tmp_path, min_peers=2) as run:
        early, late = [await run.enter() for _ in range(2)]
        await run.until(lambda: run.groups[0].head.round >= 1)
        await run.leave(early)
        at = run.groups[0].head.round
        await run.until(lambda: late.head.round > at)
        await run.leave(late)
        again = await run.enter(identity=Identity.generate())  # holds the first weights only
        await run.until(lambda: again.peer in run.host.connected)
        last = run.groups[0].head
        await run.until(lambda: len(run.groups[0].away) == len(last.members))  # it has been heard a moment ago
        outcome = await ask(run)
        assert outcome.outcome == "unnamed" and outcome.alone and len(outcome.away) == len(last.members)
        outcome = await ask(run, *outcome.away)
        assert outcome.outcome == "would_undo" and run.groups[0].head == last and outcome.undone == last.round
        outcome = await ask(run, *run.groups[0].away, undo=True)
        assert (outcome.outcome, outcome.round, outcome.members) == ("resumed", 0, 1)
        await run.until(lambda: again.head.term == outcome.term and again.head.round >= 1)


async def test_the_groups_of_all_stages_are_asked(tmp_path: Path) -> None:
    async with open_run(tmp_path, stages=2, min_peers=9) as run:
        outcomes = await regroup_all(run.groups, RegroupRequest("n"))
        assert [outcome.stage for outcome in outcomes] == [0, 1]
        assert {(outcome.outcome, outcome.connected, outcome.needed) for outcome in outcomes} == {("unbegun", 0, 9)}


async def test_a_restored_coordinator_begins_after_the_operator_regroup(tmp_path: Path) -> None:
    async with open_run(tmp_path) as run:
        await run.restart(restored=True)
        early = await ask(run)
        assert (early.outcome, early.connected, early.needed, early.restored) == ("unbegun", 0, 1, True)
        group = run.groups[0]
        await run.enter()
        await run.until(lambda: group.driver._node._applicants.first()[0])
        assert not group.head.members and not run.seen("regrouped")
        outcome = await ask(run)
        assert (outcome.outcome, outcome.round, outcome.members) == ("begun", 0, 1) and group.head.members


def test_no_coordinator_to_ask(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"is not the home of a coordinator: name the one"):
        ask_coordinator(tmp_path)


async def test_a_coordinator_that_is_away_is_not_asked(tmp_path: Path) -> None:
    async with open_run(tmp_path) as run:
        run.stop.cancel()
        await run.until(lambda: not run.home.is_in_use)
        with pytest.raises(ConfigError, match=r"no coordinator runs from .*: start it with `peer coordinate --home"):
            await ask(run)
        assert not run.home.regroup_request.exists()


async def test_a_request_that_is_none_is_refused(tmp_path: Path) -> None:
    async with open_run(tmp_path) as run:
        run.home.regroup_request.write_bytes(b'{"nonce": 3}')
        await run.until(lambda: run.seen("regroup_refused"))
        assert not run.home.regroup_request.exists() and not run.seen("regroup_asked")
        outcome = GroupOutcome("withdrawn", None, 3)
        assert msgspec.json.decode(msgspec.json.encode(outcome), type=GroupOutcome) == outcome


def test_a_home_is_in_use_while_a_process_holds_it(tmp_path: Path) -> None:
    home = Home(tmp_path / "home")
    assert not home.is_in_use
    with home.locked():
        assert home.is_in_use
    assert not home.is_in_use
