"""Having pages before they are needed: those of the present plan, then of the likely next one, then rare ones.

    holding(samples) waits for its pages -> expect(plan) fetches ahead -> idle: ranges that too few peers keep

Tasks take the most urgent page that is not here: the held-out page, what is waited for, what is expected, and a page of
a rare range where the cache has room for it. A page without a holder is one event; it is tried again with a growing
pause, and nothing else waits for it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Final, Protocol

import numpy as np
import trio
from blake3 import blake3

from peer.catalogue.pages import CacheShrunk, PageDamaged, PageMissing, SamplesAwaited
from peer.data.pages.corpus import PAGES_MAX, pages_of
from peer.data.pages.library import PageLibrary
from peer.errors import BarnraiseError
from peer.events import EventLog
from peer.ipc.corpus_messages import PageFolders
from peer.net.backoff import Backoff
from peer.notifier import Notifier
from swarm.pages.holders import SAFE_HOLDERS, PageHolders
from swarm.protocol.ledger import Range

FETCHES: Final = 3  # at a time
LOOK_S: Final = 0.25
LOOK_RARE_S: Final = 2.0
AWAITED_S: Final = 0.05  # a shorter wait is no event
RETRY_S: Final = 1.0
RETRY_MAX_S: Final = 60.0
KEPT_SHARE: Final = 0.5
"""Of the cache: so much of it is for pages that few others keep, whether or not this peer trains on them."""


class PageSource(Protocol):
    """Where a page comes from that is not here."""

    async def __call__(self, page: int) -> bytes:
        """Return the page, checked. Raises NetworkError; ConfigError where no peer can train on it."""
        ...


class PageSupply:
    """The supply of a peer in a run of pages (`swarm.protocol.samples.SampleSupply`). `run` must be running.

    Events: samples_awaited, page_missing, page_damaged, cache_shrunk."""

    def __init__(
        self,
        library: PageLibrary,
        folders: PageFolders,
        fetch: PageSource,
        holders: PageHolders,
        seed: int,
        events: EventLog,
        is_busy: Callable[[], bool] = lambda: False,
    ) -> None:
        """`seed`: of the order of samples. Rare pages are not fetched while `is_busy()`: an exchange needs the
        link, or the machine's owner."""
        self.folders: PageFolders | None = folders
        self._library, self._index, self._fetch, self._holders = library, library.index, fetch, holders
        self._seed, self._events, self._is_busy = seed, events, is_busy
        self._ready = set[int]()  # pages that were looked at and are here
        self._pinned = Counter[int]()  # by how many blocks
        self._awaited = Counter[int]()
        self._expected: list[int] = []
        self._plan: tuple[Range, ...] = ()
        self._under_way = set[int]()
        self._kept, self._kept_at = (
            list[int](),
            (0, 0, tuple[int, ...]()),
        )  # the answer of `_kept_for_others`, and what it is for
        self._failed = Backoff(RETRY_S, RETRY_MAX_S)
        self._wanted, self._came = Notifier(), Notifier()
        self._rares_at = -math.inf  # when to look for rare pages again
        self._told_missing = set[int]()
        self._told_damaged = 0
        self._held_out = library.index.train.pages

    # -- what trainers ask -------------------------------------------------------------------------------------------

    @property
    def has_held_out(self) -> bool:
        """Whether the page that the held-out loss is measured on is here."""
        return self._held_out in self._ready

    def expect(self, ranges: Sequence[Range]) -> None:
        """Fetch the pages of this plan, and those of the next one, which likely has this peer's next samples as far
        ahead as this one has them of the last."""
        plan = tuple(ranges)
        if not plan or plan == self._plan:
            return
        following = _shifted(plan, self._plan)
        self._plan = plan
        self._expected = pages_of(self._index, (*plan, *following), self._seed)
        self._wanted.notify()

    @asynccontextmanager
    async def holding(
        self, ranges: Sequence[Range], timeout_s: float = math.inf, enough: Callable[[], bool] = lambda: False
    ) -> AsyncIterator[tuple[Range, ...]]:
        """As `SampleSupply.holding`."""
        pages = pages_of(self._index, ranges, self._seed)
        self._pinned.update(pages)
        try:
            yield await self._until_held(pages, ranges, timeout_s, enough)
        finally:
            self._pinned.subtract(pages)
            self._pinned += Counter()  # drops zeros

    async def _until_held(
        self, pages: Sequence[int], ranges: Sequence[Range], timeout_s: float, enough: Callable[[], bool]
    ) -> tuple[Range, ...]:
        began = trio.current_time()
        self._awaited.update(pages)
        try:
            await self._look_at(pages)
            missing = [page for page in pages if page not in self._ready]
            if missing:
                self._wanted.notify()
                while not (enough() or self._is_enough(missing) or trio.current_time() - began >= timeout_s):
                    await self._came.wait(LOOK_S)
        finally:
            self._awaited.subtract(pages)
            self._awaited += Counter()
        waited_s = trio.current_time() - began
        if missing and waited_s > AWAITED_S:
            self._events.emit(SamplesAwaited(seconds=round(waited_s, 3), pages=len(missing)))
        here = {page for page in pages if page in self._ready}
        all_here = len(here) == len(pages) < PAGES_MAX
        return tuple(ranges) if all_here else self._prefix(ranges, here)

    def _is_enough(self, missing: Sequence[int]) -> bool:
        """Whether waiting brings nothing more: all are here that the cache has room for."""
        room_for = {*self._needed()}
        return all(page in self._ready or page not in room_for for page in missing)

    def _prefix(self, ranges: Sequence[Range], here: Collection[int]) -> tuple[Range, ...]:
        """Return the first samples of `ranges` that lie in those pages."""
        found = list[Range]()
        for first, last in ranges:
            end = first
            for start, stop, page in self._cuts(first, last):
                if page not in here:
                    break
                assert start == end
                end = stop
            if end > first:
                found.append((first, end))
            if end < last:
                break
        return tuple(found)

    def _cuts(self, first: int, last: int) -> Iterator[tuple[int, int, int]]:
        """Yield a range in pieces that lie in one page each, and the page."""
        at, windows = first, self._index.train.windows
        while at < last:
            epoch, within = divmod(at, windows)
            position = within // self._index.page_windows
            stop = min(last, epoch * windows + min((position + 1) * self._index.page_windows, windows))
            (page,) = pages_of(self._index, [(at, at + 1)], self._seed)
            yield at, stop, page
            at = stop

    # -- fetching ----------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Fetch what is wanted until cancelled."""
        await self._look_at([self._held_out])
        async with trio.open_nursery() as nursery:
            for _ in range(FETCHES):
                nursery.start_soon(self._fetch_wanted)

    async def _fetch_wanted(self) -> None:
        while True:
            page = self._next()
            if page is None:
                await self._wanted.wait(LOOK_S)
                continue
            self._under_way.add(page)
            try:
                await self._bring(page)
            finally:
                self._under_way.discard(page)
                self._came.notify()

    def _next(self) -> int | None:
        """Return the most urgent page that is not here."""
        found = next((page for page in self._needed() if self._may_fetch(page)), None)
        now = trio.current_time()
        if found is None and now >= self._rares_at and not self._is_busy() and not self._under_way:
            found = next((page for page in self._rare() if self._may_fetch(page)), None)
            self._rares_at = now + LOOK_RARE_S if found is None else now
        return found

    def _needed(self) -> Iterator[int]:
        """Yield the pages that this peer trains on, the most urgent first, as many as the cache has room for beside the
        rare ones."""
        cache = self._library.cache
        room = cache.limit_bytes - sum(map(self._index.page_bytes, self._kept_for_others()))
        for page in self._urgent():
            if page in cache.held or page not in self._library:
                room -= self._index.page_bytes(page)
            if room < 0:
                break
            yield page

    def _urgent(self) -> dict[int, None]:
        """Return all pages that this peer trains on, the most urgent first."""
        return dict.fromkeys((self._held_out, *self._awaited, *self._pinned, *self._expected))

    def _kept_for_others(self) -> list[int]:
        """Return the pages of the cache that stay, although this peer does not train on them now, because too few
        others keep them: within their share of it."""
        cache, view, urgent = self._library.cache, self._holders.view, self._urgent()
        if view is None:
            return []
        known = (id(view.counts), len(cache.held), tuple(urgent))
        if known != self._kept_at:  # it is asked for several times a second, and there may be thousands
            few = {int(number) for number in np.flatnonzero(view.counts <= SAFE_HOLDERS)}
            room, kept = KEPT_SHARE * cache.limit_bytes, list[int]()
            for page in [*cache.held]:
                if page not in urgent and view.ranges.of(page) in few:
                    room -= self._index.page_bytes(page)
                    if room < 0:
                        break
                    kept.append(page)
            self._kept, self._kept_at = kept, known
        return self._kept

    def _may_fetch(self, page: int) -> bool:
        return page not in self._ready and page not in self._under_way and not self._failed.paused(str(page))

    def _rare(self) -> Iterator[int]:
        """Yield the pages of a range that fewer than `SAFE_HOLDERS` peers keep, if the cache has room for it: of all
        such ranges the one that this peer's own order has first, so that peers take different ones."""
        view, cache, me = self._holders.view, self._library.cache, self._holders.me
        if view is None or not view.kept or self._library.has_all:
            return
        room = KEPT_SHARE * cache.limit_bytes - sum(map(self._index.page_bytes, self._kept_for_others()))
        if room < self._index.page_bytes(self._held_out):
            return
        for number in sorted(view.rare(SAFE_HOLDERS, me), key=partial(_rendezvous, me)):
            wanted = [page for page in view.ranges.pages_of(number) if page not in self._library]
            if wanted and sum(map(self._index.page_bytes, wanted)) <= room:
                yield from wanted
                return

    async def _bring(self, page: int) -> None:
        """Have a page here: it may be, unchecked; else fetch and keep it."""
        await self._look_at([page])
        if page in self._ready:
            return
        try:
            data = await self._fetch(page)
        except BarnraiseError as error:
            self._failed.failed(str(page))
            self._tell_missing(page, str(error))
            return
        self._failed.reset(str(page))
        self._told_missing.discard(page)
        await self._keep(page, data)

    def _tell_missing(self, page: int, reason: str) -> None:
        """Tell once of a page that does not come, however often it is tried."""
        if page not in self._told_missing:
            self._told_missing.add(page)
            self._events.emit(PageMissing(page=page, reason=reason))

    async def _keep(self, page: int, data: bytes) -> None:
        cache = self._library.cache
        limit_bytes = cache.limit_bytes
        kept = {*self._needed(), *self._kept_for_others()}
        before = {*cache.held}
        try:
            put = partial(self._library.put, page, data, kept)
            has_room = await trio.to_thread.run_sync(put)
        except OSError as error:
            self._failed.failed(str(page))
            self._tell_missing(page, f"the cache cannot be written ({error.strerror})")
            return
        self._ready -= before - {*cache.held}
        if has_room:
            self._ready.add(page)
            self._holders.announce()
        else:
            self._failed.failed(str(page))
        if cache.limit_bytes < limit_bytes:
            self._events.emit(CacheShrunk(limit_bytes=cache.limit_bytes))

    async def _look_at(self, pages: Sequence[int]) -> None:
        """Look which of the pages are here and intact; they are then the ones that were used last."""
        present = [page for page in pages if page in self._library]
        if not present:
            return

        def use() -> list[int]:
            return [page for page in present if self._library.use(page)]

        intact = await trio.to_thread.run_sync(use)
        self._ready.update(intact)
        self._ready -= {*present} - {*intact}
        for page, path in list(self._library.damaged.items())[self._told_damaged :]:
            self._told_damaged += 1
            self._events.emit(PageDamaged(page=page, path=str(path)))


def _rendezvous(peer: str, number: int) -> bytes:
    return blake3(f"{peer}/{number}".encode()).digest()


def _shifted(plan: Sequence[Range], before: Sequence[Range]) -> tuple[Range, ...]:
    """Return the likely next plan, with half of its length more on either side: shares change from plan to plan."""
    size = sum(last - first for first, last in plan)
    start, end = plan[-1][1] - size, plan[-1][1]
    by = end - before[-1][1] if before and end > before[-1][1] else size
    return ((max(0, start + by - size // 2), end + by + size // 2),)
