"""How much of its update a peer sends at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import trio
from trio.testing import MockClock

from swarm.rounds.exchange.send_window import PATIENCE_S, SENDS_PER_OWNER, WINDOW_MIN, SendWindow

MB = 1_000_000
PIECE = 50_000
ROUND_TRIP_S = 0.05


class Link:
    """A link of some bytes/s that its deliveries share evenly, and the time of each arrival."""

    def __init__(self, rate: float, size_bytes: int = 2 * MB, frozen: str = "") -> None:
        self.rate, self.size_bytes, self.frozen = rate, size_bytes, frozen
        self.to: list[str] = []
        self.most = 0
        self.arrivals: dict[int, float] = {}

    async def send(self, owner: str, index: int) -> bool:
        if owner == self.frozen:
            await trio.sleep_forever()
        self.to.append(owner)
        self.most = max(self.most, len(self.to))
        left = self.size_bytes
        while left > 0:
            await trio.sleep(PIECE * len(self.to) / self.rate)
            left -= PIECE
        await trio.sleep(ROUND_TRIP_S)
        self.to.remove(owner)
        self.arrivals[index] = trio.current_time()
        return True

    async def carry(self, window: SendWindow, parts: Mapping[str, Sequence[int]]) -> float:
        """Return the seconds for all parts."""
        began = trio.current_time()
        count = sum(map(len, parts.values()))
        await window.send_all(parts, [self.size_bytes] * count, self.send)
        return trio.current_time() - began


def parts_of(owners: str, slices: int) -> dict[str, list[int]]:
    return {owner: list(range(at, slices, len(owners))) for at, owner in enumerate(owners)}


async def test_a_slow_link_sends_two_slices_at_a_time(autojump_clock: MockClock) -> None:
    """With all at once, the first would arrive with the last."""
    link, window = Link(2.5 * MB), SendWindow()
    took = await link.carry(window, parts_of("abcdef", 12))
    assert link.most == 2 and took < 1.1 * 24 / 2.5
    assert sorted(link.arrivals) == list(range(12))
    assert min(link.arrivals.values()) < 0.2 * took
    assert [index // 2 for index in link.arrivals] == sorted(index // 2 for index in range(12)), (
        "each owner in its turn"
    )


async def test_a_quick_link_soon_sends_all_at_once(autojump_clock: MockClock) -> None:
    link, window = Link(1000 * MB), SendWindow()
    await link.carry(window, parts_of("abc", 30))
    assert link.most == 3 * SENDS_PER_OWNER
    assert window.size_bytes > 2 * WINDOW_MIN
    slow = Link(2 * MB)
    await slow.carry(window, parts_of("abc", 90))
    assert window.size_bytes == WINDOW_MIN, "the link has become slow"


async def test_a_link_on_which_a_slice_takes_long_still_sends_few_at_a_time(autojump_clock: MockClock) -> None:
    """At 3 Mbit/s two slices take longer than the patience with a frozen owner, so all were soon under way."""
    link, window = Link(0.4 * MB), SendWindow()
    await link.carry(window, parts_of("abcdef", 12))
    assert link.most <= 6, "it learns how long a slice takes"
    again = Link(0.4 * MB)
    await again.carry(window, parts_of("abcdef", 12))
    assert again.most == 2, "it knows"


async def test_a_window_grows_no_further_than_it_is_used(autojump_clock: MockClock) -> None:
    """After a thousand quick exchanges a link that has become slow would narrow it for hours."""
    link, window = Link(1000 * MB), SendWindow()
    for _ in range(100):
        await link.carry(window, parts_of("abc", 9))
    assert window.size_bytes <= 2 * 6 * 2 * MB + 2 * MB
    slow = Link(2 * MB)
    await slow.carry(window, parts_of("abc", 9))
    assert window.size_bytes == WINDOW_MIN


async def test_short_slices_go_at_once(autojump_clock: MockClock) -> None:
    link, window = Link(2.5 * MB, size_bytes=16 << 10), SendWindow()
    await link.carry(window, parts_of("abcdef", 12))
    assert link.most == 12


async def test_a_frozen_owner_holds_no_other_back(autojump_clock: MockClock) -> None:
    link, window = Link(2.5 * MB, frozen="b"), SendWindow()
    with trio.move_on_after(600.0) as scope:
        await link.carry(window, parts_of("abcd", 12))
    assert scope.cancelled_caught
    assert sorted(link.arrivals) == [index for index in range(12) if index % 4 != 1]
    began = trio.current_time() - 600.0
    assert max(link.arrivals.values()) - began < 1.2 * 18 / 2.5 + 2 * PATIENCE_S
    assert await Link(2.5 * MB).carry(window, parts_of("abcd", 4)) < 4.0, "nothing of it stays"


async def test_an_owner_has_no_more_than_half_of_the_window_beside_others(autojump_clock: MockClock) -> None:
    link, window = Link(2.5 * MB), SendWindow()
    seen = set[tuple[str, ...]]()

    async def send(owner: str, index: int) -> bool:
        taken = await link.send(owner, index)
        seen.add(tuple(sorted(link.to)))
        return taken

    await window.send_all({"a": [0, 1, 2, 3], "b": [4, 5, 6, 7]}, [2 * MB] * 8, send)
    assert ("a", "a") not in seen and ("b", "b") not in seen
