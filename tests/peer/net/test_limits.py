from __future__ import annotations

from contextlib import AsyncExitStack

import trio
from hypothesis import given
from hypothesis import strategies as st
from trio.testing import MockClock, wait_all_tasks_blocked

from peer.errors import ConnectionLost
from peer.net.admissions import Admissions
from peer.net.limits import RATE_FLOOR, ByteBudget


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


def an_admission(*trusted: str) -> Admissions:
    admissions = Admissions()
    admissions.guard()
    admissions.trust("head", trusted)
    return admissions


async def test_strangers_leave_a_reserve_in_which_each_trusted_peer_has_one_payload() -> None:
    budget = ByteBudget(100, an_admission("a", "b", "c"))
    async with AsyncExitStack() as held:
        for number in range(25):
            claim = budget.claim(f"stranger {number}", 3)
            await held.enter_async_context(claim)
        assert not budget.fits("stranger", 3)
        for peer in ("a", "b"):
            assert budget.fits(peer, 10)
            await held.enter_async_context(budget.claim(peer, 10))
            assert not budget.fits(peer, 1), "a second payload takes no reserve"
        assert budget.fits("c", 5) and not budget.fits("c", 6)
    assert budget.free_bytes == 100


async def test_the_peer_that_holds_least_is_next(autojump_clock: MockClock) -> None:
    budget = ByteBudget(100)
    order: list[str] = []

    async def hold(peer: str, size: int, seconds: float = 1) -> None:
        async with budget.claim(peer, size) as claim:
            claim.advance(size)
            order.append(peer)
            await trio.sleep(seconds)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(hold, "other", 90)
        nursery.start_soon(hold, "greedy", 10, 100)
        await wait_all_tasks_blocked()
        for _ in range(10):
            nursery.start_soon(hold, "greedy", 10)
        await wait_all_tasks_blocked()
        nursery.start_soon(hold, "modest", 90)
    assert order[:3].index("modest") == 2 and len(order) == 13


async def receive(budget: ByteBudget, peer: str, size: int, rate: float, own_rate: float | None = None) -> bool:
    """Transfer a payload at this rate; return whether it arrived."""
    try:
        async with budget.claim(peer, size, own_rate=own_rate) as claim:
            while claim.done_bytes < size:
                await trio.sleep(0.5)
                claim.advance(min(int(rate / 2), size - claim.done_bytes))
    except ConnectionLost:
        return False
    return True


async def test_a_slow_payload_is_dropped_only_if_another_waits(autojump_clock: MockClock) -> None:
    budget = ByteBudget(1_000_000)
    assert await receive(budget, "slow", 500_000, 1_000), "nobody else wants the memory"
    arrived: dict[str, bool] = {}

    async def note(peer: str, size: int, rate: float, own_rate: float | None = None) -> None:
        arrived[peer] = await receive(budget, peer, size, rate, own_rate)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(note, "slow", 500_000, 1_000)
        nursery.start_soon(note, "enough", 500_000, RATE_FLOOR + 1_000)
        await wait_all_tasks_blocked()
        began = trio.current_time()
        nursery.start_soon(note, "waiting", 400_000, 1e6)
        await trio.sleep(0.1)
        assert "waiting" not in arrived
    assert arrived == {"slow": False, "enough": True, "waiting": True}
    assert trio.current_time() - began < 500_000 / RATE_FLOOR + 2


async def test_our_own_cap_and_a_trusted_peers_only_payload_are_no_reason_to_drop(autojump_clock: MockClock) -> None:
    for budget, own_rate in ((ByteBudget(1_000_000), 8_000.0), (ByteBudget(1_000_000, an_admission("slow")), None)):
        arrived: list[bool] = []

        async def slow(
            budget: ByteBudget = budget, own_rate: float | None = own_rate, arrived: list[bool] = arrived
        ) -> None:
            arrived.append(await receive(budget, "slow", 500_000, 4_000, own_rate))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(slow)
            await wait_all_tasks_blocked()
            assert await receive(budget, "other", 700_000, 1e6)
        assert arrived == [True]


async def test_a_peer_that_waits_for_its_own_payloads_drops_no_other(autojump_clock: MockClock) -> None:
    budget = ByteBudget(1_000_000)
    arrived: list[bool] = []

    async def slow() -> None:
        arrived.append(await receive(budget, "slow", 400_000, 4_000))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(slow)
        await wait_all_tasks_blocked()
        for _ in range(4):
            nursery.start_soon(receive, budget, "greedy", 500_000, 100_000)
    assert arrived == [True]
