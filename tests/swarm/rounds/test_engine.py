"""Whole rounds between real hosts: what is committed, by which members, with the same bits at all of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import trio

from optim.algorithms.outer_step import DilocoOuter
from swarm.protocol.head import Head
from swarm.protocol.plan import Assignment
from tests.swarm.support.group import Group, InventedTrainer, Patient, StageReplica, open_group


@pytest.fixture(autouse=True)
def slow_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A member that is late because this machine stood still must finish early, but is not dropped."""
    monkeypatch.setattr("swarm.rounds.collect.FINISH_EARLY_WAIT_S", 600.0)


def deltas(peer: str, first_step: int, assignment: Assignment, numel: int = 40_000) -> torch.Tensor:
    seed = sum(peer.encode()) * 1000 + first_step
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed)) * 1e-2


async def run_with(late: StageReplica, replicas: list[StageReplica], has_come: Callable[[], bool]) -> None:
    """A whole run of `replicas`. `late` starts after their round 2; they end the next round when it `has_come`."""
    gate = trio.Event()
    with trio.fail_after(120):
        async with trio.open_nursery() as nursery:
            for replica in replicas:
                trainer = cast(InventedTrainer, replica.context.trainer)
                trainer.gate, trainer.gated_from = gate, 3
                trainer.speed = 0.01  # so that the gated round's deadline is a minute away
                nursery.start_soon(replica.engine.run)
            while any(replica.engine.head.round < 2 for replica in replicas):
                await trio.sleep(0.01)
            nursery.start_soon(late.engine.run)
            while not has_come():
                await trio.sleep(0.01)
            gate.set()


async def run_all(group: Group, replicas: list[StageReplica]) -> None:
    with trio.fail_after(120):
        async with trio.open_nursery() as nursery:
            for replica in replicas:
                nursery.start_soon(replica.engine.run)


async def test_members_commit_the_same_bits_and_a_hash_chain(tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        group = await stack.enter_async_context(open_group(tmp_path, 40_000, rounds=3))
        group.timeouts = Patient
        replicas = [await stack.enter_async_context(group.join(deltas)) for _ in range(3)]
        await run_all(group, replicas)
        for replica in replicas:
            assert [h.round for h in replica.heads] == [0, 1, 2, 3]
            assert replica.heads == replicas[0].heads
            assert torch.equal(replica.context.state.theta, replicas[0].context.state.theta)
            assert torch.equal(replica.context.state.tensors[1], replicas[0].context.state.tensors[1])
            for earlier, later in zip(replica.heads, replica.heads[1:], strict=False):
                assert later.previous == earlier.hash
        assert replicas[0].heads[-1].ledger.returned == ()
        assert replicas[0].heads[-1].tokens == 3 * 3 * 4 * 2 * 8


async def test_fp32_result_is_diloco_in_float64(tmp_path: Path) -> None:
    outer = DilocoOuter(0.7, 0.9, True)
    async with AsyncExitStack() as stack:
        group = await stack.enter_async_context(open_group(tmp_path, 40_000, codec="fp32", rounds=3, outer=outer))
        group.timeouts = Patient
        replicas = [await stack.enter_async_context(group.join(deltas)) for _ in range(3)]
        await run_all(group, replicas)
        theta, velocity = group.theta.double(), torch.zeros(40_000, dtype=torch.float64)
        for round_number in range(3):
            everyone = [deltas(s.host.peer_id, round_number * 4, None).double() for s in replicas]  # type: ignore[arg-type]
            mean = torch.stack(everyone).mean(0)  # of equal norm: the gate clips none
            velocity = 0.9 * velocity + mean
            theta = theta - 0.7 * (mean + 0.9 * velocity)
        error = (replicas[0].context.state.theta.double() - theta).norm() / theta.norm()
        assert error < 1e-6


async def test_a_joiner_takes_part_in_the_next_round(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with AsyncExitStack() as stack:
        group = await stack.enter_async_context(open_group(tmp_path, 40_000, rounds=8, min_peers=2))
        group.timeouts = Patient
        replicas = [await stack.enter_async_context(group.join(deltas)) for _ in range(2)]
        late = await stack.enter_async_context(group.join(deltas))
        monkeypatch.setattr("swarm.rounds.promises.JOINER_GRACE_S", 60.0)
        await run_with(
            late, replicas, lambda: all(late.host.peer_id in replica.engine._ready() for replica in replicas)
        )
        assert late.engine.head == replicas[0].engine.head == replicas[1].engine.head
        assert late.engine.head.has(late.context.me)
        assert torch.equal(late.context.state.theta, replicas[0].context.state.theta)


async def test_a_joiner_that_asks_for_long_still_sees_the_next_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The authority's last signed head is old, so its replies must not cause vain looks for a later head."""
    monkeypatch.setattr("swarm.rounds.engine.JOIN_REQUEST_EVERY_S", 0.05)
    monkeypatch.setattr("swarm.rounds.engine.LOOK_AROUND_S", 600.0)
    monkeypatch.setattr("swarm.rounds.promises.JOINER_GRACE_S", 60.0)
    async with AsyncExitStack() as stack:
        group = await stack.enter_async_context(open_group(tmp_path, 40_000, rounds=5, min_peers=2))
        group.timeouts = Patient
        replicas = [await stack.enter_async_context(group.join(deltas)) for _ in range(2)]
        late = await stack.enter_async_context(group.join(deltas))
        requests, looks = Counter[tuple[int, str]](), Counter[int]()
        request_join_at, best_candidate = late.engine._request_join_at, late.engine.best_candidate

        async def count_request(peer: str, *rest: Any) -> None:
            await request_join_at(peer, *rest)
            requests[late.engine.head.round, peer] += 1

        async def count_look() -> Any:
            looks[late.engine.head.round] += 1
            return await best_candidate()

        monkeypatch.setattr(late.engine, "_request_join_at", count_request)
        monkeypatch.setattr(late.engine, "best_candidate", count_look)

        def has_asked_for_long() -> bool:
            assert looks[2] <= 1, "each request caused a look"
            return requests[2, group.authority_host.peer_id] >= 40

        await run_with(late, replicas, has_asked_for_long)
        fourth = next(head for head in replicas[0].heads if head.round == 4)
        assert fourth.has(late.context.me)


async def test_a_member_that_left_at_the_end_is_not_waited_for(tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        group = await stack.enter_async_context(open_group(tmp_path, 40_000, rounds=2, min_peers=2))
        group.timeouts = Patient  # so that waiting for a member that left fails the test
        stays = await stack.enter_async_context(group.join(deltas))
        decided, has_left, committed = trio.Event(), trio.Event(), stays.committed

        async def commit_late(head: Head, results: list[memoryview]) -> None:
            if head.round == 2:
                decided.set()
                await has_left.wait()
            await committed(head, results)

        stays.committed = commit_late  # type: ignore[method-assign]
        with trio.fail_after(120):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(stays.engine.run)
                async with group.join(deltas) as leaves, trio.open_nursery() as first:
                    first.start_soon(leaves.engine.run)
                    await decided.wait()  # a member whose vote is missing is rightly waited for
                    while leaves.engine.head.round < 2:
                        await trio.sleep(0.01)
                    first.cancel_scope.cancel()
                has_left.set()
        assert stays.heads[-1] == leaves.heads[-1]


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), 1e4])
async def test_a_poisoned_update_is_left_out(tmp_path: Path, poison: float) -> None:
    def bad(peer: str, first_step: int, assignment: Assignment) -> torch.Tensor:
        delta = deltas(peer, first_step, assignment)
        return delta * poison

    async with AsyncExitStack() as stack:
        group = await stack.enter_async_context(open_group(tmp_path, 40_000, codec="fp32", rounds=2, min_peers=4))
        group.timeouts = Patient
        replicas = [await stack.enter_async_context(group.join(deltas)) for _ in range(3)]
        replicas.append(await stack.enter_async_context(group.join(bad)))
        await run_all(group, replicas)
        head = replicas[0].engine.head
        assert all(replica.engine.head == head for replica in replicas)
        assert len(head.members) == 4, "a bad update does not cost the peer its membership"
        assert float(replicas[0].context.state.theta.norm()) < 2 * float(group.theta.norm())
        assert head.ledger.returned or head.ledger.cursor < 2 * 4 * 4 * 2, (
            "the samples of the bad update are free again"
        )
