"""A member that has missed rounds: it replays their results, or fetches the state whole."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
import torch

from peer.events import EventLog
from peer.identity import Identity
from peer.net.method import Call
from swarm.protocol.agreement.actions import Fetch
from swarm.protocol.head import Head, Member, genesis
from swarm.rounds.building import StateBuilder
from swarm.rounds.catch_up import Arrival, CatchUp
from swarm.rounds.context import RoundContext
from swarm.rounds.fetched_states import FetchedStates
from swarm.state.messages import AskResult, ResultPart, StateMethods, StateReply
from swarm.state.upload_limits import SnapshotLimits
from tests.swarm.rounds.test_driver import deltas
from tests.swarm.rounds.test_losses import QUICK
from tests.swarm.support.driven_group import DrivenGroup, DrivenReplica, GroupSetting, open_driven_group

pytestmark = pytest.mark.slow


async def miss(group: DrivenGroup, away: DrivenReplica, others: list[DrivenReplica], rounds: int) -> int:
    """Cut a member off until the others are exactly that many rounds further; return their round then."""
    away.trainer.hold(0)
    await group.until(lambda: away.trainer.waiting)
    stood = away.head.round
    group.part([away.peer], [*(other.peer for other in others), group.coordinator_host.peer_id])
    for other in others:
        other.trainer.hold(stood + rounds + 1)
    await group.until(lambda: all(other.trainer.waiting for other in others))
    assert all(other.head.round == stood + rounds for other in others) and away.head.round == stood
    group.heal()
    return stood + rounds


@pytest.mark.parametrize("members", [(), (Member("other", "1"),)])
async def test_only_a_head_with_members_is_replayed_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, members: tuple[Member, ...]
) -> None:
    """A newcomer at the run's beginning built the first round and waited in vain for its node to move there."""
    mine = msgspec.structs.replace(genesis("run", bytes(32)), members=members)
    goal = msgspec.structs.replace(mine, round=3, state_hash=bytes([3]) * 32)
    replayed: list[Head] = []

    async def replay(self: CatchUp, action: Fetch, mine: Head, moved: Arrival) -> bool:
        replayed.append(mine)
        return False

    async def whole(self: CatchUp, action: Fetch) -> bool:
        return True

    async def never(state_hash: bytes, timeout_s: float) -> Head:
        raise AssertionError("it waits for its node to move")

    monkeypatch.setattr(CatchUp, "_replay", replay)
    monkeypatch.setattr(CatchUp, "_whole", whole)
    state = SimpleNamespace(tree=SimpleNamespace(root=mine.state_hash))
    context = cast(RoundContext, SimpleNamespace(state=state, events=EventLog()))
    builder = cast(StateBuilder, SimpleNamespace(holds=[mine.state_hash]))
    catch_up = CatchUp(context, builder, FetchedStates(tmp_path, 8, 2), lambda head: [], lambda event: None)
    assert await catch_up.fetch(Fetch(goal.state_hash, goal, ("other",)), mine, never)
    assert replayed == ([mine] if members else [])


def open_gates(group: DrivenGroup) -> None:
    for member in group.members:
        if member.trainer.gate is not None:
            member.trainer.gate.set()


@pytest.mark.parametrize("rounds", [1, 3])
async def test_missed_rounds_are_replayed(tmp_path: Path, rounds: int) -> None:
    """Applying their results is less than a whole state, and leads to the same bits."""
    async with open_driven_group(tmp_path, GroupSetting(limits=QUICK, work_s=0.3)) as group:
        away, *others = [await group.enter(deltas) for _ in range(3)]
        await group.until_round(1)
        goal = await miss(group, away, others, rounds)
        await group.until(lambda: away.head.round == goal and away.state.tree.root == away.head.state_hash)
        fetched = away.seen("state_fetched")
        assert fetched and all(event.fields["replayed"] for event in fetched)
        assert torch.equal(away.state.theta, others[0].state.theta)
        assert torch.equal(away.state.tensors[1], others[0].state.tensors[1])
        open_gates(group)
        await group.until(lambda: away.head.round > goal + 2 and away.head.has(away.driver.me))
        group.check()


async def test_many_missed_rounds_take_a_whole_state(tmp_path: Path) -> None:
    scarce = SnapshotLimits(small_bytes=0)
    async with open_driven_group(tmp_path, GroupSetting(limits=QUICK, work_s=0.3, snapshots=scarce)) as group:
        away, *others = [await group.enter(deltas) for _ in range(3)]
        await group.until_round(1)
        kept = int(SnapshotLimits.results_share * 8)  # at int8 a result is an eighth of a state
        goal = await miss(group, away, others, kept + 2)
        await group.until(lambda: away.head.round == goal and away.state.tree.root == away.head.state_hash)
        assert any(not event.fields["replayed"] for event in away.seen("state_fetched"))
        assert torch.equal(away.state.theta, others[0].state.theta)
        open_gates(group)
        await group.until_round(goal + 2)
        group.check()


async def test_a_member_that_no_peer_brings_the_missed_state_says_so_and_goes_on_asking(tmp_path: Path) -> None:
    async with open_driven_group(tmp_path, GroupSetting(limits=QUICK, work_s=0.3)) as group:
        away, *others = [await group.enter(deltas) for _ in range(3)]
        await group.until_round(1)
        methods = StateMethods.of(away.state.size_bytes, 8 << 20)
        names = [method.name for method in (methods.hashes, methods.chunk, methods.result)]
        kept: list[Any] = [member.host.rpc.server._methods[name] for member in others for name in names]
        honest = [one.handler for one in kept]

        async def gone(call: Call[Any]) -> Any:
            return ResultPart("gone") if isinstance(call.body, AskResult) else StateReply("gone")

        for served in kept:
            served.handler = gone
        goal = await miss(group, away, others, 1)
        await group.until(lambda: len(away.seen("catch_up_failed")) >= 2)
        assert away.head.round == goal - 1, "nothing else enters the weights"
        for failed in away.seen("catch_up_failed"):
            assert failed.fields["round"] == goal and "do not hold it any more" in str(failed.fields["reason"])
        for served, handler in zip(kept, honest, strict=True):
            served.handler = handler
        await group.until(lambda: away.head.round == goal and away.state.tree.root == away.head.state_hash)
        open_gates(group)
        await group.until(lambda: away.head.round > goal + 2 and away.head.has(away.driver.me))
        group.check()


async def test_a_donor_with_other_results_is_not_believed(tmp_path: Path) -> None:
    """Its results lead to another state than the certified one: nothing of them enters the weights."""
    async with open_driven_group(tmp_path, GroupSetting(codec="fp32", limits=QUICK, work_s=0.3)) as group:
        away, *others = [await group.enter(deltas) for _ in range(3)]
        await group.until_round(1)
        lied: list[str] = []
        name = StateMethods.of(away.state.size_bytes, 8 << 20).result.name
        for other in others:
            served: Any = other.host.rpc.server._methods[name]

            async def lie(call: Call[Any], honest: Any = served.handler, peer: str = other.peer) -> Any:
                body, payload = await honest(call)
                lied.append(peer)
                return body, bytes(len(payload))

            served.handler = lie
        goal = await miss(group, away, others, 1)
        await group.until(lambda: away.head.round == goal and away.state.tree.root == away.head.state_hash)
        assert lied and torch.equal(away.state.theta, others[0].state.theta)
        assert not any(event.fields["replayed"] for event in away.seen("state_fetched"))
        open_gates(group)
        await group.until_round(goal + 1)


async def test_a_member_that_restarts_replays_what_it_has_missed(tmp_path: Path) -> None:
    """Its records say where it stood, its results lead there, and the others' go on from there."""
    identity = Identity.generate()
    async with open_driven_group(tmp_path, GroupSetting(limits=QUICK, work_s=0.3)) as group:
        others = [await group.enter(deltas) for _ in range(2)]
        first = await group.enter(deltas, identity)
        await group.until_round(2)
        for replica in (first, *others):
            replica.trainer.hold(first.head.round + 2)
        await group.until(lambda: all(other.trainer.waiting for other in (first, *others)))
        stood = first.head.round
        await group.leave(first)
        for other in others:
            gate = other.trainer.gate
            other.trainer.hold(stood + 3)
            assert gate is not None
            gate.set()
        await group.until(lambda: all(o.head.round == stood + 2 and o.trainer.waiting for o in others))
        again = await group.enter(deltas, identity)
        await group.until(lambda: again.head.round == stood + 2)
        fetched = again.seen("state_fetched")
        assert fetched and all(event.fields["replayed"] for event in fetched)
        assert torch.equal(again.state.theta, others[0].state.theta)
        open_gates(group)
        await group.until_round(stood + 4)
        group.check([first, again, *others])
        assert again.driver.me == first.driver.me
