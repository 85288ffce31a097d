"""Newcomers: learners first, then members; those that fail, lie in wait or are many do not hold up the others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import trio

from peer.checkpoint.hash_tree import MIN_CHUNK
from peer.net.method import Call
from swarm.protocol.agreement.messages import RosterMessage
from swarm.protocol.head import Member
from swarm.protocol.plan import Assignment, Contribution
from swarm.rounds.messages import AGREE
from swarm.state.upload_limits import SnapshotLimits
from tests.swarm.rounds.test_driver import deltas
from tests.swarm.rounds.test_losses import QUICK
from tests.swarm.support.driven_group import DrivenReplica, GroupSetting, open_driven_group
from tests.swarm.support.group import schedule_of

pytestmark = pytest.mark.slow
ROUND_S = 3000.0  # a plan's deadline; the test ends long before


def learns(replica: DrivenReplica, member: Member) -> bool:
    return any(learner.member == member for head in replica.heads for learner in head.learners)


async def test_a_newcomer_becomes_a_learner_and_then_a_member(tmp_path: Path) -> None:
    async with open_driven_group(tmp_path, GroupSetting(min_peers=2, work_s=0.2)) as group:
        replicas = [await group.enter(deltas) for _ in range(2)]
        await group.until_round(2)
        late = await group.enter(deltas)
        await group.until(lambda: replicas[0].head.has(late.driver.me))
        await group.until_round(replicas[0].head.round + 2)
        group.check()
        assert learns(replicas[0], late.driver.me), "it has shown its work before it votes"
        heads = [head for head in replicas[0].heads if head.has(late.driver.me)]
        merged = [
            any(body.member == late.driver.me for body in bodies or ())
            for head, bodies in zip(replicas[0].heads, replicas[0].merged, strict=True)
            if head.round <= heads[0].round
        ]
        assert sum(merged) == 2, "a member after two contributions that were merged"
        assert late.seen("state_fetched")


@pytest.mark.parametrize("members", [2, pytest.param(3, marks=pytest.mark.soak)])
async def test_a_newcomer_follows_rounds_of_50_ms_and_becomes_a_member(tmp_path: Path, members: int) -> None:
    """What it needs for one round is less than that, but more than none: it is always a moment behind."""
    async with open_driven_group(tmp_path, GroupSetting(min_peers=members, work_s=0.05)) as group:
        replicas = [await group.enter(deltas) for _ in range(members)]
        await group.until_round(20)  # beyond an endorsement, so that it begins there and not at the run's beginning
        late = await group.enter(deltas)
        await group.until(lambda: replicas[0].head.has(late.driver.me))
        group.check()
        assert learns(replicas[0], late.driver.me)
        at = len(replicas[0].merged)
        await group.until(lambda: _has_merged(replicas[0].merged[at:], late.driver.me))


def _has_merged(merged: Sequence[Sequence[Contribution] | None], member: Member) -> bool:
    return any(body.member == member for bodies in merged for body in bodies or ())


@pytest.mark.soak  # schedules with joiners check the same at each commit
async def test_a_crowd_of_newcomers_is_taken_in_step_by_step(tmp_path: Path) -> None:
    """So that those who vote have been seen at work, and no crowd is a majority at once."""
    async with open_driven_group(tmp_path, GroupSetting(min_peers=2, work_s=0.2)) as group:
        first = [await group.enter(deltas) for _ in range(2)]
        await group.until_round(1)
        crowd = [await group.enter(deltas) for _ in range(4)]
        await group.until(lambda: all(first[0].head.has(peer.driver.me) for peer in crowd))
        group.check()
        for before, after in zip(first[0].heads, first[0].heads[1:], strict=False):
            new = set(after.members) - set(before.members)
            assert not before.members or len(new) <= max(1, (len(before.members) - 1) // 2)


async def test_a_newcomer_that_dies_in_its_first_round_is_not_waited_for(tmp_path: Path) -> None:
    setting = GroupSetting(min_peers=1, limits=QUICK, schedule=schedule_of(4, compute_s_max=ROUND_S))
    async with open_driven_group(tmp_path, setting) as group:
        replica = await group.enter(deltas)
        replica.trainer.speed = 4 / ROUND_S  # plans have deadlines of many minutes
        replica.trainer.work_s = 0.1
        await group.until_round(1)
        newcomer = await group.enter(deltas)
        newcomer.trainer.speed, newcomer.trainer.gate = 4 / ROUND_S, trio.Event()
        await group.until(lambda: newcomer.trainer.waiting)
        at = replica.head.round
        await group.leave(newcomer)
        await group.until_round(at + 3, [replica])
        assert not replica.head.has(newcomer.driver.me)


async def test_a_newcomer_that_falls_silent_in_every_exchange_stops_no_round(tmp_path: Path) -> None:
    """It asks to join, promises and submits as an honest peer, and is gone whenever an exchange begins."""
    setting = GroupSetting(limits=QUICK, exchange_s=8.0, work_s=0.2, keeps_pace=False)
    async with open_driven_group(tmp_path, setting) as group:
        replicas = [await group.enter(deltas) for _ in range(3)]
        await group.until_round(1)
        liar = await group.enter(deltas)
        methods: Any = liar.host.rpc.server._methods
        serve, silent = methods[AGREE.name].handler, set[int]()

        async def plays_dead(call: Call[Any]) -> Any:
            if any(isinstance(message, RosterMessage) for message in call.body.messages):
                silent.add(max(replica.head.round for replica in replicas))
                group.part([liar.peer], [replica.peer for replica in replicas])
                group.nursery.start_soon(come_back)
            return await serve(call)

        async def come_back() -> None:
            at = max(replica.head.round for replica in replicas)
            await group.until(lambda: min(replica.head.round for replica in replicas) > at)
            group.heal()

        methods[AGREE.name].handler = plays_dead
        await group.until(lambda: len(silent) >= 2)
        await group.until_round(max(silent) + 2, replicas)
        group.check(replicas)
        assert not replicas[0].head.has(liar.driver.me)


async def test_a_newcomer_survives_a_dead_and_a_lying_donor(tmp_path: Path) -> None:
    numel = 2_000_000  # 16 MB of state, in chunks enough for all donors
    asked = trio.Event()

    def big(peer: str, first_step: int, assignment: Assignment) -> torch.Tensor:
        return deltas(peer, first_step, assignment, numel)

    async def never(call: Call[Any], honest: Any) -> Any:
        asked.set()
        await trio.sleep_forever()

    async def corrupt(call: Call[Any], honest: Any) -> Any:
        answer = await honest(call)
        return (answer[0], bytes(len(answer[1]))) if isinstance(answer, tuple) else answer

    async def not_before_it(call: Call[Any], honest: Any) -> Any:
        await asked.wait()  # else these two might serve everything before the other two are asked
        await group.until(lambda: late.seen("peer_penalized"))
        return await honest(call)

    def instead(replica: DrivenReplica, answer: Any) -> None:
        served: Any = replica.host.rpc.server._methods["state.chunk"]
        served.handler = lambda call, honest=served.handler: answer(call, honest)

    waits: dict[str, Any] = {"grace_s": 20.0}  # else one that a busy machine holds up is kept waiting ever longer
    snapshots = SnapshotLimits(small_bytes=0)
    setting = GroupSetting(numel=numel, min_peers=4, limits=QUICK, snapshots=snapshots, agreement=waits)
    async with open_driven_group(tmp_path, setting) as group:
        stood = SnapshotLimits.results + 2  # so many missed rounds take a whole state
        for _ in range(4):  # all hold the same state when the newcomer asks
            (await group.enter(big)).trainer.hold(stood + 1)
        *replicas, doomed = group.members
        await group.until(lambda: all(replica.trainer.waiting for replica in (*replicas, doomed)))
        instead(doomed, never)
        instead(replicas[2], corrupt)
        instead(replicas[0], not_before_it)
        instead(replicas[1], not_before_it)
        late = await group.enter(big)
        await asked.wait()
        await group.leave(doomed)
        await group.until(lambda: late.head.round == stood and late.state.tree.root == late.head.state_hash)
        assert torch.equal(late.state.theta, replicas[0].state.theta)
        assert {event.fields["peer"] for event in late.seen("peer_penalized")} == {replicas[2].peer}
        gave = {replica.peer: late.host.bytes_by_peer[replica.peer].bytes_down for replica in replicas[:2]}
        assert all(received > MIN_CHUNK for received in gave.values()), gave
        for replica in replicas:
            replica.trainer.work_s = 0.5
            assert replica.trainer.gate is not None
            replica.trainer.gate.set()
        late.trainer.work_s = 0.5
        await group.until(lambda: replicas[0].head.has(late.driver.me))


@pytest.mark.parametrize("mode", ["required", "witness"])
async def test_a_run_of_one_peer_grows(tmp_path: Path, mode: Any) -> None:
    setting = replace(GroupSetting(min_peers=1, work_s=0.1), mode=mode)
    async with open_driven_group(tmp_path, setting) as group:
        first = await group.enter(deltas)
        await group.until_round(2)
        others = [await group.enter(deltas) for _ in range(2)]
        await group.until(lambda: all(first.head.has(other.driver.me) for other in others))
        await group.until_round(first.head.round + 1)
        group.check()
