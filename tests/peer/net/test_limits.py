from __future__ import annotations

import trio
from hypothesis import given
from hypothesis import strategies as st
from trio.testing import MockClock, wait_all_tasks_blocked

from peer.net.limits import ByteBudget


async def test_claims_wait_until_they_fit_and_one_peer_gets_half() -> None:
    budget = ByteBudget(100)
    holding: list[str] = []
    release = trio.Event()

    async def hold(peer: str, size: int, name: str) -> None:
        async with budget.claim(peer, size):
            holding.append(name)
            await release.wait()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(hold, "greedy", 50, "greedy 1")
        await wait_all_tasks_blocked()
        nursery.start_soon(hold, "greedy", 10, "greedy 2")
        await wait_all_tasks_blocked()
        nursery.start_soon(hold, "modest", 40, "modest")
        await wait_all_tasks_blocked()
        assert holding == ["greedy 1", "modest"]
        release.set()
    assert holding == ["greedy 1", "modest", "greedy 2"]
    assert budget.free_bytes == 100


async def test_a_payload_above_the_budget_passes_alone(autojump_clock: MockClock) -> None:
    budget = ByteBudget(100)
    with trio.fail_after(1):
        async with budget.claim("peer", 1000):
            assert budget.free_bytes == 0
    assert budget.free_bytes == 100


async def test_a_cancelled_claim_leaves_the_queue() -> None:
    budget = ByteBudget(10)
    async with budget.claim("a", 10):
        with trio.move_on_after(0):
            async with budget.claim("b", 5):
                raise AssertionError("must not be admitted")
    async with budget.claim("c", 10):
        pass
    assert budget.free_bytes == 10


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 150)), max_size=30))
def test_every_claim_is_served_and_all_bytes_come_back(claims: list[tuple[str, int]]) -> None:
    async def main() -> None:
        budget = ByteBudget(100)
        in_use = 0

        async def hold(peer: str, size: int) -> None:
            nonlocal in_use
            async with budget.claim(peer, size):
                in_use += min(size, 100)
                assert in_use <= 100
                await trio.lowlevel.checkpoint()
                in_use -= min(size, 100)

        with trio.fail_after(60):
            async with trio.open_nursery() as nursery:
                for peer, size in claims:
                    nursery.start_soon(hold, peer, size)
        assert budget.free_bytes == 100

    trio.run(main)
