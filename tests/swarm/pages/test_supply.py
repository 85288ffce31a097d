"""Having pages before they are needed: what is fetched, in which order, and what stays in the cache."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import trio

from peer.data.pages.cache import PageCache
from peer.data.pages.corpus import pages_of
from peer.data.pages.folder import BuiltPages, read_page
from peer.data.pages.index import PAGE_BYTES_MAX
from peer.data.pages.library import PageLibrary
from peer.errors import NetworkError
from peer.events import Event, EventLog
from peer.ipc.corpus_messages import PageFolders
from swarm.pages.holders import PageHolders
from swarm.pages.holdings import HoldingsRecord, PageRanges
from swarm.pages.supply import PageSupply
from tests.peer.data.pages.data_sets import write_data_set

SEQ_LEN = 4095
A_PAGE = 512  # windows
PAGES = 9  # to train on; page 9 is held out
SEED = 5


@dataclass
class Scene:
    supply: PageSupply
    holders: PageHolders
    cache: PageCache
    built: BuiltPages
    asked: list[int] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    lost: set[int] = field(default_factory=set)
    came: trio.Event = field(default_factory=trio.Event)

    def told(self, name: str) -> list[Event]:
        return [event for event in self.events if event.name == name]

    def learn(self, **kept: Sequence[int]) -> None:
        """Read records by which each peer keeps these pages."""
        assert self.holders.view is not None
        encode = self.holders.view.ranges.encode
        self.holders.view.learn({peer: HoldingsRecord(at=0.0, kept=encode({*held})) for peer, held in kept.items()})

    def order(self, first: int, last: int) -> list[int]:
        return pages_of(self.built.index, [(first, last)], SEED)

    async def until(self, held: Sequence[int]) -> None:
        with trio.fail_after(30):
            while not {*held} <= {*self.cache.held}:
                await trio.sleep(0.005)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> BuiltPages:
    folder = tmp_path_factory.mktemp("set")
    write_data_set(folder, seq_len=SEQ_LEN, windows=PAGES * A_PAGE)
    return BuiltPages.open(folder)


@asynccontextmanager
async def opened(tmp_path: Path, built: BuiltPages, room: int, own: BuiltPages | None = None) -> AsyncIterator[Scene]:
    """A supply whose cache has room for that many pages, and whose fetches succeed at once."""
    log = EventLog()
    cache = PageCache(tmp_path / "cache", built.index, room * PAGE_BYTES_MAX)
    cache.open()
    library = PageLibrary(built.index, cache, own)
    holders = PageHolders(cast(Any, None), cast(Any, None), "run", "me", log)
    holders.begin(built.index.pages, lambda: library.held)

    async def fetch(page: int) -> bytes:
        scene.asked.append(page)
        await trio.lowlevel.checkpoint()
        if page in scene.lost:
            raise NetworkError("no peer that can be reached keeps it")
        return read_page(built.index, page, built.find(page))

    supply = PageSupply(library, PageFolders("", ""), fetch, holders, SEED, log)
    scene = Scene(supply, holders, cache, built)
    with log.subscribed(scene.events.append):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(supply.run)
            yield scene
            nursery.cancel_scope.cancel()


async def test_what_is_waited_for_comes_and_stays_inside_the_block(tmp_path: Path, built: BuiltPages) -> None:
    async with opened(tmp_path, built, room=4) as scene:
        ranges = ((0, A_PAGE + 10),)
        first, second = scene.order(0, A_PAGE + 10)
        async with scene.supply.holding(ranges) as here:
            assert here == ranges and {first, second} <= {*scene.cache.held}
            scene.supply.expect([(4 * A_PAGE, 7 * A_PAGE)])
            await scene.until([scene.order(4 * A_PAGE, 4 * A_PAGE + 1)[0]])
            assert {first, second} <= {*scene.cache.held}, "they are trained on"
        async with scene.supply.holding(ranges) as here:
            assert here == ranges
        assert scene.supply.has_held_out


async def test_a_plan_brings_its_pages_and_those_of_the_next_one(tmp_path: Path, built: BuiltPages) -> None:
    async with opened(tmp_path, built, room=20) as scene:
        scene.supply.expect([(0, A_PAGE)])
        await scene.until(scene.order(0, 2 * A_PAGE))
        scene.supply.expect([(3 * A_PAGE, 4 * A_PAGE)])  # three pages on: two other peers
        await scene.until(scene.order(3 * A_PAGE, 4 * A_PAGE))
        await scene.until(scene.order(5 * A_PAGE, 8 * A_PAGE))  # half a plan on either side
        before = len(scene.asked)
        async with scene.supply.holding([(6 * A_PAGE, 7 * A_PAGE)]):
            assert not scene.told("samples_awaited")
        assert len(scene.asked) == before == len({*scene.asked}), "each page once"


async def test_a_plan_larger_than_the_cache_is_trained_as_far_as_it_fits(tmp_path: Path, built: BuiltPages) -> None:
    async with opened(tmp_path, built, room=4) as scene:  # one of them holds the held-out page
        ranges = ((0, 5), (5, 6 * A_PAGE))
        scene.supply.expect(ranges)
        for _ in range(3):
            async with scene.supply.holding(ranges) as here:
                assert here[0] == (0, 5) and here[-1][1] in (3 * A_PAGE, 4 * A_PAGE)
        assert len(scene.asked) == len({*scene.asked}) <= 5, "no page pushes another one out in turn"
        assert scene.cache.held_bytes <= scene.cache.limit_bytes


async def test_a_page_that_nobody_has_is_told_once_and_nothing_else_stops(tmp_path: Path, built: BuiltPages) -> None:
    async with opened(tmp_path, built, room=20) as scene:
        lost = scene.order(A_PAGE, A_PAGE + 1)[0]
        scene.lost.add(lost)
        ranges = ((7, 3 * A_PAGE),)
        scene.supply.expect(ranges)
        async with scene.supply.holding(ranges, timeout_s=3.0) as here:
            assert here == ((7, A_PAGE),), "the samples before it"
        assert {*scene.order(2 * A_PAGE, 3 * A_PAGE)} <= {*scene.cache.held}
        assert [event.fields["page"] for event in scene.told("page_missing")] == [lost]
        assert scene.asked.count(lost) > 1
        scene.lost.clear()
        async with scene.supply.holding(ranges) as here:
            assert here == ranges
        assert scene.told("samples_awaited")


async def test_a_round_that_must_end_waits_for_no_page(tmp_path: Path, built: BuiltPages) -> None:
    async with opened(tmp_path, built, room=20) as scene:
        scene.lost.update(range(PAGES))
        over = False

        async def end() -> None:
            nonlocal over
            await scene.until([PAGES])  # the held-out page
            over = True

        async with trio.open_nursery() as nursery:
            nursery.start_soon(end)
            async with scene.supply.holding([(0, 9)], math.inf, lambda: over) as here:
                assert here == ()


async def test_rare_pages_are_taken_while_there_is_room_for_them(tmp_path: Path, built: BuiltPages) -> None:
    async with opened(tmp_path, built, room=8) as scene:
        scene.learn(coordinator=range(PAGES + 1), other=[0, 1, 2, 3])
        await scene.until([])
        with trio.fail_after(30):
            while len(scene.cache.held) < 5:  # the held-out page, and half of the cache
                await trio.sleep(0.005)
        assert {*scene.cache.held} <= {4, 5, 6, 7, 8, PAGES}
        assert {*scene.asked} == {*scene.cache.held}


async def test_pages_that_others_lack_are_not_pushed_out_by_training(tmp_path: Path, built: BuiltPages) -> None:
    async with opened(tmp_path, built, room=8) as scene:
        order = scene.order(0, PAGES * A_PAGE)
        rare = order[-2:]
        scene.learn(coordinator=range(PAGES + 1), other=[page for page in order if page not in rare], third=order[:7])
        await scene.until(rare)
        scene.learn(
            me=rare,
            coordinator=range(PAGES + 1),
            other=[page for page in order if page not in rare],
            third=order[:7],
        )
        for at in range(7):
            async with scene.supply.holding([(at * A_PAGE, (at + 1) * A_PAGE)]):
                assert {*rare} <= {*scene.cache.held}


async def test_a_folder_of_its_own_needs_no_other_peer(tmp_path: Path, built: BuiltPages) -> None:
    async with opened(tmp_path, built, room=2, own=built) as scene:
        ranges = ((0, PAGES * A_PAGE),)
        scene.supply.expect(ranges)
        async with scene.supply.holding(ranges) as here:
            assert here == ranges
        assert not scene.asked


async def test_a_damaged_page_of_ones_own_folder_is_fetched_and_told(tmp_path: Path, built: BuiltPages) -> None:
    own = tmp_path / "own"
    write_data_set(own, seq_len=SEQ_LEN, windows=PAGES * A_PAGE)
    copy = BuiltPages.open(own)
    assert copy.index == built.index
    place = copy.find(2)
    with place.path.open("r+b") as file:
        file.seek(place.offset)
        file.write(b"damage!!")
    async with opened(tmp_path, built, room=2, own=copy) as scene:
        async with scene.supply.holding([(0, PAGES * A_PAGE)]) as here:
            assert here == ((0, PAGES * A_PAGE),)
        assert scene.asked == [2] and 2 in scene.cache.held
        assert [event.fields["page"] for event in scene.told("page_damaged")] == [2]


def test_records_name_ranges_that_are_kept_whole() -> None:
    small = PageRanges(10)
    assert (small.length, small.count) == (1, 10)
    assert small.decode(small.encode({0, 3, 9})).tolist() == [1, 0, 0, 1, 0, 0, 0, 0, 0, 1]
    assert small.encode(()) == b""
    large = PageRanges(5000)
    assert (large.length, large.count) == (3, 1667)
    held = {0, 1, 2, 3, 4, 4998, 4999}  # of the second range two of three
    assert np.flatnonzero(large.decode(large.encode(held))).tolist() == [0, 1666]
    assert len(large.encode(range(5000))) <= 256 and large.decode(large.encode(range(5000))).all()
    assert not large.decode(b"").any() and large.decode(b"\1").sum() == 1
    assert not large.decode(b"\xff" * 256).sum() > large.count
