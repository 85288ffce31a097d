"""Whole rounds of the agreement's driver between real hosts."""

from __future__ import annotations

from contextlib import AsyncExitStack
from pathlib import Path

import torch
import trio

from swarm.protocol.plan import Assignment
from tests.swarm.support.driven_group import open_driven_group


def deltas(peer: str, first_step: int, assignment: Assignment, numel: int = 40_000) -> torch.Tensor:
    seed = sum(peer.encode()) * 1000 + first_step
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed)) * 1e-2


async def test_members_commit_the_same_bits_and_a_hash_chain(tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        group = await stack.enter_async_context(open_driven_group(tmp_path, 40_000, rounds=5))
        replicas = [await stack.enter_async_context(group.join(deltas)) for _ in range(3)]
        with trio.fail_after(60):
            for replica in replicas:
                await replica.until_round(5)
        for replica in replicas:
            assert [head.round for head in replica.heads] == [0, 1, 2, 3, 4, 5]
            assert replica.heads == replicas[0].heads
            assert torch.equal(replica.state.theta, replicas[0].state.theta)
            assert not replica.seen("peer_penalized")
            for earlier, later in zip(replica.heads, replica.heads[1:], strict=False):
                assert later.previous == earlier.hash
