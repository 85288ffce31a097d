"""Whole rounds between real hosts: what is committed, by which members, with the same bits at all of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import trio

from swarm.protocol.head import Head
from swarm.protocol.plan import Assignment, Contribution
from tests.swarm.support.driven_group import GroupSetting, open_driven_group

pytestmark = pytest.mark.slow

NUMEL = 40_000


def deltas(peer: str, first_step: int, assignment: Assignment | None, numel: int = NUMEL) -> torch.Tensor:
    seed = sum(peer.encode()) * 1000 + first_step
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed)) * 1e-2


async def test_members_commit_the_same_bits_and_a_hash_chain(tmp_path: Path) -> None:
    async with open_driven_group(tmp_path, GroupSetting(rounds=5)) as group:
        replicas = [await group.enter(deltas) for _ in range(3)]
        await group.until_round(5)
        for replica in replicas:
            assert [head.round for head in replica.heads] == [0, 1, 2, 3, 4, 5]
            assert replica.heads == replicas[0].heads
            assert torch.equal(replica.state.theta, replicas[0].state.theta)
            assert torch.equal(replica.state.tensors[1], replicas[0].state.tensors[1])
            for earlier, later in zip(replica.heads, replica.heads[1:], strict=False):
                assert later.previous == earlier.hash
        group.check()
        last = replicas[0].heads[-1]
        assert last.ledger.returned == () and last.tokens == 5 * 3 * 4 * 2 * 8
        await group.until(lambda: group.actor.heads and group.actor.heads[-1] == last)  # also at the coordinator


async def test_a_round_is_here_once_it_was_told(tmp_path: Path) -> None:
    """Who waits for a round may leave then: it has told of all that it committed."""
    told, waited = trio.Event(), trio.Event()
    async with open_driven_group(tmp_path, GroupSetting(rounds=1, min_peers=1)) as group:
        one = await group.enter(deltas)
        committed = one.committed

        async def hold(head: Head, merged: Sequence[Contribution] | None) -> None:
            if head.round == 1:
                await told.wait()
            await committed(head, merged)

        async def wait() -> None:
            await one.driver.until_round(1)
            waited.set()

        one.committed = hold  # type: ignore[method-assign]
        async with trio.open_nursery() as nursery:
            nursery.start_soon(wait)
            while one.driver.head.round < 1:
                await trio.sleep(0.01)
            for _ in range(10):
                one.driver.actor.committed.notify()
                await trio.sleep(0.01)
            early = waited.is_set()
            told.set()
        assert not early


async def test_fp32_result_is_diloco_in_float64(tmp_path: Path) -> None:
    async with open_driven_group(tmp_path, GroupSetting(codec="fp32", rounds=3)) as group:
        replicas = [await group.enter(deltas) for _ in range(3)]
        await group.until_round(3)
        assert all(len(bodies or ()) == 3 for bodies in replicas[0].merged[1:])
        theta, velocity = group.theta.double(), torch.zeros(NUMEL, dtype=torch.float64)
        for number in range(3):
            everyone = [deltas(replica.peer, number * 4, None).double() for replica in replicas]
            mean = torch.stack(everyone).mean(0)  # of equal norm: the gate clips none
            velocity = 0.9 * velocity + mean
            theta = theta - 0.7 * (mean + 0.9 * velocity)
        for replica in replicas:
            assert (replica.state.theta.double() - theta).norm() < 1e-6 * theta.norm()


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), 1e4])
async def test_a_poisoned_update_is_left_out(tmp_path: Path, poison: float) -> None:
    def bad(peer: str, first_step: int, assignment: Assignment) -> torch.Tensor:
        return deltas(peer, first_step, assignment) * poison

    async with open_driven_group(tmp_path, GroupSetting(codec="fp32", rounds=2, min_peers=4)) as group:
        replicas = [await group.enter(deltas) for _ in range(3)]
        poisoner = await group.enter(bad)
        await group.until_round(2)
        group.check()
        head = replicas[0].head
        assert all(replica.head == head for replica in replicas)
        assert len(head.members) == 4, "a bad update does not cost the peer its membership"
        assert all(body.member.peer != poisoner.peer for bodies in replicas[0].merged[1:] for body in bodies or ())
        assert float(replicas[0].state.theta.norm()) < 2 * float(group.theta.norm())
        assert head.ledger.returned or head.ledger.cursor < 2 * 4 * 4 * 2, "the bad update's samples are free again"


async def test_a_member_that_left_after_the_last_round_is_not_waited_for(tmp_path: Path) -> None:
    async with open_driven_group(tmp_path, GroupSetting(rounds=2)) as group:
        first, *others = [await group.enter(deltas) for _ in range(3)]
        await group.until_round(2, [first])
        await group.leave(first)
        await group.until_round(2, others)
        assert {replica.heads[-1].hash for replica in (first, *others)} == {first.heads[-1].hash}
        assert first.driver.group.completed.is_set()
        await group.until(lambda: all(replica.seen("run_completed") for replica in others))
