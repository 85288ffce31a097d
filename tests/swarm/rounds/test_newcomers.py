"""A joiner that fails in its first round, before it is a member of any head, does not hold up the others."""

from __future__ import annotations

from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import torch
import trio

from peer.net.method import Call
from swarm.protocol.plan import Assignment
from tests.swarm.support.group import Patient, StageReplica, open_group, schedule_of

NUMEL = 1000
STEPS = 4
ROUND_S = 3000.0  # the plans' deadlines; the test ends after a tenth of it


def no_change(peer: str, first_step: int, assignment: Assignment) -> torch.Tensor:
    return torch.zeros(NUMEL)


def slow(replica: StageReplica) -> StageReplica:
    """Let it report a low speed, so that its rounds have a deadline of many minutes."""
    replica.context.trainer.speed = STEPS / ROUND_S  # type: ignore[misc]
    return replica


async def test_a_joiner_that_dies_before_its_first_commit_is_not_waited_for(tmp_path: Path) -> None:
    killed = trio.CancelScope()
    async with AsyncExitStack() as stack:
        group = await stack.enter_async_context(open_group(tmp_path, NUMEL, rounds=100_000, min_peers=1, steps=STEPS))
        group.schedule, group.timeouts = schedule_of(STEPS, compute_s_max=ROUND_S), Patient
        replica = slow(await stack.enter_async_context(group.join(no_change)))

        async def live_until_killed(task_status: trio.TaskStatus[StageReplica]) -> None:
            with killed:
                async with group.join(no_change) as newcomer:
                    slow(newcomer).context.trainer.gate = trio.Event()  # type: ignore[attr-defined]
                    task_status.started(newcomer)
                    await newcomer.engine.run()

        with trio.fail_after(ROUND_S / 10):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(replica.engine.run)
                while replica.engine.head.round < 1:  # the run's first members are not newcomers
                    await trio.sleep(0.02)
                newcomer = await nursery.start(live_until_killed)
                while not newcomer.context.trainer.waiting:
                    await trio.sleep(0.02)
                round_ = replica.engine._state.round
                assert round_ is not None
                plan = round_.round_state.plan
                assert plan is not None and plan.deadline_s > ROUND_S / 2
                assert newcomer.context.me in {each.member for each in plan.assignments}
                before = replica.engine.head
                assert not before.has(newcomer.context.me)
                killed.cancel()
                while replica.engine.head.round == before.round:
                    await trio.sleep(0.02)
                nursery.cancel_scope.cancel()


async def test_a_joiner_that_plays_dead_in_every_exchange_stops_no_round(tmp_path: Path) -> None:
    """It joins, promises and submits as an honest peer, and falls silent whenever an exchange begins."""
    rounds = set[int]()  # the latest committed round at each order to exchange

    async with AsyncExitStack() as stack:
        group = await stack.enter_async_context(open_group(tmp_path, NUMEL, rounds=100_000, min_peers=3, steps=STEPS))
        replicas = [await stack.enter_async_context(group.join(no_change)) for _ in range(3)]
        liar = await stack.enter_async_context(group.join(no_change))
        methods: dict[str, Any] = liar.host.rpc.server._methods
        honest = {name: methods[name].handler for name in ("net/ping", "round.exchange")}

        async def is_gone(call: Call[Any]) -> Any:
            await trio.sleep_forever()

        async def plays_dead(call: Call[Any]) -> Any:
            rounds.add(max(replica.engine.head.round for replica in replicas))
            methods["net/ping"].handler = is_gone
            await trio.sleep_forever()

        async def is_back(call: Call[Any]) -> Any:
            methods["net/ping"].handler = honest["net/ping"]
            return await prepared(call)

        with trio.fail_after(300):
            async with trio.open_nursery() as nursery:
                for replica in replicas:
                    nursery.start_soon(replica.engine.run)
                while replicas[0].engine.head.round < 1:
                    await trio.sleep(0.02)
                nursery.start_soon(liar.engine.run)
                while "round.prepare" not in methods:
                    await trio.sleep(0.02)
                prepared, methods["round.prepare"].handler = methods["round.prepare"].handler, is_back
                methods["round.exchange"].handler = plays_dead
                while not rounds:
                    await trio.sleep(0.02)
                before = max(rounds)
                while any(replica.engine.head.round <= before for replica in replicas):
                    await trio.sleep(0.02)
                nursery.cancel_scope.cancel()
    head = next(head for replica in replicas for head in replica.heads if head.round == before + 1)
    assert not head.has(liar.context.me), "it was left out"


async def test_newcomers_of_a_full_address_prefix_wait_for_room(tmp_path: Path) -> None:
    """All peers are at 127.0.0.1, so a head has two members at most: of the first group, and of every later one."""
    async with AsyncExitStack() as stack:
        group = await stack.enter_async_context(
            open_group(tmp_path, NUMEL, rounds=100_000, min_peers=2, steps=STEPS, members_per_prefix=2)
        )
        replicas = [await stack.enter_async_context(group.join(no_change)) for _ in range(4)]

        async def commits(rounds: int) -> None:
            target = max(replica.engine.head.round for replica in replicas) + rounds
            while max(replica.engine.head.round for replica in replicas) < target:
                await trio.sleep(0.02)

        with trio.fail_after(60):
            async with trio.open_nursery() as nursery:
                for replica in replicas:
                    nursery.start_soon(replica.engine.run)
                while not any(replica.seen("prefix_full") for replica in replicas):
                    await trio.sleep(0.02)
                await commits(3)
                nursery.cancel_scope.cancel()
    heads = [head for replica in replicas for head in replica.heads]
    assert heads and {len(head.members) for head in heads if head.members} == {2}
    told = [event.fields for replica in replicas for event in replica.seen("prefix_full")]
    assert {(fields["prefix"], fields["most"]) for fields in told} == {("127.0.0.0/24", 2)}
    assert all(len(replica.seen("prefix_full")) <= 1 for replica in replicas), "told once"
